"""Replace modules of a model by its device's fused ones: find candidates, self-test each, replace its forward."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hwgrpo_kernels import triton_support

from . import add_norm, attention, rms_norm, rotary, swiglu
from .compute_dtype import Readers, autocast_dtype, linear_forward, rounded
from .fused_forwards import AppliedModules, in_triton, is_fused, replace_forward
from .self_test import difference, run_on_few_tokens, self_test_mode

MODULES = ("rms_norm", "rotary", "swiglu", "attention")
KINDS: dict[str, Any] = {each.NAME: each for each in (rms_norm, rotary, swiglu, attention)}

NOT_REACHED = "the model's forward on a few tokens does not call it, so that it cannot be self-tested"


def reason_against(module: str, device_type: str) -> str | None:
    """Return why a fused module is unavailable on a device in this process, or None.

    Args:
        module: one of `MODULES`.
        device_type: torch device type.
    """
    if in_triton(device_type):
        if module == attention.NAME:
            return f"{device_type} has none here: torch's is fused"
        return triton_support.reason_against_gpus()
    op = KINDS[module].OP
    return None if hasattr(torch.ops.npu, op) else f"this torch-npu has no {op}, or is not imported"


def apply(model: nn.Module, modules: Sequence[str] = MODULES, dtype: torch.dtype | None = None) -> AppliedModules:
    """Replace a model's modules by its device's fused ones wherever both compute the same.

    Each is self-tested first: the model runs on a few tokens, and the inputs of a sub-module go through its own
    forward and the fused one; values and gradients must agree. Only the instances of this model change. Modules that
    are fused already are skipped.

    Args:
        model: a transformers causal LM, or one wrapped by peft, on its device; not yet wrapped for several ranks.
        modules: some of `MODULES`.
        dtype: autocast dtype of the run; None: no autocast.

    Returns:
        The sub-modules replaced and skipped; `undo()` restores the model.

    Raises:
        ValueError: `modules` has an unknown name.
        torch.OutOfMemoryError: the self-tests do not fit. After any exception the model is unchanged.
    """
    for module in modules:
        if module not in MODULES:
            near = difflib.get_close_matches(module, MODULES, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"modules: {module!r} is not a fused module; use some of {', '.join(MODULES)}.{hint}")
    applied = AppliedModules(dict.fromkeys(modules, ()), {module: {} for module in modules})
    available = []
    device = next(model.parameters()).device
    for module in dict.fromkeys(modules):
        reason = reason_against(module, device.type)
        if reason is None:
            available.append(module)
        else:
            applied.skipped[module][""] = reason
    if available:
        try:
            with self_test_mode(model, device.type, dtype):
                _replace(model, available, applied)
        except BaseException:
            applied.undo()
            raise
    return applied


def copy_to(
    model: nn.Module, replaced: Mapping[str, Sequence[str]], in_compute_dtype: Mapping[str, Sequence[str]] | None = None
) -> None:
    """Replace the same modules in another copy of a model, without self-tests.

    Args:
        model: may be on the meta device.
        replaced, in_compute_dtype: of the `AppliedModules` of the copy that was self-tested.
    """
    lower = in_compute_dtype or {}
    for kind, names in replaced.items():
        if kind == attention.NAME:
            if names:
                attention.replace_attention(model)
            continue
        for name in names:
            module = model.get_submodule(name)
            replace_forward(module, _fused_forward(kind, module, lower.get(name)))
            for reader in lower.get(name, ()):
                replace_forward(model.get_submodule(reader), linear_forward)


def _fused_forward(kind: str, module: Any, readers: Sequence[str] | None) -> Callable[..., Any]:
    """Return the fused forward; with readers, of an output in the compute dtype."""
    if kind == rotary.NAME:
        return rotary.forward_with(module, rotary.rotation_by_op(rotary.plain_of(module), readers is not None))
    if kind == add_norm.NAME:
        return add_norm.forward
    if kind == rms_norm.NAME:
        return rms_norm.forward if readers is None else rms_norm.forward_for(len(readers))
    return swiglu.forward_of(module)


def _replace(model: nn.Module, kinds: list[str], applied: AppliedModules) -> None:
    candidates: list[tuple[str, str, nn.Module]] = []
    for kind in (each for each in kinds if each != attention.NAME):
        for name, module in KINDS[kind].candidates(model):
            reason = "its forward is replaced already"
            if "forward" not in vars(module):
                reason = KINDS[kind].reason_against(module)
            elif is_fused(module):
                reason = "it is fused already"
            if reason is None:
                candidates.append((kind, name, module))
            else:
                applied.skipped[kind][name] = reason
    on_gpu = in_triton(next(model.parameters()).device.type)
    layers = list(add_norm.candidates(model)) if on_gpu and rms_norm.NAME in kinds else []
    inputs, calls, readers = _record_inputs(model, candidates, layers, attention.NAME in kinds, applied)
    for kind, name, module in candidates:
        read_by = _readers_that_cast(kind, name, inputs.get(name), readers)
        forward, reason = _self_test(kind, module, inputs.get(name), read_by)
        if reason is not None:
            applied.skipped[kind][name] = reason
            continue
        applied._undo.append(replace_forward(module, forward))
        applied.replaced[kind] += (name,)
        if read_by is not None:
            applied.in_compute_dtype[name] = read_by
            applied._undo += [replace_forward(model.get_submodule(each), linear_forward) for each in read_by]
    for name, layer in layers:
        norm = f"{name}.{add_norm.NORM}"
        if norm in applied.replaced.get(rms_norm.NAME, ()) and name in inputs:
            _add_by_norm(name, layer, inputs[name], applied)
    if calls is not None:
        _replace_attention(model, calls, applied)
    for kind in kinds:
        if not applied.replaced[kind] and not applied.skipped[kind]:
            applied.skipped[kind][""] = "the model has no such module"


def _readers_that_cast(
    kind: str, name: str, inputs: tuple[Any, ...] | None, readers: Readers
) -> tuple[str, ...] | None:
    """Return the linear layers that read a sub-module's output, all of which cast it; None: it keeps its dtype."""
    if inputs is None or not in_triton(inputs[0].device.type) or autocast_dtype(inputs[0]) is None:
        return None
    if kind == rotary.NAME:
        return () if readers.casts_all(name) else None
    if kind == rms_norm.NAME:
        from hwgrpo_kernels.module_triton import MOST_COPIES  # imports triton

        found = readers.linears(name)
        return found if found and len(found) <= MOST_COPIES else None
    return None


def _record_inputs(
    model: nn.Module,
    candidates: list[tuple[str, str, nn.Module]],
    layers: list[tuple[str, nn.Module]],
    with_attention: bool,
    applied: AppliedModules,
) -> tuple[dict[str, tuple[Any, ...]], list[tuple[Any, ...]] | None, Readers]:
    """Run the model; return the first inputs of each candidate, the attention calls (None: not wanted), and readers."""
    inputs: dict[str, tuple[Any, ...]] = {}
    readers = Readers(model)
    undo: list[Callable[[], None]] = []
    for kind, name, module in candidates:
        if kind == rotary.NAME:
            recorder = _rotary_recorder(name, rotary.plain_of(module), inputs, readers)
            undo.append(replace_forward(module, rotary.forward_with(module, recorder)))
        else:
            undo.append(module.register_forward_pre_hook(_recorder(name, inputs), with_kwargs=True).remove)
            if kind == rms_norm.NAME:
                undo.append(module.register_forward_hook(_watcher(name, readers)).remove)
    for name, layer in layers:
        undo.append(layer.register_forward_pre_hook(_layer_recorder(name, inputs), with_kwargs=True).remove)
    records_attention = False
    if with_attention:
        reason = attention.reason_against(model)
        records_attention = reason is None
        if reason is None:
            undo.append(attention.replace_attention(model))
        else:
            applied.skipped[attention.NAME][""] = reason
    try:
        with attention.recording() as calls, readers:
            run_on_few_tokens(model)
    finally:
        for each in reversed(undo):
            each()
    return inputs, calls if records_attention else None, readers


def _recorder(name: str, inputs: dict[str, tuple[Any, ...]]) -> Callable[..., None]:
    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs.setdefault(name, (*args, *kwargs.values()))

    return record


def _layer_recorder(name: str, inputs: dict[str, tuple[Any, ...]]) -> Callable[..., None]:
    def record(layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if len(args) == 1:
            inputs.setdefault(name, (*args, options))

    return record


def _watcher(name: str, readers: Readers) -> Callable[..., None]:
    def watch(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        readers.watch(name, (output,))

    return watch


def _rotary_recorder(
    name: str, plain: Callable[..., Any], inputs: dict[str, tuple[Any, ...]], readers: Readers
) -> Callable[..., Any]:
    def record(*args: Any, **kwargs: Any) -> Any:
        inputs.setdefault(name, (*args, *kwargs.values()))
        rotated = plain(*args, **kwargs)
        readers.watch(name, rotated)
        return rotated

    return record


def _add_by_norm(name: str, layer: Any, inputs: tuple[Any, ...], applied: AppliedModules) -> None:
    """Replace the forward of a decoder layer whose norm is fused, if it computes the same."""
    hidden, options = inputs
    vectors = [each for each in layer.parameters() if each.ndim == 1]
    reason = difference(
        lambda x: layer(x, **options), lambda x: add_norm.forward(layer, x, **options), (hidden,), parameters=vectors
    )
    if reason is None:
        applied._undo.append(replace_forward(layer, add_norm.forward))
        applied.replaced[add_norm.NAME] = (*applied.replaced.get(add_norm.NAME, ()), name)
    else:
        applied.skipped.setdefault(add_norm.NAME, {})[name] = reason


def _self_test(
    kind: str, module: nn.Module, inputs: tuple[Any, ...] | None, readers: Sequence[str] | None
) -> tuple[Any, str | None]:
    """Return the fused forward of a sub-module, and the reason against it or None."""
    if inputs is None:
        return None, NOT_REACHED
    forward = _fused_forward(kind, module, readers)
    if kind == rotary.NAME:
        return forward, _rotary_reason(module, inputs, readers is not None)
    if kind == rms_norm.NAME:
        with torch.no_grad():
            reason = rms_norm.reason_from_values(module, module(*inputs), *inputs)
        if reason is not None:
            return None, reason
    parameters = module.parameters() if kind == rms_norm.NAME else ()  # projections' gradients follow from the input's
    plain = module if readers is None else rounded(module, torch.get_autocast_dtype(inputs[0].device.type))
    return forward, difference(plain, lambda *args: forward(module, *args), inputs, parameters=parameters)


def _rotary_reason(module: nn.Module, inputs: tuple[Any, ...], in_compute_dtype: bool) -> str | None:
    plain = rotary.plain_of(module)
    if len(inputs) not in (4, 5) or not all(isinstance(each, Tensor) for each in inputs[:4]):
        return f"its {rotary.FUNCTION} takes other arguments than queries, keys, cosines and sines"
    with torch.no_grad():
        reason = rotary.reason_from_values(plain(*inputs), *inputs[:4], dim=inputs[4] if len(inputs) == 5 else 1)
    if reason is not None:
        return reason
    expected = rounded(plain, torch.get_autocast_dtype(inputs[0].device.type)) if in_compute_dtype else plain
    return difference(expected, rotary.rotation_by_op(plain, in_compute_dtype), inputs, differentiated=2)


def _replace_attention(model: nn.Module, calls: list[tuple[Any, ...]], applied: AppliedModules) -> None:
    """Self-test every recorded call; a model has one attention implementation, so one difference rules it out."""
    names = {id(module): name for name, module in model.named_modules()}
    tested, reasons = [], {}
    for call in calls:
        layer, name = call[0], names[id(call[0])]
        for tensors, mask, options in attention.self_test_calls(call):
            reason = difference(
                lambda q, k, v, m=mask, o=options, layer=layer: attention.plain_attention(layer, q, k, v, m, **o)[0],
                lambda q, k, v, m=mask, o=options, layer=layer: attention.fusion_attention(layer, q, k, v, m, **o)[0],
                tensors,
                differentiated=3,
            )
            if reason is not None:
                reasons.setdefault(name, reason)
        tested.append(name)
    if reasons or not tested:
        applied.skipped[attention.NAME].update(reasons or {"": NOT_REACHED})
        return
    applied._undo.append(attention.replace_attention(model))
    applied.replaced[attention.NAME] = tuple(dict.fromkeys(tested))
