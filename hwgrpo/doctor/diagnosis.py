"""The diagnosis of a machine: facts, decision, checks, survey and, with `--run`, self-tests of the devices."""

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
from hwgrpo.doctor.device_check import SelfTest, run_self_tests
from hwgrpo.doctor.hardware import proven_on
from hwgrpo.doctor.host_facts import HostFacts, gather_host
from hwgrpo.doctor.survey import Engine, SurveyRequest, rollout_engines, start_survey, survey_backend
from hwgrpo.doctor.versions import Fit, fits, installed_versions

SCHEMA = "hwgrpo.doctor/1"


@dataclass(frozen=True, kw_only=True)
class Report:
    """Diagnosis of a host."""

    decision: Decision
    findings: tuple[Finding, ...]
    hardware: Mapping[str, str]
    """Backend -> hardware on which this project was run."""
    survey: Mapping[str, Any] = field(default_factory=dict)
    """Kernels and attention of the selected backend; empty where none was selected or torch does not import."""
    engines: tuple[Engine, ...] = ()
    versions: tuple[Fit, ...] = ()
    self_tests: tuple[SelfTest, ...] | None = None
    """Results of `--run`; None without it."""
    facts: Facts
    host: HostFacts

    @property
    def backend(self) -> str | None:
        """The backend that the exit code is about: the selected one, else the requested one."""
        return self.decision.selected or (None if self.decision.requested == AUTO else self.decision.requested)

    @property
    def failures(self) -> tuple[str, ...]:
        """Names of the checks and self-tests that failed for `backend`, and of ops without an implementation to run."""
        failed = [f.what for f in self.findings if f.state == "FAIL" and f.concerns(self.backend)]
        failed += [f"kernels of {op['op']}" for op in self.survey.get("kernels", {}).get("ops", ()) if op["error"]]
        return tuple(failed + [f"{t.device}: {t.name}" for t in self.self_tests or () if t.state == "FAIL"])

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
            "kernels": self.survey.get("kernels"),
            "attention": self.survey.get("attention"),
            "rollout": [engine._asdict() for engine in self.engines],
            "versions": [asdict(fit) for fit in self.versions],
            "run": None if self.self_tests is None else [test.to_json() for test in self.self_tests],
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
    """Diagnose this machine; torch is imported in child processes only.

    Args:
        requested: name of a backend, or "auto".
        run: whether to run the self-tests on the selected backend's devices.
        limit: timeout of the self-tests in seconds, per device.
        root: folder that holds /dev, /proc, /sys and /etc.
    """
    backends, problems = _load_backends()
    facts = gather_tier0(root, environ, backends.values())
    decision = decide(facts, requested, backends, problems)
    survey: Mapping[str, Any] = {}
    if facts.torch_version is not None:
        facts, decision, survey = _ask_torch(facts, decision, requested, environ, backends, problems)
    subject = Subject(facts, gather_host(root, environ), decision, backends, problems)
    selected = backends.get(decision.selected or "")
    devices = decision.verdicts[selected.name].devices if selected else 0
    torch_imports = facts.torch is not None and facts.torch.imported
    self_tests = None
    if run:
        limits = {} if limit is None else {"limit": limit}
        self_tests = ()
        if selected is not None and torch_imports:
            self_tests = tuple(run_self_tests(selected, devices, environ=environ, **limits))
    return assemble(subject, survey, self_tests)


def _ask_torch(
    facts: Facts,
    expected: Decision,
    requested: str,
    environ: Mapping[str, str],
    backends: Mapping[str, Backend],
    problems: Mapping[str, str],
) -> tuple[Facts, Decision, Mapping[str, Any]]:
    """Return the facts with tier 1, the decision on them, and the survey of the selected backend.

    Tier 1 and the survey each import torch in a child process, which takes seconds. So the backend `expected` from
    tier 0 is surveyed in parallel; another survey follows only where torch changes the request.
    """
    expected_request = _survey_request(expected, facts, backends)
    if expected_request and backends[expected_request.backend].attention_archs:  # needs the chip, still unknown
        expected_request = None
    with start_survey(expected_request, environ) if expected_request else nullcontext() as wait_for_survey:
        facts = gather_tier1(facts, environ, backends.values())
        decision = decide(facts, requested, backends, problems)
        request = _survey_request(decision, facts, backends) if facts.torch and facts.torch.imported else None
        if request is None:
            return facts, decision, {}
        if wait_for_survey and request == expected_request:
            return facts, decision, wait_for_survey()
    return facts, decision, survey_backend(request, environ)


def _survey_request(decision: Decision, facts: Facts, backends: Mapping[str, Backend]) -> SurveyRequest | None:
    """Return the request for a survey of the selected backend; None where none was selected."""
    selected = backends.get(decision.selected or "")
    if selected is None:
        return None
    device = facts.torch.devices.get(selected.device_type) if facts.torch and selected.attention_archs else None
    arch = device.archs[0] if device and device.archs else None
    return SurveyRequest(selected.name, decision.verdicts[selected.name].devices > 0, arch)


def assemble(subject: Subject, survey: Mapping[str, Any], self_tests: tuple[SelfTest, ...] | None = None) -> Report:
    """Make the report; a pure function except for the result files that `proven_on` reads."""
    facts, decision = subject.facts, subject.decision
    selected = subject.backends.get(decision.selected or "")
    plugins = survey.get("kernels", {}).get("plugins", [])
    broken_plugins = [
        Finding(what=f"kernel plug-in {each['name']}", state="warn", found=each["error"],
                fix="repair or uninstall its distribution")
        for each in plugins if each["error"]
    ]  # fmt: skip
    failed_parts = [
        Finding(what=part, state="FAIL", found=result["error"], fix="hwgrpo kernels shows the full error")
        for part, result in survey.items()
        if isinstance(result, dict) and result.get("error")
    ]
    return Report(
        decision=decision,
        findings=(*examine(subject), *broken_plugins, *failed_parts),
        hardware={name: proven_on(backend) for name, backend in subject.backends.items()},
        survey=survey,
        engines=tuple(rollout_engines(selected, ENGINES.names(), facts.distributions)) if selected else (),
        versions=tuple(fits(installed_versions(facts, __version__))),
        self_tests=self_tests,
        facts=facts,
        host=subject.host,
    )


def _load_backends() -> tuple[Mapping[str, Backend], Mapping[str, str]]:
    try:
        return registry.load_all()
    except Exception as error:  # damaged metadata: the built-in backends can still be examined
        built_in = {name: importlib.import_module(f"hwgrpo_backends.{name}").BACKEND for name in registry.BUILTIN}
        return built_in, {"(all)": f"no plug-in could be loaded: {error}"}
