"""Rewards by models in the trainer's process.

reward_model.py           `reward_model`: a score per response from a sequence-classification model
process_reward_model.py   `process_reward_model`: a score per step, read at separator tokens
online_reward_model.py    `online_reward_model`: trained during the run on outcomes of a rule
outcomes.py               which responses the rule verifies; the replay buffer
reward_training.py        its updates
reward_losses.py          losses of reward models
outcome_metrics.py        agreement of scores with outcomes
score_ranking.py          how well scores order responses
score_head.py             heads with one score: which models have one, and new ones
sequence_logits.py        logits of rows of tokens
scored_text.py            prompt and response as the model's own chat template has them, and their tokens
pretrained.py             the model and its tokenizer from a folder or the hub, and what is wrong with them
placement.py              the device that a model scores on, and its way there and back
padded_batches.py         batches of a limited number of tokens
reward_losses.py          the losses that train a reward model: mse, classification, bradley_terry
"""
