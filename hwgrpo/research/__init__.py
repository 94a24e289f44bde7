"""Research on rewards: models that score steps, models trained during a run, and their training beforehand.

process_reward_model.py  `process_reward_model`: a score per step, read at separator tokens
online_reward_model.py   `online_reward_model`: trained during the run on outcomes of a rule
outcomes.py              which responses the rule verifies; the replay buffer
outcome_metrics.py       agreement of scores with outcomes
reward_training.py       the updates of a model that is trained during the run
reward_losses.py         losses of reward models: mse, classification, bradley_terry
score_ranking.py         how well scores order responses
reward_model_run.py      `hwgrpo reward-model`: the parts of a run, from its settings
scored_examples.py       rows -> examples: responses with a score, or pairs of them
score_model.py           the model that strategies wrap: tokens -> scores
reward_update.py         the optimizer updates, with one of three losses
reward_steps.py          one step: examples -> update -> observe; and the validation
"""
