"""The run report: one HTML page with all of a run, which needs only a browser.

run_data.py              contents of a run's folder, also of a run that is in progress or was killed
compact_completions.py   completions.jsonl as compact columns, thinned out to a limit
page.py                  the page: data, settings and assets put together
assets/                  the page's HTML, CSS and JavaScript, joined into one file when the page is written
"""
