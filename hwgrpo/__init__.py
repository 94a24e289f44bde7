"""GRPO post-training of language models on CUDA, ROCm, Ascend NPU and CPU.

Importing this package loads neither torch nor triton.
"""

__version__ = "0.1.0"
