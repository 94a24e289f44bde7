"""The policy as strategies wrap it, and the micro-batches that it reads.

policy_model     backbone, LM head and loss in one forward
reference_model  the frozen model of the KL term
layouts          which sequences share a row: padded, packed, grouped
micro_batch      what one forward pass reads
layout_check     the startup check that a model honours a layout
auto_settings    settings left at `auto`
sequence_group   ranks that share the tokens of their sequences
sequence_shard   one rank's part of a micro-batch
sharded_head     the LM head's weight under FSDP2 and ZeRO-3
rank0_weights    weights that rank 0 reads and every rank gets its part of
"""
