"""Make the virtual environment for this machine's hardware; scripts/setup.sh starts it. Standard library only."""

import argparse
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from setup_check import damaged, fingerprint, import_problems
from setup_plan import (
    BUILD_NAMES,
    CUDA_INDEX,
    ROLLOUTS,
    TARGETS,
    TRITON,
    Previous,
    SetupError,
    Step,
    choose,
    cuda_tags,
    detect,
    gather,
    pip_command,
    plan,
    python_version,
    refuse_jetson,
    resolved_build,
)

# setup_plan puts the backends' folder on the path
from hwgrpo_backends import torch_build  # isort: skip
from hwgrpo_backends.facts import Facts  # isort: skip

REPO = Path(__file__).resolve().parent.parent
STAMP = "hwgrpo-setup.json"
"""In the environment: its backend, ...; the key "inputs" marks a completed installation, "dev" developers' tools."""
FILES, TOOLS_FILES = "files", "files with tools"
"""Keys of the stamp: the fingerprint of the files when the packages were imported; when the tools were, too."""
INDEX_TIMEOUT_S = 4
PROGRESS_S = 15.0
"""Seconds between two lines of progress."""
LOCK_TIMEOUT_S, LOCK_POLL_S = 3600, 10.0
WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
"""Errors of a file system without locks (`hwgrpo/support/file_systems.py`, not importable before the set-up)."""
LARGE_DOWNLOAD = re.compile(
    r"Downloading (\S+\.(?:whl|tar\.gz)) \((\d{2,}\.\d+ MB|[\d.]+ GB)\)"
)  # pip's lines, from 10 MB

EPILOG = """\
variables:
  HWGRPO_BACKEND         the same as --backend
  HWGRPO_PYTHON          the interpreter to use
  HWGRPO_TORCH_INDEX     wheel index for torch; empty: only pip's configured index
                         (default: PyTorch's public index for cpu, npu and rocm, and for cuda if
                         the driver is too old for PyPI's build of torch)
  HWGRPO_SETUP_FORCE=1   install for hardware that this machine does not have

scripts/test.sh and .ci/run install the developers' tools (--dev).

The rollout environments (--rollout) are for serving vLLM: .venv-vllm and .venv-vllm-ascend. They are large;
the slow tests install the first; no test installs the second. --dry-run prints their commands."""


def main(argv: list[str]) -> int:
    args = _parse(argv)
    venv = REPO / (f".venv-{args.rollout}" if args.rollout else ".venv")
    stamp = {} if args.fresh else _read_stamp(venv)
    previous = Previous(stamp["backend"], stamp["asked"]) if "inputs" in stamp else None
    requested = args.backend or os.environ.get("HWGRPO_BACKEND") or None
    force = os.environ.get("HWGRPO_SETUP_FORCE") == "1"
    if args.rollout == "vllm-ascend" and requested is None:
        requested = "npu"
    facts = gather(args.root)
    found = detect(facts)
    choice = choose(requested, found, previous, force=force or args.dry_run, unserved=facts.unserved)
    backend = choice.backend
    inputs = _inputs(backend, args.rollout, dev=args.dev)
    state = _state(venv, stamp, backend, inputs, record=not args.dry_run)
    if state.is_complete:
        print(f"hwgrpo set-up: {venv.name} is up to date (backend {backend}: {choice.why})")
        return 0

    print(f"hwgrpo set-up: backend {backend}: {choice.why}")
    if backend not in found and backend != "cpu" and not force:
        print("  no such device on this machine: to install for it here set HWGRPO_SETUP_FORCE=1")
    for name, reason in state.broken.items():
        print(f"  damaged      {name}: {reason}")
    sources = _torch_sources(backend, facts)
    constraints = f"scripts/constraints/{f'rollout-{args.rollout}' if args.rollout else backend}.txt"
    plans = [
        plan(backend, args.rollout, each.index, each.tag, constraints, python_version(), dev=args.dev)
        for each in sources
    ]
    if state.lacks_tools_only:
        print(f"  tools        {', '.join(_tools())}: missing; installed once, in about a minute")
    else:
        print(f"  torch from   {', else '.join(each.why for each in sources)}")
    print(f"  versions     {constraints}")
    print(f"  environment  {venv} with Python {sys.version.split()[0]} ({sys.executable})")
    if args.dry_run:
        print("commands (not run):")
        if not _can_keep(venv, stamp, backend):
            print(f"  {sys.executable} -m venv {shlex.quote(str(venv))}")
        for step in plans[0][1:] if state.lacks_tools_only else plans[0]:
            assignments = "".join(f"{key}={value} " for key, value in step.env.items())
            print(f"  {assignments}{shlex.join(pip_command(venv / 'bin' / 'python', step))}")
        return 0
    with _one_at_a_time():
        stamp = {} if args.fresh else _read_stamp(venv)
        keep = _can_keep(venv, stamp, backend)
        state = _state(venv, stamp, backend, inputs)
        if state.is_complete:
            print("  another set-up has just installed it")
            return 0
        made = {
            "backend": backend,
            "rollout": args.rollout,
            "asked": choice.asked,
            "place": str(venv),
            "python": _python(stamp, keep),
        }
        complete = made | inputs
        python = venv / "bin" / "python"
        if state.lacks_tools_only:
            for step in plans[0][1:]:
                _install(python, step)
        else:
            _make(venv, made, keep=keep)
            _install_all(venv, plans, backend, state.broken, force=force)
        with _progress("checking that packages import"):
            broken = import_problems(python, _required(complete, tools=args.dev))
        if broken:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in broken.items())
            raise SetupError(
                f"packages do not import after their installation ({reasons}). --fresh removes {venv} and starts over."
            )
        _write_stamp(venv, complete, tools=args.dev)
    print(f"hwgrpo set-up: done, {venv.name} is ready")
    return 0


def _install_all(venv: Path, plans: list[list[Step]], backend: str, broken: Mapping[str, str], *, force: bool) -> None:
    """Install the first plan that resolves, after the removal of broken packages."""
    python = venv / "bin" / "python"
    if broken:  # to pip a package with a RECORD is installed: remove it first
        _install(python, Step("damaged packages", ("uninstall", "-y", *sorted({*broken, *damaged(venv)}))))
    with _progress("asking the index for torch"):
        torch, *others = _first_that_resolves(python, plans, backend, force=force)
    _install(python, torch)
    with _progress("checking torch"):
        _check_torch(python, TARGETS[backend].build)
    for step in others:
        _install(python, step)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bash scripts/setup.sh",
        description="Set up hwgrpo: detect the hardware, make .venv, install the matching build of torch and hwgrpo.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--backend", metavar="|".join(TARGETS), help="install for this hardware instead of the detected one"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--rollout", choices=ROLLOUTS, help="make a rollout environment instead of .venv")
    which.add_argument(
        "--dev", action="store_true", help="also install the developers' tools: pytest, ruff, pyright, ..."
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the commands without running them; needs no device"
    )
    parser.add_argument("--fresh", action="store_true", help="remove the environment and start over")
    parser.add_argument("--root", type=Path, default=Path("/"), help="folder that contains dev/...; for tests")
    return parser.parse_args(argv)


def _project() -> dict:
    return tomllib.loads((REPO / "pyproject.toml").read_text())


def _inputs(backend: str, rollout: str | None, *, dev: bool) -> dict[str, str]:
    """Return what a complete installation's stamp has: of which inputs it is, and of which developers' tools.

    Args:
        backend: a key of TARGETS.
        rollout: the rollout environment, or None for .venv.
        dev: with developers' tools.
    """
    file = _project()
    extras = dict(file["project"]["optional-dependencies"])
    tools = extras.pop("dev")
    project = file["project"] | {"optional-dependencies": extras}
    relevant = {"project": project, "build": file["build-system"], "hatch": file["tool"]["hatch"]}
    parts = [json.dumps(relevant, sort_keys=True), backend, rollout or ""]
    parts += [path.read_text() for path in sorted((REPO / "scripts" / "constraints").glob("*.txt"))]
    hashed = {"inputs": hashlib.sha256("\0".join(parts).encode()).hexdigest()}
    content = json.dumps([hashed, tools])  # of changed pins the tools are installed again
    return hashed | ({"dev": hashlib.sha256(content.encode()).hexdigest()} if dev else {})


def _tools() -> list[str]:
    """Return the names of the distributions of the developers' tools."""
    return _names(_project()["project"]["optional-dependencies"]["dev"])


def _names(requirements: Iterable[str]) -> list[str]:
    return [re.split(r"[^\w.-]", requirement)[0] for requirement in requirements]


def _required(stamp: Mapping[str, Any], *, tools: bool) -> list[str]:
    """Return the names of the distributions that an environment of this stamp requires."""
    if stamp["rollout"] == "vllm-ascend":  # it lacks hwgrpo, and the other packages do not import without CANN
        return ["torch", "transformers"]
    triton = _names([TRITON]) if stamp["backend"] == "cpu" else []
    return [*_names(_project()["project"]["dependencies"]), *([*_tools(), *triton] if tools else [])]


@dataclass(frozen=True)
class State:
    """What an environment has of what is wanted."""

    is_current: bool
    """Its packages, apart from the developers' tools, are of these inputs."""
    has_tools: bool
    """It has the developers' tools, or none are wanted."""
    broken: Mapping[str, str]
    """Distributions that no longer import, with the reason."""

    @property
    def is_complete(self) -> bool:
        return self.is_current and self.has_tools and not self.broken

    @property
    def lacks_tools_only(self) -> bool:
        return self.is_current and not self.has_tools and not self.broken


def _state(venv: Path, stamp: dict, backend: str, inputs: Mapping[str, str], *, record: bool = True) -> State:
    """Compare an environment with what is wanted; imports its packages only when files have changed.

    Args:
        venv: the environment.
        stamp: its stamp.
        backend: the backend that is wanted.
        inputs: from `_inputs`.
        record: write to the stamp that all import, so that the next call need not import them.
    """
    current = _can_keep(venv, stamp, backend) and stamp["inputs"] == inputs["inputs"]
    has_tools = "dev" not in inputs or stamp.get("dev") == inputs["dev"]
    tools = "dev" in inputs and has_tools
    if not current or stamp.get(TOOLS_FILES if tools else FILES) == _files(venv, stamp):
        return State(current, has_tools, {})
    with _progress("checking that packages import"):
        broken = import_problems(venv / "bin" / "python", _required(stamp, tools=tools))
    if record and not broken:
        _write_stamp(venv, stamp, tools=tools)
    return State(current, has_tools, broken)


def _files(venv: Path, stamp: Mapping[str, Any]) -> str:
    """Return the fingerprint of the environment; of developers' tools it has the entries of site-packages alone."""
    return fingerprint(venv, _required(stamp, tools=False))


def _write_stamp(venv: Path, stamp: dict, *, tools: bool) -> None:
    """Write atomically that the environment is complete, with the fingerprint of its files.

    Args:
        tools: the developers' tools are complete, too.
    """
    files = _files(venv, stamp)
    new = venv / f"{STAMP}.new"
    new.write_text(json.dumps({**stamp, FILES: files, **({TOOLS_FILES: files} if tools else {})}))
    new.replace(venv / STAMP)


def _read_stamp(venv: Path) -> dict:
    try:
        return json.loads((venv / STAMP).read_text())
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError):
        return {}  # missing or truncated: the environment may be incomplete


def _can_keep(venv: Path, stamp: dict, backend: str) -> bool:
    """Return whether a complete environment can be kept: same backend, folder and Python."""
    named_python = os.environ.get("HWGRPO_PYTHON")
    return (
        "inputs" in stamp
        and stamp["backend"] == backend
        and stamp["place"] == str(venv)  # its scripts hold absolute paths
        and (not named_python or stamp["python"] == sys.executable)
        and (venv / "bin" / "python").exists()
    )


def _python(stamp: dict, keep: bool) -> str:
    return stamp["python"] if keep else sys.executable


@dataclass(frozen=True)
class Source:
    """A wheel index with a build of torch."""

    index: str
    """Extra wheel index, "" for the configured one only."""
    tag: str
    """Required local version, such as "+cu126", or ""."""
    why: str


def _torch_sources(backend: str, facts: Facts) -> list[Source]:
    """Return the sources of torch to try, best first."""
    configured = "the index pip is configured with"
    named = os.environ.get("HWGRPO_TORCH_INDEX")
    target = TARGETS[backend]
    if named is not None:
        if named.startswith("http") and (problem := _unreachable(named)):
            raise SetupError(f"HWGRPO_TORCH_INDEX={named} cannot be reached: {problem}")
        why = f"{named} (HWGRPO_TORCH_INDEX)" if named else f"{configured} (HWGRPO_TORCH_INDEX is empty)"
        return [Source(named, "", why)]
    if backend == "cuda":
        refuse_jetson(facts)
        driver = facts.nvidia_driver
        return [
            _source(f"{CUDA_INDEX}{tag}", f"+{tag}", f" (for the driver {driver})")
            if tag
            else Source("", "", f"{configured} (PyPI's Linux wheels are CUDA builds)")
            for tag in cuda_tags(driver)
        ]
    return [_source(target.torch_index, target.torch_tag) if target.torch_index else Source("", "", configured)]


def _source(index: str, tag: str, why: str = "") -> Source:
    if problem := _unreachable(index):
        return Source("", tag, f"the index pip is configured with{why}; {index} cannot be reached: {problem}")
    return Source(index, tag, f"{index}{why}")


def _first_that_resolves(python: Path, plans: list[list[Step]], backend: str, *, force: bool) -> list[Step]:
    """Return the first plan whose torch the index has, before anything large is downloaded.

    Raises:
        SetupError: this torch is built for other hardware.
    """
    needs = TARGETS[backend].build or "cpu"
    for steps in plans:
        command = pip_command(python, Step("", ("--dry-run", "--ignore-installed", *steps[0].pip)))
        with subprocess.Popen(
            command,
            cwd=REPO,
            env=_pip_environment({"PYTHONUNBUFFERED": "1"}),  # unbuffered, so that pip can be stopped early
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as pip:
            assert pip.stdout is not None
            known, build = resolved_build(pip.stdout)
            if known:
                pip.kill()  # before it downloads
        if build not in (None, needs) and not (force and not TARGETS[backend].build):
            raise SetupError(
                f"{steps[0].title} would be {BUILD_NAMES[build]}, with gigabytes of libraries for other hardware;"
                f" backend {backend} needs {BUILD_NAMES[needs]}. Name an index that has one:"
                " HWGRPO_TORCH_INDEX=URL bash scripts/setup.sh"
                + ("" if TARGETS[backend].build else ", or accept this build: HWGRPO_SETUP_FORCE=1")
            )
        if known or pip.returncode == 0:
            return steps
    return plans[0]  # pip itself will report the error


def _unreachable(index: str) -> str | None:
    """Return why `index` is unreachable within a few seconds, or None; the time limit includes the name lookup."""
    import urllib.request  # here: an environment that is up to date asks no index, and its import takes long

    outcome = [f"no response within {INDEX_TIMEOUT_S} s"]

    def request() -> None:
        try:
            with urllib.request.urlopen(f"{index.rstrip('/')}/torch/", timeout=INDEX_TIMEOUT_S):
                outcome[0] = ""
        except (OSError, ValueError) as error:  # URLError and HTTPError are OSErrors
            outcome[0] = str(error)

    thread = threading.Thread(target=request, daemon=True)
    thread.start()
    thread.join(INDEX_TIMEOUT_S)
    return outcome[0] or None


def _locked(folder: int) -> bool:
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
    return True


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Hold a lock on the repository folder, so that two launchers started together install once."""
    folder = os.open(REPO, os.O_RDONLY)
    try:
        began = time.monotonic()
        while not _locked(folder):
            waited = time.monotonic() - began
            if waited > LOCK_TIMEOUT_S:
                raise SetupError(
                    f"another set-up in {REPO} has not ended within {LOCK_TIMEOUT_S} s: end it and run this again"
                )
            print(
                f"  waiting for another set-up in this folder: {waited:.0f} s of at most {LOCK_TIMEOUT_S} s", flush=True
            )
            time.sleep(LOCK_POLL_S)
        yield
    finally:
        os.close(folder)


def _make(venv: Path, wanted: dict, *, keep: bool) -> None:
    """Make or keep `venv`, and mark it incomplete, so that set-up starts over after an interruption."""
    if venv.exists() and not (venv / STAMP).exists():
        raise SetupError(f"{venv} was not made by this script. Move it away and run this again.")
    if not keep:
        if venv.exists():
            print("  removing the old environment (incomplete, or for another backend or Python)", flush=True)
            with _progress("removing"):
                shutil.rmtree(venv)
        venv.mkdir()
    (venv / STAMP).write_text(json.dumps(wanted))
    if not keep:
        _run("creating", "the environment", [sys.executable, "-m", "venv", str(venv)], {})


def _pip_environment(extra: Mapping[str, str]) -> dict[str, str]:
    # A pip configured for --user, --target or --prefix would install outside of the environment.
    env = {key: value for key, value in os.environ.items() if key not in ("PIP_TARGET", "PIP_PREFIX", "PIP_ROOT")}
    return env | {"PIP_USER": "0", "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **extra}


def _install(python: Path, step: Step) -> None:
    """Run a step: on a terminal with pip's own progress bar, elsewhere with a line for each large download."""
    interactive = sys.stdout.isatty()
    command = pip_command(python, step, bar="on" if interactive else "off")
    action = "removing" if step.pip[0] == "uninstall" else "installing"
    _run(action, step.title, command, step.env, show=interactive)


@contextlib.contextmanager
def _progress(title: str, *, lines: Sequence[str] = (), inline: bool = False) -> Iterator[None]:
    """Print a line every PROGRESS_S seconds, so that no long step is silent.

    Args:
        title: what is done.
        lines: output of a command, which may grow; the last one is printed in place of the title.
        inline: the line of the step is not ended.
    """
    ended = threading.Event()
    began = time.monotonic()

    def report() -> None:
        while not ended.wait(PROGRESS_S):
            doing = textwrap.shorten(lines[-1] if lines else title, 90, placeholder=" ...")
            start, end = ("\n", "") if inline else ("", "\n")
            print(f"{start}    after {time.monotonic() - began:.0f} s: {doing}", end=end, flush=True)

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(PROGRESS_S)


def _run(action: str, title: str, command: list[str], extra_env: Mapping[str, str], *, show: bool = False) -> None:
    """Run a command; if it fails, print its full output.

    Args:
        action: a verb such as "installing", printed before the title.
        title: the object of the action.
        command: program and arguments.
        extra_env: variables added to the environment.
        show: connect the command to the terminal.
    """
    print(f"  {action} {title} ...", end="\n" if show else "", flush=True)
    began = time.monotonic()
    lines = []
    with (
        _progress(f"{action} {title}", lines=lines, inline=not show),  # until the command has ended
        subprocess.Popen(
            command,
            cwd=REPO,
            env=_pip_environment({"PYTHONUNBUFFERED": "1", **extra_env}),
            stdin=subprocess.DEVNULL,
            stdout=None if show else subprocess.PIPE,
            stderr=None if show else subprocess.STDOUT,
            text=True,
        ) as process,
    ):
        for line in process.stdout or ():
            lines.append(line)
            if large := LARGE_DOWNLOAD.search(line):
                print(f"\n    downloading {large[1].rpartition('/')[2]} ({large[2]}) ...", end="", flush=True)
    if process.returncode:
        print("" if show else " failed", flush=True)
        sys.stderr.write(f"$ {shlex.join(command)}\n{''.join(lines)}\n")
        if any(os.strerror(errno.ENOSPC) in line for line in lines):
            places = {str(place): shutil.disk_usage(place).free // 2**20 for place in (REPO, tempfile.gettempdir())}
            free = ", ".join(f"{mib} MiB free in {place}" for place, mib in places.items())
            raise SetupError(
                f"{action} {title} failed: the disk is full (now {free}). Free space, then run this again."
            )
        raise SetupError(
            f"{action} {title} failed: the command and its full output are above. Run this again to retry."
        )
    print(f"{'  ' if show else ''} {time.monotonic() - began:.0f} s", flush=True)


def _check_torch(python: Path, needs_build: torch_build.Build | None) -> None:
    """Raise on a build of torch for other hardware, before anything else is installed."""
    code = (
        "import json, torch; print(json.dumps({'version': torch.__version__, 'cuda': torch.version.cuda,"
        " 'hip': torch.version.hip}))"
    )
    env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # torch-npu's autoload needs CANN's variables
    result = subprocess.run(
        [str(python), "-c", code], env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    if result.returncode:
        raise SetupError(f"the installed torch does not import; --fresh starts over:\n{result.stderr}")
    torch = json.loads(result.stdout)
    built_for = torch_build.of_toolkits(torch["cuda"], torch["hip"])
    if needs_build and built_for != needs_build:
        raise SetupError(
            f"torch {torch['version']} is {BUILD_NAMES[built_for]}, but this hardware needs {BUILD_NAMES[needs_build]}."
            " Name an index that has one: HWGRPO_TORCH_INDEX=URL bash scripts/setup.sh"
        )


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SetupError as error:
        print(f"hwgrpo set-up: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("\nhwgrpo set-up: interrupted; run it again to start over", file=sys.stderr)
        sys.exit(130)
