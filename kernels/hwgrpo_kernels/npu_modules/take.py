"""Taking fused modules into a model: who could be one, a trial of each with its own inputs, and the replacement."""

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import attention, rms_norm, rotary, swiglu
from .applied import Applied, is_fused, replace_forward
from .trial import difference, run_on_a_few_tokens, trial_mode

MODULES = ("rms_norm", "rotary", "swiglu", "attention")
KINDS: dict[str, Any] = {each.NAME: each for each in (rms_norm, rotary, swiglu, attention)}

NOT_MET = "a forward of the model on a few tokens does not come through it, so that it cannot be tried"


def reason_against(module: str) -> str | None:
    """Return why a fused module is not to be had in this process, or None.

    Args:
        module: one of `MODULES`.
    """
    op = KINDS[module].OP
    return None if hasattr(torch.ops.npu, op) else f"this torch-npu has no {op}, or is not imported"


def apply(model: nn.Module, modules: Sequence[str] = MODULES, dtype: torch.dtype | None = None) -> Applied:
    """Put torch-npu's fused modules where a model's own modules compute the same, and say where and why not.

    Each is tried first: the model runs on a few tokens, and what a sub-module met there goes through its own forward
    and through the fused one; values and gradients must agree. Nothing but the instances of this model is changed. A
    model that has them already gets nothing more.

    Args:
        model: a transformers causal LM, or one wrapped by peft, on its device; not yet wrapped for several ranks.
        modules: some of `MODULES`.
        dtype: what the run computes in under autocast; None: as the parameters are.

    Returns:
        What was taken and left; its `undo()` puts everything back.

    Raises:
        ValueError: there is no fused module of a name given.
        torch.OutOfMemoryError: there is no room for the trials. After whatever is raised the model is as it was.
    """
    for module in modules:
        if module not in MODULES:
            near = difflib.get_close_matches(module, MODULES, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"modules: {module!r} is no fused module; choose some of {', '.join(MODULES)}.{hint}")
    applied = Applied(dict.fromkeys(modules, ()), {module: {} for module in modules})
    wanted = []
    for module in dict.fromkeys(modules):
        reason = reason_against(module)
        if reason is None:
            wanted.append(module)
        else:
            applied.left[module][""] = reason
    if wanted:
        device = next(model.parameters()).device
        try:
            with trial_mode(model, device.type, dtype):
                _take(model, wanted, applied)
        except BaseException:
            applied.undo()
            raise
    return applied


def adopt(model: nn.Module, taken: Mapping[str, Sequence[str]]) -> None:
    """Put fused modules where `apply` took them in another copy of a model; nothing is tried.

    Args:
        model: in whose place the copy was tried; it may be without weights.
        taken: `Applied.taken` of the copy.
    """
    for kind, names in taken.items():
        if kind == attention.NAME:
            if names:
                attention.replace_in(model)
            continue
        for module in map(model.get_submodule, names):
            replace_forward(module, _fused_forward(kind, module))


def _fused_forward(kind: str, module: Any) -> Callable[..., Any]:
    if kind == rotary.NAME:
        return rotary.forward_with(module, rotary.rotation_by_op(rotary.plain_of(module)))
    return rms_norm.forward if kind == rms_norm.NAME else swiglu.forward_of(module)


def _take(model: nn.Module, wanted: list[str], applied: Applied) -> None:
    sites: list[tuple[str, str, nn.Module]] = []
    for kind in (each for each in wanted if each != attention.NAME):
        for name, module in KINDS[kind].candidates(model):
            reason = "its forward is replaced already"
            if "forward" not in vars(module):
                reason = KINDS[kind].reason_against(module)
            elif is_fused(module):
                reason = "it is taken already"
            if reason is None:
                sites.append((kind, name, module))
            else:
                applied.left[kind][name] = reason
    met, calls = _inputs_of(model, sites, attention.NAME in wanted, applied)
    for kind, name, module in sites:
        forward, reason = _tried(kind, module, met.get(name))
        if reason is None:
            applied._undo.append(replace_forward(module, forward))
            applied.taken[kind] += (name,)
        else:
            applied.left[kind][name] = reason
    if calls is not None:
        _take_attention(model, calls, applied)
    for kind in wanted:
        if not applied.taken[kind] and not applied.left[kind]:
            applied.left[kind][""] = "the model has no such module"


def _inputs_of(
    model: nn.Module, sites: list[tuple[str, str, nn.Module]], with_attention: bool, applied: Applied
) -> tuple[dict[str, tuple[Any, ...]], list[tuple[Any, ...]] | None]:
    """Run the model; return the first inputs of each site, and the calls of attention (None: it is not to be taken)."""
    met: dict[str, tuple[Any, ...]] = {}
    undo: list[Callable[[], None]] = []
    for kind, name, module in sites:
        if kind == rotary.NAME:
            listener = _rotary_listener(name, rotary.plain_of(module), met)
            undo.append(replace_forward(module, rotary.forward_with(module, listener)))
        else:
            undo.append(module.register_forward_pre_hook(_listener(name, met), with_kwargs=True).remove)
    listens = False
    if with_attention:
        reason = attention.reason_against(model)
        listens = reason is None
        if reason is None:
            undo.append(attention.replace_in(model))
        else:
            applied.left[attention.NAME][""] = reason
    try:
        with attention.listening() as calls:
            run_on_a_few_tokens(model)
    finally:
        for each in reversed(undo):
            each()
    return met, calls if listens else None


def _listener(name: str, met: dict[str, tuple[Any, ...]]) -> Callable[..., None]:
    def listen(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        met.setdefault(name, (*args, *kwargs.values()))

    return listen


def _rotary_listener(name: str, plain: Callable[..., Any], met: dict[str, tuple[Any, ...]]) -> Callable[..., Any]:
    def listen(*args: Any, **kwargs: Any) -> Any:
        met.setdefault(name, (*args, *kwargs.values()))
        return plain(*args, **kwargs)

    return listen


def _tried(kind: str, module: nn.Module, inputs: tuple[Any, ...] | None) -> tuple[Any, str | None]:
    """Return the fused forward of a sub-module, and why it is not to be taken, or None."""
    if inputs is None:
        return None, NOT_MET
    forward = _fused_forward(kind, module)
    if kind == rotary.NAME:
        return forward, _rotary_reason(module, inputs)
    if kind == rms_norm.NAME:
        with torch.no_grad():
            reason = rms_norm.reason_by_values(module, module(*inputs), *inputs)
        if reason is not None:
            return None, reason
    own = module.parameters() if kind == rms_norm.NAME else ()  # of projections the gradients follow from the input's
    return forward, difference(module, lambda *given: forward(module, *given), inputs, parameters=own)


def _rotary_reason(module: nn.Module, inputs: tuple[Any, ...]) -> str | None:
    plain = rotary.plain_of(module)
    if len(inputs) not in (4, 5) or not all(isinstance(each, Tensor) for each in inputs[:4]):
        return f"its {rotary.FUNCTION} takes other arguments than queries, keys, cosines and sines"
    with torch.no_grad():
        reason = rotary.reason_by_values(plain(*inputs), *inputs[:4], dim=inputs[4] if len(inputs) == 5 else 1)
    return reason or difference(plain, rotary.rotation_by_op(plain), inputs, differentiated=2)


def _take_attention(model: nn.Module, calls: list[tuple[Any, ...]], applied: Applied) -> None:
    """Try every recorded call; attention is named once for a whole model, so one that differs keeps all out."""
    names = {id(module): name for name, module in model.named_modules()}
    taken, reasons = [], {}
    for call in calls:
        layer, name = call[0], names[id(call[0])]
        for tensors, mask, options in attention.trial_calls(call):
            reason = difference(
                lambda q, k, v, m=mask, o=options, layer=layer: attention.plain_attention(layer, q, k, v, m, **o)[0],
                lambda q, k, v, m=mask, o=options, layer=layer: attention.fusion_attention(layer, q, k, v, m, **o)[0],
                tensors,
                differentiated=3,
            )
            if reason is not None:
                reasons.setdefault(name, reason)
        taken.append(name)
    if reasons or not taken:
        applied.left[attention.NAME].update(reasons or {"": NOT_MET})
        return
    applied._undo.append(attention.replace_in(model))
    applied.taken[attention.NAME] = tuple(dict.fromkeys(taken))
