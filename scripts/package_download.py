"""Download a file of a package by the package manager of this machine, with limits on time and size and a checksum."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

POLL_S = 0.2
MIB = 1 << 20
UNREACHABLE = re.compile(
    r"\(from versions: none\)|No module named pip|ConnectionError|Connection refused|name resolution|ProxyError"
    r"|timed out|Max retries exceeded|HTTP error 5\d\d|\b5\d\d Server Error"
    r"|code (?:E40[1347]|E5\d\d|ENOTFOUND|ECONN\w+|EAI_AGAIN|E\w*TIMEDOUT|E(?:NET|HOST)UNREACH|ERR_SOCKET_TIMEOUT)\b"
)
"""What pip and npm print where they reach no index or registry that has the package."""


class DownloadError(RuntimeError):
    """A file could not be downloaded, or is not the expected one. The message has the reason and a remedy."""


class UnreachableError(DownloadError):
    """The package manager is missing here, or reaches nothing that has the package in time."""


def is_unreachable(output: str) -> bool:
    """Return whether pip or npm failed since it reaches no index or registry that has the package."""
    return UNREACHABLE.search(output) is not None


def download_wheel(requirement: str, sha256: str, folder: Path, *, most_mib: int, seconds: float) -> Path:
    """Download the wheel of `NAME==VERSION` by pip, as it is configured here.

    Args:
        requirement: the package and its version.
        sha256: of the wheel.
        folder: an existing folder, into which it is written.
        most_mib: most MiB that pip may write.
        seconds: most seconds that it may take.

    Raises:
        UnreachableError: pip is missing, reaches no index that has the package, or takes too long.
        DownloadError: it fails otherwise, writes too much, or the wheel is another one.
    """
    options = ["--quiet", "--no-input", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
    command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(folder), requirement]
    remedy = "let pip reach an index that has it (PIP_INDEX_URL, PIP_FIND_LINKS)"
    return _download(command, requirement, ".whl", sha256, folder, most_mib, seconds, remedy)


def download_npm_package(package: str, sha256: str, folder: Path, *, most_mib: int, seconds: float) -> Path:
    """Download the archive of `NAME@VERSION` by npm, as it is configured here; arguments as of `download_wheel`.

    Raises:
        UnreachableError: npm is missing, reaches no registry that has the package, or takes too long.
        DownloadError: it fails otherwise, writes too much, or the archive is another one.
    """
    npm = shutil.which("npm")
    if npm is None:
        raise UnreachableError(f"{package} comes from npm, which is not installed: install Node.js with npm")
    options = ["--loglevel=error", "--ignore-scripts", "--no-audit", "--no-fund", "--no-update-notifier"]
    options += ["--fetch-retries=1", "--fetch-retry-mintimeout=2000"]
    command = [npm, "pack", *options, "--pack-destination", str(folder), package]
    remedy = "let npm reach a registry that has it (npm config set registry ADDRESS)"
    return _download(command, package, ".tgz", sha256, folder, most_mib, seconds, remedy)


def _download(
    command: Sequence[str],
    package: str,
    suffix: str,
    sha256: str,
    folder: Path,
    most_mib: int,
    seconds: float,
    remedy: str,
) -> Path:
    before = set(folder.glob(f"*{suffix}"))
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        _run_limited(command, package, folder, Path(scratch), most_mib, seconds, remedy)
    new = sorted(set(folder.glob(f"*{suffix}")) - before)
    if len(new) != 1:
        raise DownloadError(f"{package}: {Path(command[0]).name} wrote {len(new)} files {suffix}, not one; {remedy}")
    digest = hashlib.sha256(new[0].read_bytes()).hexdigest()
    if digest != sha256:
        raise DownloadError(
            f"{package}: {new[0].name} has the sha256 {digest}, and {sha256} is expected: it is damaged or another "
            "file; download it again, or from another index"
        )
    return new[0]


def _run_limited(
    command: Sequence[str], package: str, folder: Path, scratch: Path, most_mib: int, seconds: float, remedy: str
) -> None:
    """Run a download; end it and its children where it exceeds a limit."""
    environ = {**os.environ, "TMPDIR": str(scratch), "npm_config_cache": str(scratch / "npm")}
    log = scratch / "log"
    end = time.monotonic() + seconds
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            cwd=scratch,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
        try:
            while process.poll() is None:
                if time.monotonic() > end:
                    raise UnreachableError(f"{package} was not downloaded within {seconds:g} s; {remedy}, or try again")
                if folder_bytes(folder) > most_mib * MIB:
                    raise DownloadError(f"{package} is larger than {most_mib} MiB, so it is another file; {remedy}")
                time.sleep(POLL_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(timeout=60)
    if process.returncode:
        output = log.read_text(encoding="utf-8", errors="replace").strip()
        lines = output.splitlines()
        errors = [line for line in lines if "error" in line.lower()]
        said = [*errors[:1], *lines[-1:], f"exit code {process.returncode}"][0][:300]
        kind = UnreachableError if is_unreachable(output) else DownloadError
        raise kind(f"{package} cannot be downloaded: {said}; {remedy}")


def folder_bytes(folder: Path) -> int:
    """Return the size of the files below a folder, of which some may vanish meanwhile."""
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.lstat().st_size
        except FileNotFoundError:
            continue
    return total
