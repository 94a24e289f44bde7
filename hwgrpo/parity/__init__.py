"""`hwgrpo parity`: one training step on a device against the same step by plain transformers in fp64 on the CPU.

settings.py     its settings, and those that may be chosen
fixed_step.py   the step: prompts, responses, rewards and log-probs that a seed determines
fixed_adapter.py  adapters as large as trained ones
families.py     tiny random models of published architectures
golden.py       the step in fp64 by formulas written out, and what rounding does to it
rounded_operations.py  fp64 within transformers' code, and each operation changed by one rounding
measured.py     the step by this project's parts, on a device
comparison.py   tensor by tensor: error and tolerance
one_layer_models.py  one decoder layer of a large model, read from its files, as a model's folder
layer_states.py  what enters each layer of a large model, in fp64
golden_layer.py  a layer in fp64, forward and backward; golden_head.py: what follows the last one
measured_layer.py  both by this project's parts, on a device
layer_comparison.py  a large model layer by layer
saved_step.py   what a machine computed, in a file
"""
