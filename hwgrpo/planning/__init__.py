"""What a run will need, worked out before it starts: `hwgrpo train --dry-run` and `hwgrpo plan`.

dry_run           the plan of a run on this machine, and what it would be refused for
reward_probe      the reward functions tried on one row
scale_plan        a run on devices that need not be here: memory and time per chip
memory            bytes that a device and its host hold
activations       bytes of activations
sharding          how each strategy shards state
model_shape       sizes of a model, from its configuration
parameter_shapes  its parameters, by the unit that is gathered
step_time         seconds of a step, from a chip's rates
"""
