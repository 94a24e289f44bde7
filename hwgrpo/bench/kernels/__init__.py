"""`hwgrpo bench kernels`: the kernels beside their definition, beside eager torch, and beside other projects' kernels.

problem.py         hidden states, head, logits and targets of one shape
exact.py           the results in fp64, and how far another result is from them
cases.py           what is computed, and what it costs at least
sides.py           who computes it: ours, the definition, eager torch
peers/             other projects' kernels, one file each
clock.py           device events, processor time or wall time; samples of rounds
ceiling.py         what the chip reaches at best: a GEMM, a copy
peak.py            memory beyond inputs and results
measure.py         all of it in one run, in turns
kernel_result.py   what was measured, and its JSON document
kernel_tables.py   the same for people
compare.py         two to four such documents side by side
bar_chart.py       the same as an SVG
"""
