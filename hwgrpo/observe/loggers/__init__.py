"""Loggers: where the metrics of each step go, by the names of `observe.loggers`.

jsonl.py              metrics.jsonl, and reading it back
tensorboard.py        TensorBoard events
wandb.py, trackio.py, swanlab.py   services of these names
tracking_service.py   what these three share
"""
