"""Attention implementations: which can run on a backend and a model, and why the others cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from hwgrpo_backends import Backend
    from transformers import PreTrainedConfig

ACCEPT_MASKS = ("sdpa", "eager")
"""Implementations that accept any mask and run on every device."""

FLASH = {"flash_attention_2": "is_flash_attn_2_available", "flash_attention_3": "is_flash_attn_3_available"}
"""Implementations from packages -> transformers' function that checks for the package."""


def is_known(name: str, backend: Backend) -> bool:
    """Return whether an implementation is known to transformers, the hub or the backend."""
    return name in (*ACCEPT_MASKS, *FLASH) or _is_of_the_hub(name) or is_fused(name, backend)


def is_fused(name: str, backend: Backend) -> bool:
    """Return whether an implementation is a fused module of the backend's device."""
    own = bool(backend.modules) and name not in (*ACCEPT_MASKS, *FLASH)
    return own and name == _fused_modules().attention(backend.device_type)


def reason_against(
    name: str, backend: Backend, arch: str | None, dtype: torch.dtype | None, *, explicit: bool = False
) -> str | None:
    """Return why an implementation cannot run, or None.

    Args:
        name: transformers' name, or a repository of the hub.
        backend: the device family.
        arch: of the device; None: unknown.
        dtype: compute dtype; None: not checked.
        explicit: the user named it; a hub kernel is never auto-selected.
    """
    if name in ACCEPT_MASKS:
        return None
    if is_fused(name, backend):
        return _reason_against_fused(backend)
    archs = backend.attention_archs.get(name)
    if archs and arch not in archs:
        return f"it is for {' and '.join(archs)}, and this is {arch or 'an unknown device'}"
    reason = _package_reason(name, backend, explicit)
    if reason is not None or dtype is None:
        return reason
    bits = dtype.itemsize * 8
    return None if bits == 16 else f"it computes in 16 bits only, not in {dtype}"


def reason_model_cannot_use(attention: str, model_config: PreTrainedConfig) -> str | None:
    """Return why an attention implementation computes something else than the model defines, or None.

    Args:
        attention: the implementation, by transformers' name.
        model_config: the transformers configuration of the model.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING  # takes a second

    architecture: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(model_config), None)
    if attention == "sdpa" and architecture is not None and not architecture._supports_sdpa:
        return f"{architecture.__name__} has attention that sdpa cannot compute"
    if attention == "sdpa" and getattr(model_config.get_text_config(), "attn_logit_softcapping", None):
        return "the model soft-caps attention scores (attn_logit_softcapping), which sdpa leaves out"
    return None


def _fused_modules() -> Any:
    from hwgrpo_kernels import fused_modules  # imports torch, which may be missing in a diagnosis

    return fused_modules


def _reason_against_fused(backend: Backend) -> str | None:
    return _fused_modules().reason_against(backend.device_type, _fused_modules().ATTENTION_MODULE)


def _is_of_the_hub(name: str) -> bool:
    return "/" in name


def _package_reason(name: str, backend: Backend, explicit: bool) -> str | None:
    import transformers.utils  # takes a second

    if _is_of_the_hub(name):
        if not transformers.utils.is_kernels_available():
            return "it is a kernel from the hub, which needs the package `kernels` (not installed)"
        return None if explicit else f"it is code from the hub, fetched only with model.attention={name}"
    if name not in FLASH:
        return f"the backend {backend.name} does not have it"
    if getattr(transformers.utils, FLASH[name])():
        return None
    # Where a device's fused attention is offered, transformers builds its flash_attention_2 on the same operator.
    if name == "flash_attention_2" and any(is_fused(each, backend) for each in backend.attention):
        return _reason_against_fused(backend)
    return "its package is not installed or does not support this device"
