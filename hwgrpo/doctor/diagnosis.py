"""The whole diagnosis as one document: gather, decide, examine, survey, and, when asked, try."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hwgrpo_backends import Backend, Decision, Facts, gather_tier0, gather_tier1, registry
from hwgrpo_backends.decide import AUTO, decide
from hwgrpo_backends.finding import Finding

from hwgrpo import __version__
from hwgrpo.catalog import ENGINES
from hwgrpo.doctor.checks import Subject, examine
from hwgrpo.doctor.device_check import Trial, run_trials
from hwgrpo.doctor.hardware import proven_on
from hwgrpo.doctor.host_facts import HostFacts, gather_host
from hwgrpo.doctor.survey import Engine, Question, look_inside, looking_inside, rollout_engines
from hwgrpo.doctor.versions import Fit, fits, installed_versions

SCHEMA = "hwgrpo.doctor/1"


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything that was found out about a host."""

    decision: Decision
    findings: tuple[Finding, ...]
    hardware: Mapping[str, str]
    """Backend -> where this project was run on it."""
    inside: Mapping[str, Any] = field(default_factory=dict)
    """Kernels and attention of the chosen backend; empty where none was chosen or torch does not import."""
    engines: tuple[Engine, ...] = ()
    versions: tuple[Fit, ...] = ()
    trials: tuple[Trial, ...] | None = None
    """What `--run` came to; None when it was not asked for."""
    facts: Facts
    host: HostFacts

    @property
    def backend(self) -> str | None:
        """What the exit code is about: the backend that was asked for, else the one that was chosen."""
        return self.decision.selected or (None if self.decision.requested == AUTO else self.decision.requested)

    @property
    def failures(self) -> tuple[str, ...]:
        """What stands in the way of `backend`, by name."""
        wrong = [f.what for f in self.findings if f.state == "FAIL" and f.concerns(self.backend)]
        return tuple(wrong + [f"{t.device}: {t.what}" for t in self.trials or () if t.state == "FAIL"])

    def to_json(self) -> dict[str, Any]:
        """Return the report as the document of `SCHEMA`."""
        decision = self.decision
        candidates = [
            {"name": name, "verdict": v.state, "reason": v.reason, "fix": v.fix, "devices": v.devices,
             "hardware": self.hardware.get(name, "")}
            for name, v in decision.verdicts.items()
        ]  # fmt: skip
        return {
            "schema": SCHEMA,
            "hwgrpo": __version__,
            "requested": decision.requested,
            "selected": decision.selected,
            "error": decision.error,
            "failures": list(self.failures),
            "checks": [{**asdict(finding), "backends": list(finding.backends)} for finding in self.findings],
            "candidates": candidates,
            "kernels": self.inside.get("kernels"),
            "attention": self.inside.get("attention"),
            "rollout": [engine._asdict() for engine in self.engines],
            "versions": [asdict(fit) for fit in self.versions],
            "run": None if self.trials is None else [asdict(trial) for trial in self.trials],
            "facts": self.facts.to_json(),
            "host": self.host.to_json(),
        }


def diagnose(
    requested: str,
    *,
    run: bool = False,
    limit: float | None = None,
    root: str | Path = "/",
    environ: Mapping[str, str] = os.environ,
) -> Report:
    """Examine this machine. Imports no torch itself.

    Args:
        requested: the name of a backend, or "auto".
        run: whether to try the chosen backend's devices, too.
        limit: seconds that each device may take for that.
        root: where /dev, /proc, /sys and /etc are looked for.
    """
    backends, problems = _load_backends()
    facts = gather_tier0(root, environ, backends.values())
    decision = decide(facts, requested, backends, problems)
    inside: Mapping[str, Any] = {}
    if facts.torch_version is not None:
        facts, decision, inside = _ask_torch(facts, decision, requested, environ, backends, problems)
    subject = Subject(facts, gather_host(root, environ), decision, backends, problems)
    chosen = backends.get(decision.selected or "")
    devices = decision.verdicts[chosen.name].devices if chosen else 0
    works = facts.torch is not None and facts.torch.imported
    trials = None
    if run:
        limits = {} if limit is None else {"limit": limit}
        trials = tuple(run_trials(chosen, devices, environ=environ, **limits)) if chosen and works else ()
    return assemble(subject, inside, trials)


def _ask_torch(
    facts: Facts,
    expected: Decision,
    requested: str,
    environ: Mapping[str, str],
    backends: Mapping[str, Backend],
    problems: Mapping[str, str],
) -> tuple[Facts, Decision, Mapping[str, Any]]:
    """Return the facts with tier 1, the decision on them, and what is inside of the backend it chooses.

    Tier 1 and the survey import torch, which takes seconds, each in a child. So the backend that is `expected` from
    tier 0 is surveyed at the same time, and another one only where torch changes the question.
    """
    guess = _question(expected, facts, backends)
    if guess and backends[guess.backend].attention_archs:  # the chip matters, which nobody knows yet
        guess = None
    with looking_inside(guess, environ) if guess else nullcontext() as told:
        facts = gather_tier1(facts, environ, backends.values())
        decision = decide(facts, requested, backends, problems)
        question = _question(decision, facts, backends) if facts.torch and facts.torch.imported else None
        if question is None:
            return facts, decision, {}
        if told and question == guess:
            return facts, decision, told()
    return facts, decision, look_inside(question, environ)


def _question(decision: Decision, facts: Facts, backends: Mapping[str, Backend]) -> Question | None:
    """Return what is to be asked about the chosen backend; None where none was chosen."""
    chosen = backends.get(decision.selected or "")
    if chosen is None:
        return None
    device = facts.torch.devices.get(chosen.device_type) if facts.torch and chosen.attention_archs else None
    return Question(
        chosen.name, decision.verdicts[chosen.name].devices > 0, device.archs[0] if device and device.archs else None
    )


def assemble(subject: Subject, inside: Mapping[str, Any], trials: tuple[Trial, ...] | None = None) -> Report:
    """Make the report of what was gathered; a pure function but for the result files that `proven_on` reads."""
    facts, decision = subject.facts, subject.decision
    chosen = subject.backends.get(decision.selected or "")
    plugins = inside.get("kernels", {}).get("plugins", [])
    broken = [
        Finding(what=f"kernel plug-in {each['name']}", state="warn", found=each["error"],
                fix="repair or uninstall the distribution that brings it")
        for each in plugins if each["error"]
    ]  # fmt: skip
    untold = [
        Finding(what=part, state="FAIL", found=told["error"], fix="hwgrpo kernels shows the full error")
        for part, told in inside.items()
        if isinstance(told, dict) and told.get("error")
    ]
    return Report(
        decision=decision,
        findings=(*examine(subject), *broken, *untold),
        hardware={name: proven_on(backend) for name, backend in subject.backends.items()},
        inside=inside,
        engines=tuple(rollout_engines(chosen, ENGINES.names(), facts.distributions)) if chosen else (),
        versions=tuple(fits(installed_versions(facts, __version__))),
        trials=trials,
        facts=facts,
        host=subject.host,
    )


def _load_backends() -> tuple[Mapping[str, Backend], Mapping[str, str]]:
    try:
        return registry.load_all()
    except Exception as error:  # metadata in pieces: the built-in ones can still be told about
        built_in = {name: importlib.import_module(f"hwgrpo_backends.{name}").BACKEND for name in registry.BUILTIN}
        return built_in, {"(all)": f"no plug-in could be loaded: {error}"}
