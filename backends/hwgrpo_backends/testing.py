"""The conformance suite: a vendor runs `check_backend(BACKEND)` in one line, on a host with the device and without."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from hwgrpo_backends.backend import Backend, EnvVar, Verdict
from hwgrpo_backends.conformance_names import check_names
from hwgrpo_backends.conformance_processes import check_collectives, check_comm, check_visible_devices
from hwgrpo_backends.facts import Facts
from hwgrpo_backends.peaks import Chip
from hwgrpo_backends.tier0 import gather_tier0
from hwgrpo_backends.tier1 import gather_tier1


def check_backend(backend: Backend, facts: Facts | None = None) -> list[str]:
    """Check a backend's data and probe and, when this host has the device, that device.

    Args:
        facts: this host with tier 1; gathered when left out.

    Returns:
        the checks, one line each; those impossible here are listed as not checked, with the reason.

    Raises:
        AssertionError: the backend breaks a rule; the message names it.
    """
    done = [_check_data(backend), check_names(backend), _check_probe(backend)]
    if facts is None:
        facts = gather_tier1(gather_tier0(backends=[backend]), backends=[backend])
    verdict = backend.probe(facts)
    _check_verdict(backend, verdict)
    if verdict.state != "ok":
        return [*done, f"device: not checked, {verdict.reason}"]
    from hwgrpo_backends.conformance_device import check_device  # it imports torch

    done += check_device(backend, verdict.devices)
    check_comm(backend)
    done.append(check_visible_devices(backend, facts, verdict.devices))
    return [*done, check_collectives(backend, verdict.devices)]


def _check_data(backend: Backend) -> str:
    assert re.fullmatch(r"[a-z][a-z0-9_]*", backend.name), f"name {backend.name!r} is not a lower-case word"
    assert backend.name != "auto", "the name 'auto' means: choose for me"
    assert backend.kernels[-1:] == ("torch",), f"kernels {backend.kernels} must end with 'torch'"
    assert backend.attention, "attention is empty"
    assert backend.rollout, "rollout is empty"
    assert backend.comm, "comm is empty"
    assert backend.torch_build, "torch_build is empty"
    _check_variables("train", backend.env_train)
    _check_variables("rollout", backend.env_rollout)
    _check_variables("deterministic train", backend.env_deterministic)
    _check_variables("optional", backend.env_optional)
    for name, archs in backend.attention_archs.items():
        assert name in backend.attention, f"attention_archs has {name!r}, which is not in attention"
        _check_texts(f"attention_archs of {name!r}", archs)
        assert archs, f"attention_archs of {name!r} is empty: no chip could use it"
    _check_texts("modules", backend.modules)
    assert backend.record or not backend.graphs_by_default, "graphs_by_default is set, but there is no record"
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
    assert verdict.state == "unusable", f"probe of a host with nothing installed gives {verdict.state!r}"
    assert backend.probe(nothing) == verdict, "probe gives different results for the same facts"
    return "probe"


def _check_verdict(backend: Backend, verdict: Verdict) -> None:
    assert isinstance(verdict, Verdict), f"probe returned a {type(verdict).__name__}"
    assert verdict.reason, "a verdict has no reason"
    assert (verdict.devices > 0) == verdict.usable, f"{verdict.state} with {verdict.devices} devices"
    if verdict.claimed and verdict.hardware == "present" and not verdict.usable:
        assert verdict.fix, "a device that is there but unusable needs a fix"
    json.dumps(verdict.reason + verdict.fix + backend.name)
