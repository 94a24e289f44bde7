"""Where the batches of each step come from.

prompt_source       prompts, in the same order on every number of ranks
response_source     responses: generated when asked for, or prefetched by a thread
prefetched_batches  prefetched batches as a file of a checkpoint
"""
