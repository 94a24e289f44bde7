"""Reports on runs, from their folders: one HTML page of a run, and the comparison of runs.

run_data.py              contents of a run's folder, also of a run that is in progress or was killed
resume_rows.py           resumes as rows: from which machine to which, and what differed
compact_completions.py   completions.jsonl as compact columns, thinned out to a limit
inlined_images.py        thumbnails of images as data URIs
page.py                  the page: data, settings and assets put together
assets/                  the page's HTML, CSS and JavaScript, joined into one file when the page is written
loaded_run.py            a run as it is compared: its record and its logged completions
run_comparison.py        where the curves of two runs part, and the verdict
compared_metrics.py      the metrics that are compared, by stage of the step
curve_noise.py           whether the gap between two curves is larger than their noise
run_differences.py       settings, versions, machine, data, start and warnings that differ
"""
