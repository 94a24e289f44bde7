"""Strategies: how one or many processes train a policy. The trainer calls `Strategy` alone.

strategy.py                the interface
strategy_kind.py           how a strategy shards, checks and is made, without torch; the built-in ones
sharding.py                over how many devices each kind of state is sharded
parameter_shapes.py        a model's parameters, by the unit that is gathered
single.py, ddp.py          every rank has the full policy; replicated.py is their common base
fsdp2.py                   parameters, gradients and optimizer states sharded (fully_shard)
tensor_parallel_shard.py   its parameters under tensor parallelism
deepspeed.py               ZeRO stages 1 to 3
deepspeed_host.py          DeepSpeed's requirements on the host
deepspeed_shards.py        a rank's shards in ZeRO's optimizers
param_shard.py             a rank's shard of a parameter and its optimizer states, for all strategies
muon.py                    Muon for the matrices of the layers, AdamW for the rest
held_adamw.py              AdamW with states in host memory or in 8 bits
host_gradients.py          gradients that are summed in host memory
pinned_memory.py           pinned host memory in few blocks
optimizer.py               AdamW, the learning rate, the clipping of gradients, a step
process_group.py           the processes of a run, and small values that they exchange
thread_ranks.py            the same values, exchanged by another thread
rendezvous.py              joining them
lost_ranks.py              which rank is lost, where a collective fails
"""
