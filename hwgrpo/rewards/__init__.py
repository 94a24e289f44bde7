"""Rewards: verifiable ones by name, functions from files, their combination and the policy for failures.

verifiable.py        exact_match, format, length
ground_truths.py     a row's ground truth -> its right answers as texts
mathematics.py       math, through math-verify
verifiers/           further rule-based rewards: GSM8K, multiple choice, numbers, JSON, text, lengths
functions.py         a function in verl's, TRL's or the batch form, async or not -> one call per batch
signatures.py        a name or `path/to/file.py:function` -> the function or a class's object, and its form
randomness.py        random numbers of reward functions
failures.py          exceptions of failed calls
reward_metrics.py    their metrics, over ranks, and running totals
checked_kwargs.py    checks of the kwargs of the rewards below
conversation.py      prompts of the rewards below, as chat messages and as text
models/              reward models in the trainer's process
services/            reward models, judges and rewards over HTTP
combine.py           the weighted sum, with gates
response_text.py     the text of responses that rewards and stop strings see
response_steps.py    the steps of a response: where they end in its text and its tokens, and their summed rewards
trajectory_outcomes.py  the reward `environment`, failed environments, turns as steps
failure_policy.py    one function's values for a batch, with the policies for its failures applied
processes/           functions in separate processes, which are killed on a timeout
"""
