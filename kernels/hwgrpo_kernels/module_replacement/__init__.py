"""Fused ops in the modules of a transformers model, torch-npu's or Triton's, each self-tested first and all reversible.

    applied = apply(model, modules=("rms_norm", "rotary", "swiglu", "attention"))
    applied.replaced, applied.skipped    sub-modules replaced, and the reason for each that was not
    applied.undo()                       restores the model
    copy_to(model, applied.replaced, applied.in_compute_dtype)    the same in a copy of the model, without self-tests

    rms_norm.py          npu_rms_norm, or module_triton's, in RMSNorm layers
    rotary.py            npu_rotary_mul, or module_triton's, on queries and keys
    add_norm.py          the residual stream's sum and the norm of it in one kernel, in decoder layers
    swiglu.py            npu_swiglu, or module_triton's, in gated MLPs
    attention.py         npu_fusion_attention as an attention implementation of transformers
    compute_dtype.py     outputs written in the compute dtype, where autocast would round them next anyway
    replace_modules.py   `apply`: find candidates, self-test each, replace
    self_test.py         values and gradients of the plain and the fused forward, on inputs of the model's own forward
    fused_forwards.py    `AppliedModules`, the result of `apply`; replacing and restoring a forward

Only the model passed in changes: an instance's `forward`, or the attention that its config names. Sources of the ops:
torch-npu's operator documents and CANN's aclnn documents. They have never run on hardware.
"""

from .fused_forwards import AppliedModules, is_fused
from .replace_modules import MODULES, apply, copy_to, reason_against

__all__ = ["MODULES", "AppliedModules", "apply", "copy_to", "is_fused", "reason_against"]
