"""Sources of each step's prompts and responses.

prompt_source.py        prompts, in the same order on any number of ranks
response_source.py      responses of a step: the interfaces
collector.py            how they are collected: as drawn or filtered, with greedy responses beside them
group_filter.py         groups whose rewards differ, others are sampled in place of the rest
difficulty_report.py    rewards of groups, reported to a sampler that sets prompts aside
on_demand.py            collected when a step asks for them
prefetcher.py           collected by a thread while earlier steps are trained
prefetched_batches.py   prefetched batches as a file of a checkpoint
scored_groups.py        groups of scored responses as single values, and as tensors of a file
group_files.py          surplus and replayed groups as a file of a checkpoint
weight_probes.py        whether the engine samples with the weights that it was sent
"""
