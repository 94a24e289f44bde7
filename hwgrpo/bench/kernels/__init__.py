"""`hwgrpo bench kernels`: the kernels beside their definition, beside eager torch, and beside other projects' kernels.

problem   hidden states, head, logits and targets of one shape
exact     the answers in fp64, and how far a result is from them
cases     what is computed, and what it costs at least
sides     who computes it: ours, the definition, eager torch
peers     other projects' kernels, one file each
clock     device events, processor time or wall time; samples of rounds
ceiling   what the chip reaches at best: a GEMM, a copy
peak      memory beyond inputs and results
measure   all of it in one run, in turns
result    what was measured, and its JSON document
show      the same for people
compare   two to four such documents side by side
picture   the same as an SVG
"""
