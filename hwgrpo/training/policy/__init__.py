"""The policy as strategies wrap it, and the micro-batches that it reads.

policy_model.py      backbone, LM head and loss in one forward
reference_model.py   the frozen model of the KL term
layouts.py           which sequences share a row: padded, packed, grouped
micro_batch.py       what one forward pass reads
layout_check.py      the startup check that a model honours a layout
auto_settings.py     settings left at `auto`
sequence_group.py    ranks that share the tokens of their sequences
sequence_shard.py    one rank's part of a micro-batch
rank0_weights.py     weights that rank 0 reads and every rank gets its part of
"""
