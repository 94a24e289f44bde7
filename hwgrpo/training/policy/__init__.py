"""The policy that strategies wrap, and its micro-batches.

policy_model.py      backbone, LM head and loss in one forward
sharding_checks.py   what the policy's passes need of a strategy that shards it
head_operand.py      the LM head's weight, cast once per update
reference_model.py   the frozen model of the KL term
layouts.py           which sequences share a row: padded, packed, grouped
row_members.py       the sequences of rows, and the tokens with which several responses begin
micro_batch.py       the split into micro-batches, and the input of one forward pass
layout_check.py      the startup check that a model supports a layout
auto_settings.py     settings left at `auto`
sequence_group.py    ranks that share the tokens of their sequences
sequence_shard.py    one rank's shard of a micro-batch
rank0_weights.py     weights read by rank 0 and broadcast unit by unit
"""
