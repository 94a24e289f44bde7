"""Select a backend: a pure function of facts.

1. Workers inherit their launcher's selection, unless they request another backend.
2. An explicit request (the argument, else HWGRPO_BACKEND) is used, or raises with the reason and the fix.
3. `auto`: the only usable accelerator is selected; two usable ones are an error naming both; an accelerator that the
   installed stack was built for, whose device or driver is present but unusable, is an error, never a silent CPU run;
   otherwise the CPU, with a warning for unused hardware and for a stack without its hardware.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import get_args

from hwgrpo_backends import registry, visibility
from hwgrpo_backends.backend import Backend, Hardware, State, Verdict
from hwgrpo_backends.facts import REQUEST_VARIABLE, SELECTED_VARIABLE, Facts
from hwgrpo_backends.unserved import DEVICE_TYPES

AUTO = "auto"
OTHER_NAMES = {"nvidia": "cuda", "amd": "rocm", "hip": "rocm", "radeon": "rocm", "ascend": "npu", "huawei": "npu"}
"""Common names of devices -> their backend."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The selected backend of a host, and the verdicts on all. Either `selected` or `error` is None."""

    requested: str
    """"auto" or a name, with HWGRPO_BACKEND applied."""
    selected: str | None = None
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    error: str | None = None
    inherited: bool = False
    """Selected by the launcher, and not checked again."""


def decide(
    facts: Facts,
    requested: str = AUTO,
    backends: Mapping[str, Backend] | None = None,
    problems: Mapping[str, str] | None = None,
) -> Decision:
    """Select a backend for a host.

    Args:
        requested: a name, or "auto".
        backends: the ones to choose from; every known one when left out.
        problems: backend name -> why its plug-in could not be loaded.
    """
    if backends is None:
        backends, problems = registry.load_all()
    problems = problems or {}
    wanted, source = requested, f"backend={requested!r}"
    if requested == AUTO and REQUEST_VARIABLE in facts.variables:
        wanted = facts.variables[REQUEST_VARIABLE] or AUTO
        source = f"{REQUEST_VARIABLE}={wanted!r}"
    verdicts = {name: _probe(backend, facts) for name, backend in backends.items()}
    verdicts |= {name: Verdict(state="unusable", reason=reason) for name, reason in problems.items()}

    inherited = facts.variables.get(SELECTED_VARIABLE)
    if inherited and requested in (AUTO, inherited):
        if inherited not in backends:
            error = describe_unknown(f"{SELECTED_VARIABLE}={inherited!r}", inherited, verdicts)
            return Decision(requested=requested, verdicts=verdicts, error=error)
        return Decision(requested=requested, selected=inherited, verdicts=verdicts, inherited=True)
    if wanted != AUTO and wanted not in verdicts:
        return Decision(requested=wanted, verdicts=verdicts, error=describe_unknown(source, wanted, verdicts))
    if wanted == AUTO:
        selected, error = _automatic(backends, verdicts)
    else:
        selected, error = wanted, None
    if selected and not verdicts[selected].usable:
        cause = source if wanted != AUTO else f"no accelerator can be used, and neither can the {selected} backend"
        why = _explain(verdicts[selected])
        if selected in backends and not verdicts[selected].fix:  # nothing is broken: it is simply not here
            why += f". Fix: choose auto, or go to a host with that device and {backends[selected].torch_build}"
        selected, error = None, f"{cause}: {why}"
    if selected is None:
        return Decision(requested=wanted, verdicts=verdicts, error=error)
    warnings = _conflicts(backends[selected], facts)
    if wanted == AUTO:
        without = _without_backend(facts) if backends[selected].is_host else []
        warnings = _left_unused(backends, verdicts, selected) + without + warnings
    return Decision(requested=wanted, selected=selected, verdicts=verdicts, warnings=tuple(warnings))


def _probe(backend: Backend, facts: Facts) -> Verdict:
    try:
        verdict = backend.probe(facts)
    except (Exception, SystemExit) as error:  # one vendor's error must not disable other backends
        return _mistaken(f"its probe raised {type(error).__name__}: {error}")
    if not isinstance(verdict, Verdict):
        return _mistaken(f"its probe returned a {type(verdict).__name__}, not a Verdict")
    texts = isinstance(verdict.reason, str) and isinstance(verdict.fix, str)
    known = verdict.state in get_args(State) and verdict.hardware in get_args(Hardware) and texts
    if not known or type(verdict.devices) is not int or (verdict.devices > 0) != verdict.usable:
        return _mistaken(f"its probe returned nonsense: {verdict}")
    return verdict


def _mistaken(reason: str) -> Verdict:
    return Verdict(state="unusable", reason=reason, fix="repair or uninstall the distribution that brings it")


def _automatic(backends: Mapping[str, Backend], verdicts: Mapping[str, Verdict]) -> tuple[str | None, str | None]:
    host = next(name for name, backend in backends.items() if backend.is_host)
    accelerators = [name for name, backend in backends.items() if not backend.is_host]
    usable = [name for name in accelerators if verdicts[name].usable]
    if len(usable) == 1:
        return usable[0], None
    if usable:
        found = "; ".join(f"{name}: {verdicts[name].reason}" for name in usable)
        choices = " or ".join(f"{REQUEST_VARIABLE}={name}" for name in usable)
        return None, f"more than one accelerator can be used ({found}). Fix: choose with {choices}"
    broken = [name for name in accelerators if verdicts[name].claimed and verdicts[name].hardware == "present"]
    if broken:
        found = "; ".join(f"{name}: {_explain(verdicts[name])}" for name in broken)
        # torch itself may be broken: then the CPU fails, too
        instead = f". To train on the CPU instead, ask for it: backend.name={host}, or {REQUEST_VARIABLE}={host}"
        return None, found + (instead if verdicts[host].usable else "")
    return host, None


def _left_unused(backends: Mapping[str, Backend], verdicts: Mapping[str, Verdict], selected: str) -> list[str]:
    """Return warnings for unused accelerators; an integrated GPU next to a working accelerator is ignored."""
    lines = []
    for name in (name for name, backend in backends.items() if not backend.is_host):
        verdict = verdicts[name]
        broken = verdict.claimed and verdict.hardware != "none"
        idle = backends[selected].is_host and (verdict.hardware == "present" or verdict.claimed)
        if name != selected and not verdict.usable and (broken or idle):
            lines.append(f"{name} is not used: {_explain(verdict)}")
    return lines


def _without_backend(facts: Facts) -> list[str]:
    if facts.torch_build == "xpu":
        return [f"torch {facts.torch_version} is built for {DEVICE_TYPES['xpu']}, which there is no backend for"]
    if (facts.system, facts.machine) == ("darwin", "arm64"):
        return [f"there is no backend for {DEVICE_TYPES['mps']}"]
    return [
        f"{name} ({path}): there is no backend for that, and training uses the CPU"
        for name, path in facts.unserved.items()
    ]


def _conflicts(backend: Backend, facts: Facts) -> list[str]:
    return [f"{problem}. Fix: {fix}" for problem, fix in visibility.contradictions(facts, backend)]


def _explain(verdict: Verdict) -> str:
    return f"{verdict.reason}. Fix: {verdict.fix}" if verdict.fix else verdict.reason


def describe_unknown(source: str, name: str, known: Iterable[str]) -> str:
    """Return the error for a name that is no backend's, with the backend that it may mean.

    Args:
        source: where the name was given (`backend.name='gpu'`).
        name: the name.
        known: names of the backends.
    """
    allowed = sorted(known)
    if name.lower() == "gpu":
        return f"{source} is not known; use cuda (NVIDIA) or rocm (AMD)"
    if name.lower() in DEVICE_TYPES:
        devices = DEVICE_TYPES[name.lower()]
        return f"{source}: there is no backend for {devices}; choose one of: {AUTO}, {', '.join(allowed)}"
    if meant := OTHER_NAMES.get(name.lower()):
        return f"{source} is not known; choose one of: {AUTO}, {', '.join(allowed)}. Did you mean {meant!r}?"
    near = difflib.get_close_matches(name.lower(), allowed, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{source} is not known; choose one of: {AUTO}, {', '.join(allowed)}.{hint}"
