"""The optimizer updates of one step.

train_batch        from scored responses to the batch that is trained on
policy_update      micro-batches, global normalisers, the optimizer's step
token_budget       tokens per micro-batch, and less of them when memory runs out
sequence_exchange  sequences that a group of ranks computes together
step_metrics       a step's metrics over all ranks
flops              floating-point operations of a pass
"""
