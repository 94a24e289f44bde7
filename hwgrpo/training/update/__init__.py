"""The optimizer updates of one step.

train_batch.py         from scored responses to the batch that is trained on
policy_update.py       micro-batches, global normalisers, the optimizer's step
token_budget.py        tokens per micro-batch, and less of them when memory runs out
group_batch.py   sequences that a group of ranks computes together
step_metrics.py        a step's metrics over all ranks
flops.py               floating-point operations of a pass
"""
