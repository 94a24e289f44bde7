"""Tensors of the meta device in the role of an accelerator's: code takes the branches that it takes there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils, checkpoint

from hwgrpo.models.meta_device import META

CAST_DOWN = frozenset(
    ("linear", "matmul", "__matmul__", "mm", "mv", "addmm", "bmm", "baddbmm", "scaled_dot_product_attention", "einsum")
)
CAST_UP = frozenset(
    (
        *("pow", "__pow__", "exp", "expm1", "log", "log1p", "log_softmax", "softmax", "sum", "prod", "cumsum", "norm"),
        *("rsqrt", "reciprocal", "layer_norm", "softplus", "cosh", "sinh", "tan", "acos", "asin"),
    )
)
"""Functions whose operands autocast casts on an accelerator (torch's page on `torch.amp`): meta tensors have none."""
READS = frozenset(
    getattr(Tensor, name)
    for name in ("cpu", "item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__")
)
"""Methods by which the host waits for a tensor's values."""
UPLOADED = "values_on_host"
"""Attribute of a tensor that came from the host: what it gives back when it is read."""
MASK_COLUMNS = 16
"""Columns to a multiple of which torch pads a mask for its memory-efficient attention."""


class MetaAccelerator(TorchFunctionMode):
    """Makes tensors of the meta device look like those of an accelerator. All values that the host reads are 0, but
    for those that it has copied there itself.

    Args:
        device: the accelerator's.
        waits: called when the host reads a tensor and waits for it.
        uploads: called when a tensor of the host is copied to the device.
        launches: called with a kernel's name, inputs and outputs, for kernels that torch has on accelerators only.
    """

    def __init__(
        self,
        device: torch.device,
        waits: Callable[[], None],
        uploads: Callable[[], None],
        launches: Callable[[str, list[Tensor], list[Tensor]], None],
    ) -> None:
        super().__init__()
        self.device = device
        self._waits, self._uploads, self.launches = waits, uploads, launches
        self._device_of = Tensor.device.__get__  # pyright: ignore[reportFunctionMemberAccess]
        self._is_of_family = getattr(Tensor, f"is_{device.type}").__get__

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func == self._device_of:
            return self.device if args[0].is_meta else func(*args)
        if func == self._is_of_family:
            return args[0].is_meta
        if func in READS:
            return func(self._read(args[0]), *args[1:], **kwargs)
        if func is Tensor.to:
            return self._move(*args, **kwargs)
        if func is Tensor.copy_:
            return self._copy(*args, **kwargs)
        if func is Tensor.pin_memory:
            return args[0]
        if func is Tensor.backward:
            # what the graph calls in Python, such as checkpointed layers, needs the mode, too
            with self, patch.object(torch.autograd, "has_torch_function", lambda _: False):
                return torch.autograd.backward(args[0], kwargs.pop("gradient", None), **kwargs)
        if self._is_here(kwargs.get("device")):
            kwargs["device"] = META
            if func in (torch.tensor, torch.as_tensor):
                self._uploads()
        args, kwargs = self._autocast(getattr(func, "__name__", ""), args, kwargs)
        if func is F.scaled_dot_product_attention and args[0].is_meta:
            return _attend(*args, **kwargs)
        if func in (F.rms_norm, torch.rms_norm) and args[0].is_meta:
            return _RmsNorm.apply(self.launches, args[0], args[2] if len(args) > 2 else kwargs.get("weight"))
        return func(*args, **kwargs)

    def _is_here(self, device: Any) -> bool:
        return device is not None and torch.device(device).type in (self.device.type, META.type)

    def _read(self, tensor: Tensor, non_blocking: bool = False) -> Tensor:
        if not tensor.is_meta:
            return tensor
        if not non_blocking:
            self._waits()
        values = getattr(tensor, UPLOADED, None)
        return torch.zeros(tensor.shape, dtype=tensor.dtype) if values is None else values

    def _move(self, tensor: Tensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
        parse: Any = torch._C._nn._parse_to  # pyright: ignore[reportAttributeAccessIssue]
        device, dtype, non_blocking, memory_format = parse(*args, **kwargs)
        options = {"copy": copy, "memory_format": memory_format}
        dtype = tensor.dtype if dtype is None else dtype
        if device is None or self._is_here(device) == tensor.is_meta:
            return tensor.to(dtype, **options)
        if tensor.is_meta:
            return self._read(tensor, non_blocking).to(dtype)
        self._uploads()
        uploaded = torch.empty(tensor.shape, dtype=dtype, device=META)
        setattr(uploaded, UPLOADED, tensor.to(dtype))
        return uploaded

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if target.is_meta and not source.is_meta:
            self._uploads()
            return target
        return target.copy_(source if target.is_meta else self._read(source, non_blocking))

    def _autocast(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        down = name in CAST_DOWN
        if not (down or name in CAST_UP) or not torch.is_autocast_enabled(self.device.type):
            return args, kwargs
        dtype = torch.get_autocast_dtype(self.device.type) if down else torch.float32

        def cast(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.is_meta or not value.is_floating_point():
                return value
            return value.to(dtype) if value.dtype != torch.float64 else value

        return [cast(each) for each in args], {key: cast(each) for key, each in kwargs.items()}


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attend as torch does on a GPU: by flash attention without a mask, else by memory-efficient attention."""
    if attn_mask is None:
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[
            0
        ]
    columns = attn_mask.shape[-1]
    padded = F.pad(attn_mask, (0, -columns % MASK_COLUMNS))[..., :columns] if columns % MASK_COLUMNS else attn_mask
    bias = padded.expand(*query.shape[:-1], key.shape[-2])
    needs_gradient = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, needs_gradient, dropout_p, is_causal, scale=scale
    )[0]


class _RmsNorm(torch.autograd.Function):
    """torch's fused RMSNorm, which is several operations on the meta device."""

    @staticmethod
    def forward(ctx: Any, launches: Any, x: Tensor, weight: Tensor | None) -> Tensor:
        ctx.launches = launches
        ctx.save_for_backward(x, weight)
        out = torch.empty_like(x)
        launches("_fused_rms_norm", [each for each in (x, weight) if each is not None], [out])
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        inputs = [each for each in (gradients[0], x, weight) if each is not None]
        outputs = [torch.empty_like(x)] + ([] if weight is None else [torch.empty_like(weight)])
        ctx.launches("_fused_rms_norm_backward", inputs, outputs)
        return None, outputs[0], None if weight is None else outputs[1]


@contextmanager
def seen_as_accelerator(mode: MetaAccelerator) -> Iterator[None]:
    """Enter a mode, and let torch's own Python code see the accelerator, too."""
    family: Any = torch.get_device_module(mode.device)
    kinds = _foreach_utils._get_foreach_kernels_supported_devices()
    with ExitStack() as stack:
        for owner, name, value in (
            (family.amp.common, "amp_definitely_not_available", lambda: False),
            (family, "is_bf16_supported", lambda *args, **kwargs: True),
            (_foreach_utils, "_get_foreach_kernels_supported_devices", lambda: [*kinds, META.type]),
        ):
            stack.enter_context(patch.object(owner, name, value))
        # it compares devices, of which hooks of saved tensors see the meta device
        compared = checkpoint._allowed_determinism_checks_to_fns
        stack.enter_context(patch.dict(compared, {checkpoint._DEFAULT_DETERMINISM_MODE: lambda tensor: tensor.shape}))
        stack.enter_context(mode)
        yield
