"""Whether what set-up installed still works: imported in the environment itself, and only when files have changed."""

import hashlib
import json
import os
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

IMPORT_NAMES = {"pyyaml": "yaml"}  # distributions whose module has another name than they

# -I: neither PYTHONPATH nor the folder it is started in counts.
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
    """Hash sizes and times of the files of distributions, and what else lies beside them, without reading any.

    Args:
        venv: a virtual environment.
        names: of distributions.
    """
    digest = hashlib.sha256()
    for site in _sites(venv):
        for entry in sorted(os.scandir(site), key=lambda entry: entry.name):
            digest.update(f"{entry.name} {entry.stat().st_mtime_ns}\n".encode())
        for name in sorted(names):
            for file, _ in _recorded(site, name):
                digest.update(f"{file} {_size_and_time(site / file)}\n".encode())
    return digest.hexdigest()


def import_problems(python: Path, names: Iterable[str]) -> dict[str, str]:
    """Import distributions in a process of their environment; return those that do not work, with the reason.

    Args:
        python: the interpreter of the environment.
        names: of distributions.
    """
    modules = {IMPORT_NAMES.get(name, name.replace("-", "_")): name for name in names}
    result = subprocess.run(
        [str(python), "-I", "-c", IMPORT, *modules],
        # torch-npu's autoload needs CANN's variables; a plug-in is not what is asked about
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    answers = [line.removeprefix("problems ") for line in result.stdout.splitlines() if line.startswith("problems ")]
    if answers:
        return {modules[module]: reason for module, reason in json.loads(answers[-1]).items()}
    begun = [line.split()[1] for line in result.stdout.splitlines() if line.startswith("importing ")]
    last = (result.stderr.strip().splitlines() or ["no message"])[-1]
    return {modules[module]: f"Python ended with status {result.returncode}: {last}" for module in begun[-1:]}


def damaged(venv: Path) -> list[str]:
    """Return the installed distributions that lack a file of their record, or have one of another size."""
    return sorted(
        record.name.rsplit("-", 2)[0]
        for site in _sites(venv)
        for record in site.glob("*.dist-info")
        if not record.name.startswith("pip-")
        and any(size != _size_and_time(site / file)[0] for file, size in _files(record) if size is not None)
    )


def _sites(venv: Path) -> list[Path]:
    return sorted(venv.glob("lib/python*/site-packages"))


def _recorded(site: Path, name: str) -> Iterator[tuple[str, int | None]]:
    pattern = re.sub(r"[-_.]+", "[-_.]", name)
    for record in site.glob(f"{pattern}-*.dist-info"):
        yield from _files(record)


def _files(record: Path) -> Iterator[tuple[str, int | None]]:
    """Yield (path, size) of a distribution's modules and data; commands and compiled files are written on the spot."""
    try:
        lines = (record / "RECORD").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        file, _, size = line.rsplit(",", 2)
        if not file.endswith(".pyc") and not file.startswith(".."):
            yield file.strip('"'), int(size) if size else None


def _size_and_time(file: Path) -> tuple[int | None, int | None]:
    try:
        stat = file.stat()
    except OSError:
        return None, None
    return stat.st_size, stat.st_mtime_ns
