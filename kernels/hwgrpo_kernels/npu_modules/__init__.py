"""torch-npu's fused modules in a transformers model: applied to one model, tried first, taken back whole.

    applied = apply(model, modules=("rms_norm", "rotary", "swiglu", "attention"))
    applied.taken, applied.left          what was taken, and why the rest was not
    applied.undo()                       the model as it was
    adopt(copy, applied.taken)           the same in a copy of the model, untried

    rms_norm.py     npu_rms_norm in RMSNorm layers
    rotary.py       npu_rotary_mul on queries and keys
    swiglu.py       npu_swiglu in gated MLPs
    attention.py    npu_fusion_attention as an attention implementation of transformers
    applied.py      what `apply` returns; how a forward is replaced and put back
    trial.py        each module's own inputs, met in a forward of the model, through both ways
    take.py         all of it in order

Nothing but the model given is changed: an instance's `forward`, or the attention its configuration names. Sources of
the ops: torch-npu's operator documents and CANN's aclnn documents. Never run on hardware.
"""

from .applied import Applied, is_fused
from .take import MODULES, adopt, apply, reason_against

__all__ = ["MODULES", "Applied", "adopt", "apply", "is_fused", "reason_against"]
