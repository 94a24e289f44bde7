"""Where the batches of each step come from.

prompt_source.py        prompts, in the same order on every number of ranks
response_source.py      responses: generated when asked for, or prefetched by a thread
prefetched_batches.py   prefetched batches as a file of a checkpoint
"""
