"""Checks that installed packages still import, run in their environment and only when files have changed."""

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

IMPORT_NAMES = {
    "pyyaml": "yaml",
    "pillow": "PIL",
    "pytest-xdist": "xdist",
    "import-linter": "importlinter",
    "mkdocs-material": "material",
}  # distribution -> module, where the names differ

# Run with -I, which ignores PYTHONPATH and the current folder.
IMPORT = """
import importlib, json, os, sys
problems = {}
for name in sys.argv[1:]:
    print("importing", name, flush=True)
    try:
        place = importlib.import_module(name).__file__ or ""
    except BaseException as error:
        problems[name] = f"{type(error).__name__}: {error}".strip()
    else:
        if not place.startswith(sys.prefix + os.sep):
            problems[name] = f"{place or 'a folder without __init__.py'} is imported in its place"
print("problems " + json.dumps(problems), flush=True)
"""


def fingerprint(venv: Path, names: Iterable[str]) -> str:
    """Hash the sizes and times of the files of distributions, and the entries of site-packages; reads no file.

    Args:
        venv: a virtual environment.
        names: distributions.
    """
    digest = hashlib.sha256()
    for site in _sites(venv):
        for entry in sorted(os.scandir(site), key=lambda entry: entry.name):
            digest.update(f"{entry.name} {entry.stat().st_mtime_ns}\n".encode())
        for name in sorted(names):
            for file, _ in _recorded(site, name):
                digest.update(f"{file} {_size_and_time(f'{site}/{file}')}\n".encode())
    return digest.hexdigest()


def import_problems(python: Path, names: Iterable[str]) -> dict[str, str]:
    """Import distributions in a process of their environment; return those that fail, with the reason.

    Args:
        python: the interpreter of the environment.
        names: distributions.
    """
    modules = {IMPORT_NAMES.get(name, name.replace("-", "_")): name for name in names}
    result = subprocess.run(
        [str(python), "-I", "-c", IMPORT, *modules],
        # torch-npu's autoload needs CANN's variables; plug-ins are not checked here
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    reports = [line.removeprefix("problems ") for line in result.stdout.splitlines() if line.startswith("problems ")]
    if reports:
        return {modules[module]: reason for module, reason in json.loads(reports[-1]).items()}
    started = [line.split()[1] for line in result.stdout.splitlines() if line.startswith("importing ")]
    message = (result.stderr.strip().splitlines() or ["no message"])[-1]
    return {modules[module]: f"Python ended with status {result.returncode}: {message}" for module in started[-1:]}


def damaged(venv: Path) -> list[str]:
    """Return the installed distributions with a missing file or one whose size differs from their RECORD."""
    return sorted(
        record.name.rsplit("-", 2)[0]
        for site in _sites(venv)
        for record in site.glob("*.dist-info")
        if not record.name.startswith("pip-")
        and any(size != _size_and_time(f"{site}/{file}")[0] for file, size in _files(record) if size is not None)
    )


def _sites(venv: Path) -> list[Path]:
    return sorted(venv.glob("lib/python*/site-packages"))


def _recorded(site: Path, name: str) -> Iterator[tuple[str, int | None]]:
    pattern = re.sub(r"[-_.]+", "[-_.]", name)
    for record in site.glob(f"{pattern}-*.dist-info"):
        yield from _files(record)


def _files(record: Path) -> Iterator[tuple[str, int | None]]:
    """Yield (path, size) of a distribution's modules and data; pip itself writes its scripts and .pyc files."""
    try:
        lines = (record / "RECORD").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        file, _, size = line.rsplit(",", 2)
        if not file.endswith(".pyc") and not file.startswith(".."):
            yield file.strip('"'), int(size) if size else None


def _size_and_time(file: str) -> tuple[int | None, int | None]:
    try:
        stat = os.stat(file)  # a Path of each of ten thousand files would take longer than its stat
    except OSError:
        return None, None
    return stat.st_size, stat.st_mtime_ns
