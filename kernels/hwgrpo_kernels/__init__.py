"""Log-probability, entropy and loss over a large vocabulary: one definition per op, one implementation per device.

    linear_token_loss   hidden + head -> loss, gradients computed in the forward      token_loss.py
    linear_logprob      hidden + head -> logprob, entropy, without [N,V] logits       logprob.py
    token_logprob       logits -> logprob, entropy                                    logprob.py, inplace.py

    ops.py              declarations of the ops: definition, inputs, tolerances, cost; ops_kl.py those with a reference
    definitions.py      ground truth of each op in plain torch
    library.py          torch.ops.hwgrpo.*: custom ops, fake kernels, gradients
    registry.py         selecting implementations: resolve, configure, choices, explain
    overview.py         a readable survey of every implementation, with reasons
    op.py               `Op` and `Implementation`; entry_points.py finds those of other distributions
    argument_checks.py  errors with argument, value and remedy; guards.py regions where the streaming loss raises
    loss_calls.py       calling a loss function on ranges of rows; precomputed_gradients.py the backward of its loss
    testing.py          check_kernel: the test for a new implementation
    streaming.py        the streaming driver; head.py its GEMMs, chunks.py its chunk sizes, logit_map.py logit scaling
    reference.py        a reference head for the KL over the full vocabulary
    rows_torch.py       the row ops in torch; matrices.py helpers for row ops
    rows_compiled.py    row_stats and row_grad in C++ for a CPU, on request; host_compiler.py compiles and caches it
    nf4_format.py       weights in 4 bits; nf4_torch.py and nf4_triton.py: their values, for `dequantize_nf4`
    vocab_parallel.py   a head sharded over ranks; vocab_checks.py its checks, vocab_logprob.py its linear_logprob
    rows_triton.py      the row ops in Triton; triton_kernels.py the kernels, triton_math.py their functions,
                        tiles.py their block sizes per architecture, ascend_tiles.py those for Ascend,
                        triton_support.py where they can run
    sampling_triton.py  the sampling ops in Triton; sampling_kernels.py the kernels, sampling_definitions.py the ops'
                        truth, ops_sampling.py their declarations
    decode_triton.py    the ops of a decode step in Triton; decode_kernels.py the kernels, decode_definitions.py the
                        ops' truth, ops_decode.py their declarations
    decode_compiled.py  attention and norms in C++ for a CPU, in the threads of torch's OpenMP runtime
    kernel_launches.py  launches of the Triton kernels recorded instead of run, and what each reads and writes
    kept_tokens.py      rows whose target was drawn from a truncated distribution
    square_sum.py       the sum of squared probabilities of a row, for scoring
    npu_scoring.py      linear_logprob through torch-npu's fused head, for scoring
    fused_modules.py    fused modules in a transformers model, by device; module_replacement/ inserts them,
                        module_triton.py those of GPUs, module_kernels.py their kernels

Needs torch alone (and Triton for its kernels). `HWGRPO_KERNELS=row_stats=torch,...` pins implementations; the
entry-point group `hwgrpo.kernels` (value: one or several `Implementation`s) adds others.
"""

from . import ops, ops_decode, ops_kl, ops_sampling  # noqa: F401  declare the ops
from .head import weight_operand
from .library import dequantize_nf4
from .logprob import TokenLogprob, linear_logprob, token_logprob
from .loss_calls import LossFunction, TokenStats
from .nf4_format import BLOCK as NF4_BLOCK
from .nf4_format import quantize_nf4
from .op import Implementation, Key, Op, Shape, Tolerance
from .reference import ReferenceHead
from .registry import Choice, KernelRegistry, choices, configure, default_registry, explain, resolve
from .token_loss import TokenLoss, linear_token_loss

__all__ = [
    "NF4_BLOCK",
    "Choice",
    "Implementation",
    "KernelRegistry",
    "Key",
    "LossFunction",
    "Op",
    "ReferenceHead",
    "Shape",
    "TokenLogprob",
    "TokenLoss",
    "TokenStats",
    "Tolerance",
    "choices",
    "configure",
    "default_registry",
    "dequantize_nf4",
    "explain",
    "linear_logprob",
    "linear_token_loss",
    "quantize_nf4",
    "resolve",
    "token_logprob",
    "weight_operand",
]
