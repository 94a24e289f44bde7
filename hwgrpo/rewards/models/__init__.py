"""Rewards by models in the trainer's process.

reward_model.py           `reward_model`: a score per response from a sequence-classification model
process_reward_model.py   `process_reward_model`: a score per step, read at separator tokens
scored_text.py            prompt and response as the model's own chat template has them, and their tokens
pretrained.py             the model and its tokenizer from a folder or the hub, and what is wrong with them
placement.py              the device that a model scores on, and its way there and back
padded_batches.py         batches of a limited number of tokens
reward_losses.py          the losses that train a reward model: mse, classification, bradley_terry
"""
