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
"""

from hwgrpo.registry import Registry

LOGGERS = Registry(
    "observe.loggers",
    {"jsonl": "hwgrpo.observe.jsonl:JsonlLogger", "tensorboard": "hwgrpo.observe.tensorboard:TensorBoardLogger"},
)
