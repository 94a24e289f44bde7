"""The ledger: kernels, bytes and FLOPs that a training step would launch on a GPU, counted without one.

ledger_step.py       one step of a recipe: its stages, by the project's own code
kernel_ledger.py     counting of operations and Triton kernels
kernel_costs.py      kernels per operation, and the modelled time of a kernel
meta_accelerator.py  tensors of the meta device in the role of an accelerator's
ledger_tables.py     the result as tables and as JSON
"""
