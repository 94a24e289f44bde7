"""`hwgrpo bench`: reproducible measurements. The sides of a comparison are measured in turns within one run.

step.py                one training step: its stages, and its update in every layout
layout_comparison.py   the layouts a model supports, compared with padded rows
loss_comparison.py     what each policy loss costs in an update, beside ppo_clip
decode_profile.py      a decode step by rows and capacity, with and without device graphs
update_profile.py      passes of an update by layout and attention, over batches of new lengths
shaped_model.py        random models of published shapes
times.py               seconds per round, and their statistics
work.py                floating-point operations and tokens of an update
step_result.py         the result of a step benchmark as a JSON document
step_tables.py         the result as tables
terminal.py            tables on a terminal and elsewhere
machine.py             facts about the machine of a measurement
ledger/                kernels of a step on a GPU, counted without one
kernels/               the log-prob and loss kernels against others'
"""
