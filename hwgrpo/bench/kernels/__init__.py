"""`hwgrpo bench kernels`: the kernels against their definition, eager torch and other projects' kernels.

problem.py         hidden states, head, logits and targets of one shape
exact.py           reference results in fp64, and the error of other results
cases.py           the computations, with their minimum FLOPs and bytes
sides.py           the implementations compared: ours, the definition, eager torch
peers/             other projects' kernels, one file each
clock.py           device events, processor time or wall time; samples of rounds
ceiling.py         measured ceilings of the chip: a GEMM, a copy
peak.py            peak memory beyond inputs and results
measure.py         measures all sides in turns, in one run
kernel_result.py   the result as a JSON document
kernel_tables.py   the result as tables
compare.py         two to four such documents side by side
bar_chart.py       the result as an SVG
"""
