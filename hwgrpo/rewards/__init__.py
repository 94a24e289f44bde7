"""Rewards: verifiable ones by name, functions from files, their combination and the policy for failures.

verifiable.py        exact_match, gsm8k, format, length
mathematics.py       math, through math-verify
reward_loading.py    a name or `path/to/file.py:function` -> a function
functions.py         a function in verl's, TRL's or the batch form -> one call per batch
signatures.py        the form of a function, by the names of its parameters
async_functions.py   functions that are coroutines
randomness.py        the random state that rewards see, and leave as it was
failures.py          what stands in the place of a value
combine.py           the weighted sum
outcome.py           one function's values for a batch, with its failure policies applied
processes/           functions in processes of their own, which are killed when they hang
"""
