"""Rewards: verifiable ones by name, functions from files, their combination and the policy for failures.

verifiable   exact_match, gsm8k, format, length
mathematics  math, through math-verify
loading      a name or `path/to/file.py:function` -> a function
functions    a function in verl's, TRL's or the batch form -> one call per batch
waiting      async functions
process      a function with a timeout: called in processes of ours, which are killed when it hangs
pool         those processes: handing out calls, killing, replacing
child        one of them, seen from the trainer
worker       one of them, seen from inside
descendants  what a process started, in whatever session, found and ended
messages     what the two say to each other
failures     what stands in the place of a value
combine      the weighted sum, and what a failure costs
"""
