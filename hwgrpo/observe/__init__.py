"""Metrics, loggers, terminal, warnings and the closing summary.

observer.py       the one object that the training loop talks to
timing.py         seconds per stage of a step
kernel_table.py   the longest kernels of some work, by torch's profiler
loggers/          where metrics go
console/          progress in the terminal
custom_metrics.py   metrics of the user's own
completions.py    completions.jsonl, and the one sample that is shown
logged_images.py  thumbnails beside completions.jsonl
image_text.py     images in text
trajectory_text.py  trajectories as text: calls, turns
shown_fields.py   the metrics shown in panel and tables, and their format
history.py        history of a run for the summary
summary.py        summary.json and its picture
verdict.py        how a run went, in a headline
warnings.py       metrics that look unhealthy: when, and warnings.jsonl
detectors.py      the signs of trouble, one function each
series.py         the metrics so far, as detectors look back on them
saved_config.py   config.yaml of a run, read back
"""
