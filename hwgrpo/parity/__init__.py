"""`hwgrpo parity`: one training step on a device against the same step by plain transformers in fp64 on the CPU.

settings.py     its settings, and those that may be chosen
fixed_step.py   the step: prompts, responses, rewards and log-probs that a seed determines
golden.py       the step in fp64, one sequence at a time, by formulas written out, and what rounding does to it
measured.py     the step by this project's parts, on a device
comparison.py   stage by stage: error, tolerance, verdict
"""
