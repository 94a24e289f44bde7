"""Rewards by models in the trainer's process, and the parts of further ones.

reward_model.py           `reward_model`: a score per response from a sequence-classification model
trained_reward.py         what a run needs of a reward whose model it trains
score_head.py             heads with one score: which models have one, and new ones
sequence_logits.py        logits of rows of tokens
scored_text.py            prompt and response as the model's own chat template has them, and their tokens
pretrained.py             the model and its tokenizer from a folder or the hub, and what is wrong with them
placement.py              the device that a model scores on, and its way there and back
padded_batches.py         batches of a limited number of tokens
"""
