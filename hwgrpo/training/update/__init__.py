"""The optimizer updates of one step.

train_batch.py     from scored responses to the batch to train on; old log-probs without a pass
policy_update.py   micro-batches, global normalisers, the optimizer's step
sample_scores.py   what a machine computes of a few short sequences, and how far rounding moves it
token_budget.py    tokens per micro-batch, halved when memory runs out
advantage_inputs.py  before advantages: the KL in the reward, probabilities of tokens, shuffled rewards
group_batch.py     the sequences that a group of ranks computes together
step_metrics.py    a step's metrics over all ranks; lines on failed rewards and late groups
greedy_rewards.py  rewards of greedy responses, the baseline of the others
flops.py           floating-point operations of a pass
"""
