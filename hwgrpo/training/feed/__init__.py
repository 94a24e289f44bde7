"""Where the batches of each step come from.

prompt_source.py        prompts, in the same order on every number of ranks
response_source.py      responses: the interface, and those generated on demand
prefetcher.py           responses that a thread generates while earlier steps are trained
prefetched_batches.py   prefetched batches as a file of a checkpoint
"""
