"""`hwgrpo bench`: measurements that a user can repeat. Sides of a comparison take turns within one run.

step.py                one training step: its stages, and its update in every layout
layout_comparison.py   which layouts a model can have, and whether they compute what padded rows do
times.py               seconds of the rounds, and what becomes of them
work.py                floating-point operations and tokens of an update
step_result.py         what was measured, and its JSON document
step_tables.py         the same for people
terminal.py            tables on a terminal and elsewhere
machine.py             what a measurement ran on
kernels/               the log-prob and loss kernels beside others'
"""
