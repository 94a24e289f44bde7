"""One finding per possible fault of a host: pure functions over facts.

A check that raises becomes a finding, too: a machine in any state gets its diagnosis.
"""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from hwgrpo_backends import Backend, Decision, Facts, peaks
from hwgrpo_backends.finding import Finding, FindingState
from hwgrpo_backends.probing import IMPORTED_BY_OTHERS, broken_plugins, import_problem, plugin_fix, shadow_fix
from hwgrpo_backends.vendor_findings import vendor_findings
from hwgrpo_backends.visibility import contradictions, hidden_by, in_order, settings_of, unhide

from hwgrpo import __version__
from hwgrpo.doctor.host_facts import HostFacts
from hwgrpo.doctor.versions import check_versions

GIB = 1024**3
LEAST_PYTHON = (3, 11)
LEAST_SHM = GIB
LEAST_DISK = 20 * GIB
LEAST_FILES = 4096
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


class Subject(NamedTuple):
    """Input of a check."""

    facts: Facts
    host: HostFacts
    decision: Decision
    backends: Mapping[str, Backend]
    problems: Mapping[str, str]
    """Backend -> reason why its plug-in could not be loaded."""

    @property
    def accelerated(self) -> bool:
        """Whether an accelerator was selected."""
        backend = self.backends.get(self.decision.selected or "")
        return backend is not None and not backend.is_host


def examine(subject: Subject) -> list[Finding]:
    """Return the findings of all checks, causes before their consequences."""
    findings = []
    for check in CHECKS:
        try:
            findings += check(subject)
        except Exception as error:  # the diagnosis continues, and names the check that failed
            name = check.__name__.strip("_").replace("_", " ")
            problem = f"this check itself failed: {type(error).__name__}: {error}"
            fix = "report it with hwgrpo doctor --github"
            findings.append(Finding(what=name, state="warn", found=problem, fix=fix))
    return [finding for finding in findings if not _is_duplicate(finding, findings)]


def _is_duplicate(finding: Finding, findings: list[Finding]) -> bool:
    """Whether a warning of the decision repeats the finding of a check."""
    is_warning = finding.what == "backend" and finding.state == "warn"
    return is_warning and any(other is not finding and other.found in finding.found for other in findings)


def python(subject: Subject) -> Iterable[Finding]:
    host = subject.host
    version = ".".join(map(str, host.python))
    if host.python < LEAST_PYTHON:
        found, fix = f"{version} at {host.executable}", "make an environment with Python 3.11 or newer"
        yield Finding(what="Python", state="FAIL", found=found, fix=fix)
        return
    place = "" if host.in_venv else ", not a virtual environment"
    yield Finding(what="Python", found=f"{version} at {host.executable or 'an unknown place'}{place}")


def surroundings(subject: Subject) -> Iterable[Finding]:
    facts, host = subject.facts, subject.host
    memory = f", {host.memory / GIB:.0f} GiB" if host.memory else ""
    inside = [f"in a container ({facts.container})"] if facts.container else []
    inside += ["under WSL"] if facts.wsl else []
    inside += [f"started by {facts.scheduler}"] if facts.scheduler else []
    yield Finding(what="machine", found=", ".join([f"{host.platform}, {host.cores} cores{memory}", *inside]))


def torch_installed(subject: Subject) -> Iterable[Finding]:
    facts = subject.facts
    if file := facts.shadows.get("torch"):
        found = f"hidden: {file} is imported in its place"
        yield Finding(what="torch", state="FAIL", found=found, fix=shadow_fix([file]))
        return
    if facts.torch_version is None:
        yield Finding(what="torch", state="FAIL", found="not installed", fix="bash scripts/setup.sh")
        return
    build = f"built for {facts.torch_build}" if facts.torch_build else "its build is not known"
    toolkit = f" {facts.torch_toolkit}" if facts.torch_toolkit else ""
    yield Finding(what="torch", found=f"{facts.torch_version}, {build}{toolkit}")
    fits = [name for name, verdict in subject.decision.verdicts.items() if verdict.hardware == "present"]
    idle = [name for name in fits if name in subject.backends and not subject.backends[name].is_host]
    for name in idle:
        verdict = subject.decision.verdicts[name]
        if not verdict.usable and not verdict.claimed and not subject.accelerated:
            yield Finding(
                what="torch for the device", state="warn", found=verdict.reason, fix=verdict.fix, backends=(name,)
            )


def torch_imports(subject: Subject) -> Iterable[Finding]:
    """Report the chain of exceptions, and whether an import without plug-ins works."""
    torch = subject.facts.torch
    shadows = subject.facts.shadows
    if torch is None or subject.facts.torch_version is None or "torch" in shadows:
        return
    if torch.imported:
        without = subject.facts.variables.get(AUTOLOAD) == "0"
        note = f", without its plug-ins ({AUTOLOAD}=0)" if without else ""
        yield Finding(what="import torch", found=f"works{note}")
    else:
        chain = " <- ".join(torch.errors) or "no message"
        _, fix = import_problem(subject.facts, torch)
        broken = broken_plugins(subject.facts) if torch.without_plugins else []
        if set(broken) & set(IMPORTED_BY_OTHERS):
            fix += f" ({AUTOLOAD}=0 does not help: transformers imports it all the same)"
        elif broken:
            fix += f"; until then {AUTOLOAD}=0 makes `import torch` work, without that device"
        elif not (torch.without_plugins or torch.timed_out or "SIGKILL" in chain):
            fix += f" ({AUTOLOAD}=0 does not help)"
        yield Finding(what="import torch", state="FAIL", found=chain, fix=fix)
    for name, errors in torch.plugins.items():
        if errors and (torch.imported or errors[-1] not in torch.errors):
            fix = plugin_fix(subject.facts, [name])
            yield Finding(what=f"import {name}", state="FAIL", found=" <- ".join(errors), fix=fix)
        elif not errors:
            yield Finding(what=f"import {name}", found="works")


def plug_ins(subject: Subject) -> Iterable[Finding]:
    for name, problem in subject.problems.items():
        fix = "repair or uninstall its distribution"
        yield Finding(what=f"plug-in {name}", state="FAIL", found=problem, fix=fix, backends=(name,))
    for name in subject.facts.unreadable:
        found = f"{name}'s entry_points.txt is damaged: everything that loads plug-ins fails, `import torch` included"
        yield Finding(what="entry points", state="FAIL", found=found, fix=f"pip install --force-reinstall {name}")
    groups = [f"{group}: {', '.join(names)}" for group, names in subject.facts.entry_points.items()]
    if groups:
        yield Finding(what="entry points", found="; ".join(groups))


def vendors(subject: Subject) -> Iterable[Finding]:
    return vendor_findings(subject.facts, subject.decision.requested)


def visibility(subject: Subject) -> Iterable[Finding]:
    """Report variables that hide devices, or leave fewer than they name."""
    facts = subject.facts
    for name, backend in subject.backends.items():
        verdict, watched = subject.decision.verdicts[name], in_order(facts, backend)
        if not (verdict.signs or verdict.claimed):
            continue

        def finding(found: str, state: FindingState = "ok", fix: str = "", name: str = name) -> Finding:
            return Finding(what="visible devices", state=state, found=found, fix=fix, backends=(name,))

        if hidden := hidden_by(facts, watched):
            yield finding(f"{hidden} hides every {name} device", "warn", unhide(facts, hidden.partition("=")[0]))
        elif not verdict.usable and any(f"{variable}=" in verdict.reason for variable in watched):
            yield finding(verdict.reason, "FAIL", verdict.fix)
        elif problems := contradictions(facts, backend):
            yield from (finding(found, "warn", fix) for found, fix in problems)
        elif settings := settings_of(facts, watched):
            yield finding(settings)


def peak_rates(subject: Subject) -> Iterable[Finding]:
    """Report the peak rate of each kind of device of the selected backend."""
    backend = subject.backends.get(subject.decision.selected or "")
    seen = subject.facts.torch.devices.get(backend.device_type) if backend and subject.facts.torch else None
    if backend is None or seen is None or backend.is_host:
        return
    archs = seen.archs or tuple(name.lower().replace(" ", "_") for name in seen.names)
    for (arch, name), count in Counter(zip(archs, seen.names, strict=True)).items():
        row = peaks.find(backend.chips, arch, name)
        yield Finding(what="peak rate", found=f"{count} x {name}: {peaks.describe_chip(row)}", backends=(backend.name,))


def versions(subject: Subject) -> Iterable[Finding]:
    return check_versions(subject.facts, __version__)


def compiler(subject: Subject) -> Iterable[Finding]:
    host = subject.host
    missing = [] if host.c_compiler else ["C compiler (gcc, clang, or what CC names)"]
    missing += [] if host.python_header else ["Python.h"]
    if not missing:
        yield Finding(what="C compiler", found=f"{host.c_compiler}, and Python.h in {host.python_header}")
        return
    version = ".".join(map(str, host.python[:2]))
    absent = f"no {' and no '.join(missing)}"
    if not subject.accelerated:
        yield Finding(what="C compiler", found=f"{absent}; only Triton's kernels need them, on accelerators")
        return
    yield Finding(
        what="C compiler", state="warn", found=f"{absent}: Triton cannot build its launcher, ops run in plain torch",
        fix=f"apt-get install gcc python{version}-dev (Fedora: gcc python{version}-devel), or set CC",
    )  # fmt: skip


def shared_memory(subject: Subject) -> Iterable[Finding]:
    size = subject.host.shm
    if size is None:
        yield Finding(what="/dev/shm", found="missing; ranks on one host then communicate through sockets")
    elif size < LEAST_SHM:
        remedy = "start the container with --shm-size=8g (or --ipc=host)" if subject.facts.container else "enlarge it"
        fix = f"{remedy}; needed for several ranks or data workers on one host"
        yield Finding(what="/dev/shm", state="warn", found=_size(size), fix=fix)
    else:
        yield Finding(what="/dev/shm", found=_size(size))


def disk(subject: Subject) -> Iterable[Finding]:
    host = subject.host
    if not host.cache_writable:
        fix = "set HF_HOME to a writable folder"
        yield Finding(what="cache folder", state="warn", found=f"{host.cache} is not writable", fix=fix)
    elif host.cache_free is not None and host.cache_free < LEAST_DISK:
        found = f"{host.cache}: {_size(host.cache_free)} free; a 7B model needs 15 GiB"
        yield Finding(what="cache folder", state="warn", found=found, fix="free space, or set HF_HOME to a larger disk")
    else:
        free = "" if host.cache_free is None else f": {_size(host.cache_free)} free"
        yield Finding(what="cache folder", found=f"{host.cache}{free}")


def text_encoding(subject: Subject) -> Iterable[Finding]:
    name = subject.host.encoding
    try:
        is_utf8 = codecs.lookup(name).name == "utf-8"
    except LookupError:
        is_utf8 = False
    if is_utf8:
        yield Finding(what="locale", found="text is UTF-8")
    else:
        fix = "export PYTHONUTF8=1 (or LANG=C.UTF-8)"
        found = f"text is {name}: completions in other scripts cannot be printed"
        yield Finding(what="locale", state="warn", found=found, fix=fix)


def hub(subject: Subject) -> Iterable[Finding]:
    environment = subject.host.environment
    offline = environment.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    parts = ["offline (HF_HUB_OFFLINE): models come from folders and the cache only" if offline else "not contacted"]
    parts += [f"endpoint {environment['HF_ENDPOINT']}"] if environment.get("HF_ENDPOINT") else []
    parts += ["a token is set"] if environment.get("HF_TOKEN") else []
    yield Finding(what="model hub", found=", ".join(parts))


def limits(subject: Subject) -> Iterable[Finding]:
    files = subject.host.open_files
    if files is not None and files < LEAST_FILES:
        found = f"{files} open files per process; many ranks, data workers and sockets need more"
        yield Finding(
            what="ulimit -n", state="warn", found=found, fix="ulimit -n 65536 (docker: --ulimit nofile=65536)"
        )
    else:
        yield Finding(what="ulimit -n", found="no limit" if files is None else str(files))


def backend(subject: Subject) -> Iterable[Finding]:
    decision = subject.decision
    if decision.selected is None:
        yield Finding(what="backend", state="FAIL", found=decision.error or "none could be selected")
        return
    yield from (Finding(what="backend", state="warn", found=warning) for warning in decision.warnings)


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB / 10 else f"{count / 1024**2:.0f} MiB"


CHECKS: tuple[Callable[[Subject], Iterable[Finding]], ...] = (
    surroundings, python, torch_installed, vendors, torch_imports, plug_ins, visibility, peak_rates, versions, compiler,
    shared_memory, disk, text_encoding, hub, limits, backend,
)  # fmt: skip
