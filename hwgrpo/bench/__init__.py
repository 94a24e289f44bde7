"""`hwgrpo bench`: measurements that a user can repeat. Sides of a comparison take turns within one run.

step      one training step: its stages, and its update in every layout
layouts   which layouts a model can have, and whether they compute what padded rows do
times     seconds of the rounds, and what becomes of them
work      floating-point operations and tokens of an update
result    what was measured, and its JSON document
machine   what it was measured on
terminal  tables on a terminal and elsewhere
show      the same for people
kernels/  the log-prob and loss kernels beside others'
"""
