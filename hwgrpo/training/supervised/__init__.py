"""Supervised training: the steps of `hwgrpo sft`, on the parts of a GRPO run without engine and rewards.

supervised_setup.py  the parts of a run, from its settings
steps.py             one step: examples -> batch -> update -> observe; and the validation
example_batch.py     examples -> the TrainBatch of a step
"""
