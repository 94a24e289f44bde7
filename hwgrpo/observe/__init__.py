"""Metrics, loggers, progress and the closing summary.

observer     the one object that the training loop talks to
timing       seconds per stage of a step
jsonl        metrics.jsonl, and reading it back
tensorboard  the same numbers as TensorBoard events
completions  completions.jsonl, and the one sample that is shown
jsonlines    files of JSON lines that survive a kill and can be cut back to a step
fields       the numbers that a person is shown: where each is found, how it is written
progress     one line per step; choosing between lines, the live panel and silence
panel        the live panel on a terminal
history      what the summary remembers of a run
summary      summary.json and its picture
warnings     what looks unwell, told in words: when, and warnings.jsonl
detectors    the signs of trouble, one function each
series       the metrics so far, as detectors look back on them
settings     config.yaml of a run, read back
service      what loggers to outside services share
wandb        Weights & Biases
trackio      trackio
swanlab      SwanLab
"""
