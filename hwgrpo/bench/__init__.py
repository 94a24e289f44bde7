"""Measurements that a user can repeat: both sides of a ratio are timed in turns, in one run.

| file | what |
|---|---|
| `step.py` | one training step: its stages, and the update in every layout that the model can have |
| `table.py` | that measurement as text |
"""
