"""The policy that strategies wrap, and its micro-batches.

policy_model.py      backbone, LM head and loss in one forward
sharding_checks.py   errors for a policy sharded in a way in which its forward lacks weights
reference_model.py   the frozen model of the KL term
layouts.py           which sequences share a row: padded, packed, grouped
micro_batch.py       the split into micro-batches, and the input of one forward pass: rows, and tokens fed once
layout_check.py      the startup check that a model supports a layout
auto_settings.py     settings left at `auto`
sequence_shard.py    ranks that share the tokens of their sequences, and one rank's shard of a micro-batch
rank0_weights.py     weights read by rank 0 and broadcast unit by unit
"""
