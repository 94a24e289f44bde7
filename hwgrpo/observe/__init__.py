"""Metrics, loggers, terminal, warnings and the closing summary.

observer.py       the one object that the training loop talks to
timing.py         seconds per stage of a step
loggers/          where metrics go
console/          what a terminal shows
custom_metrics.py   metrics of the user's own
completions.py    completions.jsonl, and the one sample that is shown
shown_fields.py   the numbers that a person is shown: where each is found, how it is written
history.py        what the summary remembers of a run
summary.py        summary.json and its picture
verdict.py        how a run went, in a headline
warnings.py       metrics that look unhealthy: when, and warnings.jsonl
detectors.py      the signs of trouble, one function each
series.py         the metrics so far, as detectors look back on them
saved_config.py   config.yaml of a run, read back
"""
