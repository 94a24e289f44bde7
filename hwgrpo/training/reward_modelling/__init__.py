"""Training of reward models: the steps of `hwgrpo reward-model`, on the parts of a supervised run.

reward_model_run.py  the parts of a run, from its settings
reward_steps.py      one step: examples -> update -> observe; and the validation
reward_update.py     the optimizer updates, with one of three losses
score_model.py       the model that strategies wrap: tokens -> scores
scored_examples.py   rows -> examples: responses with a score, or pairs of them
"""
