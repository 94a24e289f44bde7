"""Sources of each step's prompts and responses.

prompt_source.py        prompts, in the same order on any number of ranks
response_source.py      responses: the interface, and generation on demand
prefetcher.py           responses that a thread generates while earlier steps are trained
prefetched_batches.py   prefetched batches as a file of a checkpoint
group_filter.py         responses of groups whose rewards differ; others are sampled in place of the rest
difficulty_report.py    rewards of groups, reported to a sampler that sets prompts aside
scored_groups.py        groups of scored responses as single values
group_files.py          surplus and replayed groups as a file of a checkpoint
weight_probes.py        whether the engine samples with the weights that it was sent
"""
