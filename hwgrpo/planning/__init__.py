"""Estimates of a run before it starts: `hwgrpo train --dry-run` and `hwgrpo plan`.

dry_run.py            the plan of a run on this machine, and its missing requirements
reward_probe.py       the reward functions tested on one row
scale_plan.py         a run on devices that need not be here: memory and time per chip
planner.py            memory of a device under any settings of one model
alternatives.py       settings, strategies and devices with which a run fits
memory.py             bytes on a device and its host
reward_model_memory.py  those of reward models
planned_device.py     a device that need not be here, and the usable share of its memory
planned_sharding.py   how a run's strategy, or another, shards state
strategy_choice.py    `trainer.strategy=auto`
engine_choice.py      `rollout.engine=auto`
engine_share.py       `rollout.gpu_memory_utilization=null`
model_shape.py        sizes of a model, from its configuration
tower_shape.py        sizes of a vision tower, and what encoding images needs
step_time.py          seconds of a step, from a chip's rates
"""
