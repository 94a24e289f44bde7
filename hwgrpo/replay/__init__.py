"""`hwgrpo replay`: a captured training step, run again on this machine and compared stage by stage.

replay_settings.py    the settings of a captured step, with those of the command line
replayed_model.py     the model with the weights before the step, from the capture, a checkpoint or model.path
recomputed_rewards.py texts and rewards from the captured tokens
results.py            what the model's passes compute of the captured step
rounding_effects.py   how far rounding moves these results on this machine
step_comparison.py    stage by stage: error, tolerance, verdict
peer_dumps.py         steps that TRL and verl wrote as text, and verl's rollouts with tokens
data_proto.py         verl's pickles, read without running code
peer_comparison.py    their rewards and advantages against those of the settings
"""
