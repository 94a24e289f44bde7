"""Rewards: verifiable ones by name, functions from files, their combination and the policy for failures.

verifiable.py        exact_match, format, length
ground_truths.py     a row's ground truth -> its right answers as texts
mathematics.py       math, through math-verify
verifiers/           further rule-based rewards: GSM8K, multiple choice, numbers, JSON, text, lengths
reward_loading.py    a registered name or `path/to/file.py:function` -> a function
functions.py         a function in verl's, TRL's or the batch form -> one call per batch
signatures.py        detection of a function's form by its parameters
async_functions.py   async functions
randomness.py        random numbers of reward functions
failures.py          exceptions of failed calls
stateful.py          rewards that are classes, whose objects are made once per run
reward_metrics.py    their metrics, over ranks, and running totals
checked_kwargs.py    checks of the kwargs of the rewards below
conversation.py      prompts of the rewards below, as chat messages and as text
models/              reward models in the trainer's process
services/            reward models, judges and rewards over HTTP
combine.py           the weighted sum
gates.py             functions without whose reward the others do not count
response_steps.py    the steps of a response: where they end in its text and its tokens
step_totals.py       the weighted sums of their rewards
failure_policy.py    one function's values for a batch, with the policies for its failures applied
processes/           functions in separate processes, which are killed on a timeout
"""
