"""Log-probability, entropy and loss over a large vocabulary: one definition per op, an implementation per device.

    linear_token_loss   hidden + head -> loss, with gradients made in the forward     token_loss.py
    linear_logprob      hidden + head -> logprob, entropy, without [N,V] logits       logprob.py
    token_logprob       logits -> logprob, entropy                                    logprob.py, inplace.py

    ops.py              the ops as declared: definition, inputs, tolerances, cost; ops_kl.py those beside a reference
    definitions.py      the truth of each op in plain torch
    library.py          torch.ops.hwgrpo.*: custom ops, fake kernels, gradients
    registry.py         which implementation runs: resolve, configure, choices, explain
    overview.py         the same for people: what each implementation would do, and why
    op.py               what an op and an implementation are; entry_points.py finds those of other distributions
    argument_checks.py  errors that name argument, value and remedy; guards.py where the streaming loss may not run
    loss_calls.py       a loss function called on ranges of rows
    testing.py          check_kernel: what a new implementation must satisfy
    streaming.py        the driver; head.py its GEMMs, chunks.py its row counts, logit_map.py its scaling
    reference.py        a second head, whose logits are streamed beside for the KL over the whole vocabulary
    rows_torch.py       the row ops in torch; matrices.py what they and the others ask of a matrix
    rows_compiled.py    row_stats and row_grad in C++ for a CPU, on request; host_compiler.py compiles and keeps it
    vocab_parallel.py   a head cut over ranks; vocab_agreement.py what they check, vocab_logprob.py its linear_logprob
    rows_triton.py      the row ops in Triton; triton_kernels.py the kernels, triton_math.py their functions,
                        tiles.py their block sizes per architecture, ascend_tiles.py those for Ascend,
                        triton_support.py where they can run
    npu_scoring.py      linear_logprob through torch-npu's fused head, for scoring
    fused_modules.py    fused modules in a transformers model, by device; npu_modules/ those of torch-npu

Needs torch alone (and Triton for its kernels). `HWGRPO_KERNELS=row_stats=torch,...` pins implementations; the
entry-point group `hwgrpo.kernels` (value: an `Implementation` or several) adds some.
"""

from . import ops, ops_kl  # noqa: F401  declare the ops
from .logprob import TokenLogprob, linear_logprob, token_logprob
from .loss_calls import LossFunction, TokenStats
from .op import Implementation, Key, Op, Shape, Tolerance
from .reference import ReferenceHead
from .registry import Choice, KernelRegistry, choices, configure, default_registry, explain, resolve
from .token_loss import TokenLoss, linear_token_loss

__all__ = [
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
    "explain",
    "linear_logprob",
    "linear_token_loss",
    "resolve",
    "token_logprob",
]
