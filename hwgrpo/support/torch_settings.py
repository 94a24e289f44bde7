"""torch's settings of a process, kept while a function of the user's own runs in it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

BACKENDS = "torch.backends"
PRODUCTS = "float32 matmul precision"
"""Name of torch's first interface to it, which raises after its second, those of the backends, set another one."""


def _precisions() -> dict[str, Any]:
    """Return how exact float32 products are, by each of torch's interfaces; None where one raises beside another."""
    read = {PRODUCTS: torch.get_float32_matmul_precision}
    read |= {name: functools.partial(getattr, *of) for name, of in _precision_attributes().items()}
    found = {}
    for name, get in read.items():
        try:
            found[name] = get()
        except RuntimeError:  # the interfaces were mixed
            found[name] = None
    return found


def _set_precisions(wanted: dict[str, Any]) -> None:
    """Set what `_precisions` returned: a setter changes what others read, so the widest and oldest come first."""
    if wanted[PRODUCTS] is not None:
        torch.set_float32_matmul_precision(wanted[PRODUCTS])
    for name, of in _precision_attributes().items():
        if wanted[name] is not None and _precisions()[name] != wanted[name]:
            setattr(*of, wanted[name])


@functools.cache
def _precision_attributes() -> dict[str, tuple[Any, str]]:
    """Return those of torch's backends: name -> (what has it, attribute)."""
    modules = {name: module for name, module in sorted(sys.modules.items()) if f"{name}.".startswith(f"{BACKENDS}.")}
    holders = {
        **modules,
        **{f"{name}.{op}": getattr(module, op, None) for name, module in modules.items() for op in OPERATIONS},
    }
    attributes = {}
    for attribute in ("allow_tf32", "fp32_precision"):
        for name, holder in holders.items():
            try:
                getattr(holder, attribute)
            except AttributeError:
                continue
            except RuntimeError:  # mixed already
                pass
            attributes[f"{name}.{attribute}".removeprefix(f"{BACKENDS}.")] = holder, attribute
    return attributes


def _flags(holder: Any, *names: str) -> tuple[Callable[[], dict[str, Any]], Callable[[dict[str, Any]], None]]:
    """Return what reads attributes of a backend of torch, and what sets them; those that this torch has."""
    present = tuple(name for name in names if hasattr(holder, name))

    def write(wanted: dict[str, Any]) -> None:
        for name, value in wanted.items():
            if getattr(holder, name) != value:
                setattr(holder, name, value)

    return lambda: {name: getattr(holder, name) for name in present}, write


def _attention_kernels() -> dict[str, bool]:
    """Return which kernels `scaled_dot_product_attention` may use on CUDA devices."""
    return {name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")() for name in ATTENTION_KERNELS}


def _set_attention_kernels(wanted: dict[str, bool]) -> None:
    for name, enabled in wanted.items():
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(enabled)


ATTENTION = "the attention kernels"
ATTENTION_KERNELS = ("flash", "mem_efficient", "math", "cudnn")
OPERATIONS = ("matmul", "conv", "rnn")
"""Kinds of operations for which a backend has a precision of its own."""
SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "the default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "the default device": (
        torch.get_default_device,
        lambda device: torch.set_default_device(None if device.type == "cpu" else device),
    ),
    "grad mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "anomaly detection": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "the number of threads": (torch.get_num_threads, torch.set_num_threads),
    "deterministic algorithms": (
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda flags: torch.use_deterministic_algorithms(flags[0], warn_only=flags[1]),
    ),
    "the precision of float32 products": (
        _precisions,
        _set_precisions,
    ),
    "the flags of cuDNN": _flags(torch.backends.cudnn, "enabled", "benchmark", "benchmark_limit", "deterministic"),
    "the accumulation of half-precision products": _flags(
        torch.backends.cuda.matmul,
        *("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"),
        "allow_fp16_accumulation",
    ),
    ATTENTION: (_attention_kernels, _set_attention_kernels),
}
"""Setting -> what reads it, and what sets it."""


@contextmanager
def kept_torch_settings(what: str, remedy: str = "") -> Iterator[None]:
    """Restore torch's settings after a block that runs code of the user's, and print which it changed, once each.

    Args:
        what: whose code it is, for the note ("reward f").
        remedy: what to do instead, for the note.
    """
    before = {name: read() for name, (read, _) in SETTINGS.items()}
    try:
        yield
    finally:
        for name, (read, restore) in SETTINGS.items():
            after = read()
            if after != before[name]:
                restore(before[name])
                changed = f"from {_changed(before[name], after)} to {_changed(after, before[name])}"
                _print_once(f"hwgrpo: {what} changed {name} of torch {changed}: restored. {remedy}")


def with_kept_torch_settings(function: Callable[..., Any], what: str) -> Callable[..., Any]:
    """Return a function of the user's with `kept_torch_settings` around each call, 30 to 50 microseconds of a host's.

    Args:
        function: the function.
        what: whose code it is, for the note.
    """

    @functools.wraps(function)
    def kept(*args: Any, **kwargs: Any) -> Any:
        with kept_torch_settings(what):
            return function(*args, **kwargs)

    return kept


def _changed(value: Any, other: Any) -> Any:
    """Return what of a setting differs from another state of it."""
    return {name: each for name, each in value.items() if each != other[name]} if isinstance(value, dict) else value


@contextmanager
def own_generators(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators for a block, and give them back the states that they had.

    Args:
        seed: of the block's random numbers.
        device: whose generator is kept, beside the host's.
    """
    module: Any = getattr(torch, device.type, None)  # the host's has no generator of its own
    accelerator = module.get_rng_state(device) if hasattr(module, "get_rng_state") else None
    host = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(host)
        if module is not None and accelerator is not None:
            module.set_rng_state(accelerator, device)


@functools.cache
def _print_once(text: str) -> None:
    print(text.rstrip(), flush=True)
