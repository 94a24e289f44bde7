"""How one policy is trained by one or many processes. The trainer speaks to `Strategy` alone.

strategy.py                what a strategy does for the trainer
strategy_kind.py           what is known of one before it is made; those that come with hwgrpo
sharding.py                into how many parts state is sharded
parameter_shapes.py        a model's parameters, by the unit that is gathered
single.py, ddp.py          every rank has the full policy; replicated.py is what they share
fsdp2.py                   parameters, gradients and optimizer states sharded (fully_shard)
tensor_parallel_shard.py   its parameters where layers are sharded over a group of ranks too
deepspeed.py               ZeRO stages 1 to 3
deepspeed_host.py          what DeepSpeed needs of the host
deepspeed_shards.py        where ZeRO keeps a rank's part
param_shard.py             what a rank holds, in terms that all strategies share
optimizer.py               AdamW and the learning rate
stepping.py                an update with torch's own optimizer
process_group.py           joining the processes of a run
"""
