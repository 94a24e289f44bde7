"""Loggers: where the metrics of each step go, by the names of `observe.loggers`.

jsonl             metrics.jsonl, and reading it back
tensorboard       TensorBoard events
wandb             Weights & Biases
trackio           trackio
swanlab           SwanLab
tracking_service  what the last three share
"""
