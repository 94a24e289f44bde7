"""The work of a training step as stages; `hwgrpo.training.step_stages` has their order.

stage.py        what stages hand to each other, and the slots that they stand in
collect.py      prompts and responses
score.py        rewards
make_batch.py   advantages, and the batch to train on
log_probs.py    old and reference log-probs, where they can differ from the current ones
update.py       the optimizer's updates and what follows them, new weights to the rollout engine
capture.py      a step's files for `hwgrpo replay`
profile.py      a step's profile by torch
observe.py      metrics, notes and records
own_stage.py    stages of the user's own
"""
