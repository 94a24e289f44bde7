"""The conformance suite: a vendor runs `check_backend(BACKEND)` in one line, on a host with the device and without."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from hwgrpo_backends.backend import Backend, EnvVar, Verdict
from hwgrpo_backends.facts import Facts, gather_tier0
from hwgrpo_backends.peaks import Chip
from hwgrpo_backends.tier1 import gather_tier1


def check_backend(backend: Backend, facts: Facts | None = None) -> list[str]:
    """Check a backend's data and probe and, when this host has the device, that device.

    Args:
        facts: this host with tier 1; gathered when left out.

    Returns:
        what was checked, one line each; a device that is absent here is named as not checked, with the reason.

    Raises:
        AssertionError: the backend breaks a rule; the message says which.
    """
    done = [_check_data(backend), _check_probe(backend)]
    if facts is None:
        facts = gather_tier1(gather_tier0(backends=[backend]), backends=[backend])
    verdict = backend.probe(facts)
    _check_verdict(backend, verdict)
    if verdict.state != "ok":
        return [*done, f"device: not checked, {verdict.reason}"]
    return [*done, _check_device(backend)]


def _check_data(backend: Backend) -> str:
    assert re.fullmatch(r"[a-z][a-z0-9_]*", backend.name), f"name {backend.name!r} is not a lower-case word"
    assert backend.name != "auto", "the name 'auto' means: choose for me"
    assert backend.kernels[-1:] == ("torch",), f"kernels {backend.kernels} must end with 'torch'"
    assert backend.attention, "attention is empty"
    assert backend.rollout, "rollout is empty"
    assert backend.comm, "comm is empty"
    assert backend.torch_build, "torch_build is empty"
    for purpose in ("train", "rollout"):
        _check_variables(purpose, backend.environment(purpose))
    _check_variables("deterministic train", backend.environment("train", deterministic=True))
    for name, archs in backend.attention_archs.items():
        assert name in backend.attention, f"attention_archs has {name!r}, which is not in attention"
        _check_texts(f"attention_archs of {name!r}", archs)
        assert archs, f"attention_archs of {name!r} is empty: no chip could use it"
    _check_texts("modules", backend.modules)
    for pattern, who in backend.out_of_memory.items():
        matches = _compiled("out_of_memory", pattern)
        assert not matches.search(""), f"out_of_memory pattern {pattern!r} fits every error"
        assert who, f"out_of_memory pattern {pattern!r} does not say who raises it"
    for chip in backend.chips:
        _check_chip(chip)
    return "data"


def _check_variables(purpose: str, variables: Mapping[str, EnvVar]) -> None:
    for name, variable in variables.items():
        assert isinstance(variable, EnvVar), f"{purpose} variable {name} is not an EnvVar"
        assert variable.why, f"{purpose} variable {name} has no reason"
        assert isinstance(variable.value, str), f"{purpose} variable {name} is not a string"


def _check_texts(what: str, values: object) -> None:
    fits = isinstance(values, tuple) and all(isinstance(each, str) and each for each in values)
    assert fits, f"{what} is {values!r}, not a tuple of texts"


def _check_chip(chip: Chip) -> None:
    assert isinstance(chip, Chip), f"chips has a {type(chip).__name__}"
    assert chip.arch, f"a chip has no arch: {chip}"
    _compiled(f"name of the chip {chip.arch}", chip.name)
    assert all(rate > 0 for rate in chip.flops.values()), f"chip {chip.name!r} has a rate that is not above 0"
    assert chip.bandwidth is None or chip.bandwidth > 0, f"chip {chip.name!r} has a bandwidth that is not above 0"
    assert chip.source, f"chip {chip.name!r} has no source"


def _compiled(what: str, pattern: str) -> re.Pattern[str]:
    assert isinstance(pattern, str), f"{what}: {pattern!r} is not a pattern"
    try:
        return re.compile(pattern)
    except re.error as error:
        raise AssertionError(f"{what}: the pattern {pattern!r} does not compile: {error}") from error


def _check_probe(backend: Backend) -> str:
    nothing = Facts()
    verdict = backend.probe(nothing)
    _check_verdict(backend, verdict)
    assert verdict.state == "unusable", f"probe of a host with nothing installed says {verdict.state!r}"
    assert backend.probe(nothing) == verdict, "probe gives different answers to the same facts"
    return "probe"


def _check_verdict(backend: Backend, verdict: Verdict) -> None:
    assert isinstance(verdict, Verdict), f"probe returned a {type(verdict).__name__}"
    assert verdict.reason, "a verdict has no reason"
    assert (verdict.devices > 0) == verdict.usable, f"{verdict.state} with {verdict.devices} devices"
    if verdict.claimed and verdict.hardware == "present" and not verdict.usable:
        assert verdict.fix, "a device that is there but unusable needs a fix"
    json.dumps(verdict.reason + verdict.fix + backend.name)


def _check_device(backend: Backend) -> str:
    import torch

    from hwgrpo_backends.device import Device, Memory

    device = Device(backend)
    device.set_device()
    assert device.arch, "arch is empty"
    dtypes = device.compute_dtypes
    assert dtypes, "compute_dtypes is empty"
    assert torch.float32 in dtypes, "compute_dtypes must include float32"

    generator = torch.Generator().manual_seed(0)
    left, right = torch.randn(2, 32, 32, generator=generator).unbind()
    for dtype in dtypes:
        a, b = left.to(dtype), right.to(dtype)
        want = a.double() @ b.double()
        got = (a.to(device.torch_device) @ b.to(device.torch_device)).to("cpu", torch.float64)
        error = ((got - want).norm() / want.norm()).item()
        # One rounding of the product to dtype; fp32 matmuls may use formats with 10 mantissa bits (TF32).
        assert error < 2 * max(torch.finfo(dtype).eps, 2**-11), f"matmul in {dtype}: relative error {error:.2g}"

    pair = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    pair[0].weight = pair[1].weight
    pair.to(device.torch_device)
    # A plug-in tells torch by `_has_compatible_shallow_copy_type` that parameters can change their device in place.
    assert pair[0].weight is pair[1].weight, "module.to(device) unties tied weights: an LM head leaves its embedding"

    state = device.rng_state()
    assert state.dtype == torch.uint8, f"rng_state is {state.dtype}"
    assert state.device.type == "cpu", f"rng_state is on {state.device}"
    first = torch.rand(8, device=device.torch_device).cpu()
    device.set_rng_state(state)
    assert torch.equal(torch.rand(8, device=device.torch_device).cpu(), first), "set_rng_state does not restore"
    device.manual_seed(1)
    first = torch.rand(8, device=device.torch_device).cpu()
    device.manual_seed(1)
    assert torch.equal(torch.rand(8, device=device.torch_device).cpu(), first), "manual_seed does not repeat"

    memory = device.memory()
    if backend.is_host:
        assert memory == Memory(), "the host processor reports no device memory"
    else:
        assert None not in (memory.free, memory.total, memory.allocated, memory.peak), f"memory is incomplete: {memory}"
    with device.stream(device.new_stream()), device.trace("check_backend"):
        torch.ones(8, device=device.torch_device).sum()
    if device.recorder:
        x = torch.ones(8, device=device.torch_device)
        recording = device.recorder(lambda: (x + 1).cumsum(0))
        for start in (1.0, 5.0):
            x.fill_(start)
            recording.replay()
            expected = (start + 1) * torch.arange(1.0, 9.0)
            assert torch.equal(recording.output.cpu(), expected), "a replayed recording does not read its input anew"
        recording.release()
    device.reset_peak()
    device.empty_cache()
    device.synchronize()
    return f"device: {device.name} ({device.arch})"
