"""What a run will need, worked out before it starts: `hwgrpo train --dry-run` and `hwgrpo plan`.

dry_run.py            the plan of a run on this machine, and what it would be refused for
reward_probe.py       the reward functions tried on one row
scale_plan.py         a run on devices that need not be here: memory and time per chip
memory.py             bytes that a device and its host hold
planned_sharding.py   how the strategy of a run, or one that is asked for, shards state
model_shape.py        sizes of a model, from its configuration
step_time.py          seconds of a step, from a chip's rates
"""
