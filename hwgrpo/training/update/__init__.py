"""The optimizer updates of one step.

train_batch.py     from scored responses to the batch to train on
policy_update.py   micro-batches, global normalisers, the optimizer's step
training_pass.py   one forward and backward pass, with the reference's forward for the full KL
token_budget.py    tokens per micro-batch, halved when memory runs out
advantage_inputs.py  passes before advantages: the KL in the reward, probabilities of tokens
reward_kl.py       the KL in the reward, before advantages
group_batch.py     the sequences that a group of ranks computes together
step_metrics.py    a step's metrics over all ranks
failure_notes.py   lines on failed rewards and late groups
old_policy.py      old log-probs without a pass: between the engine's and the current ones
greedy_rewards.py  rewards of greedy responses, the baseline of the others
reward_shuffle.py  shuffled rewards, for control runs
update_tokens.py   selections that compare all tokens of an update
flops.py           floating-point operations of a pass
"""
