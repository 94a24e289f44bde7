"""DeepSpeed's requirements on the host, checked before it is imported, and its output while it starts."""

from __future__ import annotations

import importlib.util
import logging
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from packaging.version import Version
from torch.utils.cpp_extension import get_default_build_root

from hwgrpo.errors import ConfigError

OLDEST = "0.19.8"
INSTALL = 'pip install "hwgrpo[deepspeed]"'
CANN = "ASCEND_HOME_PATH"
"""Variable that CANN's set_env.sh sets; without it DeepSpeed raises a bare KeyError once the model is loaded."""
EXPECTED = {
    "untested optimizer": "it is torch's AdamW, on purpose",
    "unknown inputs or outputs type": "the policy itself has no weights of its own that hooks would have to gather",
}
"""Harmless warnings, and why they are harmless."""
LOCK = "lock"
"""File in an extension's folder while torch compiles it (`torch.utils.file_baton`, 2.13)."""
COMPILES_AT_MOST = 3600.0
"""Longest compilation on another host, in seconds."""
OWN_FILE_SYSTEMS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "ramfs", "overlay", "bcachefs")
DEPRECATED = "`torch.distributed.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"
"""torch 2.13's warning about functions that DeepSpeed calls at every step."""


def check_needs(device: torch.device) -> None:
    """Check that DeepSpeed, its compilers and its variables are present; put ninja on PATH where it is elsewhere.

    Raises:
        ConfigError: something is missing; the message says how to install or set it.
    """
    setting = "trainer.strategy='deepspeed'"
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(
            f"{setting}: the package deepspeed is not installed; {INSTALL}, or use fsdp2, which needs none"
        )
    try:
        installed = version("deepspeed")
    except PackageNotFoundError:
        installed = "0"
    if Version(installed) < Version(OLDEST):
        raise ConfigError(f"{setting}: deepspeed {installed} is older than {OLDEST}; {INSTALL} --upgrade")
    if device.type == "npu" and not os.environ.get(CANN):  # hw: the one device for which DeepSpeed reads a variable
        raise ConfigError(
            f"{setting}: DeepSpeed finds CANN by the variable {CANN}, which is not set; source the set_env.sh of CANN, "
            "usually /usr/local/Ascend/ascend-toolkit/set_env.sh"
        )
    # Only on a CPU does DeepSpeed always compile a part of itself (its reductions over shared memory).
    if device.type != "cpu":
        return
    if not _find_ninja():
        raise ConfigError(
            f"{setting}: DeepSpeed compiles a part of itself on a CPU and needs ninja, which is neither on PATH nor "
            "next to the running Python; pip install ninja, or apt-get install ninja-build"
        )
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise ConfigError(
            f"{setting}: DeepSpeed compiles a part of itself on a CPU and needs a C++ compiler, but there is no "
            f"{compiler!r} on PATH; apt-get install g++"
        )


def _find_ninja() -> bool:
    """Find ninja; put it on PATH if it is only in Python's folder, as in a venv that is not activated."""
    if shutil.which("ninja") is not None:
        return True
    python_folder = str(Path(sys.executable).parent)
    if shutil.which("ninja", path=python_folder) is None:
        return False
    os.environ["PATH"] = os.pathsep.join(filter(None, (python_folder, os.environ.get("PATH"))))
    return True


def compile_note(device: torch.device) -> str | None:
    """Return a note that DeepSpeed will compile a part of itself; None where it need not or already has."""
    root = extensions_root()
    if device.type != "cpu" or any(root.glob("**/deepspeed_shm_comm.so")):
        return None
    return (
        f"DeepSpeed compiles a part of itself into {root}, once; it takes a minute or more. If it never ends, "
        "a start on another host was killed while compiling: remove that folder"
    )


def extensions_root() -> Path:
    """Return the folder of torch's compiled extensions."""
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())


def remove_dead_locks(root: Path) -> list[Path]:
    """Remove the locks of killed compilations; every later compilation would wait for them forever.

    Args:
        root: folder in which torch compiles.

    Returns:
        The removed files.
    """
    removed = []
    for lock in root.glob(f"**/{LOCK}"):
        with suppress(FileNotFoundError):  # the compilation has just ended
            status = lock.stat()
            # Its process keeps it open while it compiles. A process on another host is not visible from here.
            elsewhere = _is_shared(lock) and time.time() - status.st_mtime < COMPILES_AT_MOST
            if not elsewhere and not _is_open(status) and os.path.samestat(status, lock.stat()):
                lock.unlink()
                removed.append(lock)
    return removed


def _is_open(file: os.stat_result) -> bool:
    """Return whether a process of this host, and of this user, has a file open."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            for number in os.listdir(process / "fd"):
                with suppress(OSError):
                    if os.path.samestat(file, os.stat(process / "fd" / number)):
                        return True
    return False


def _is_shared(path: Path) -> bool:
    """Return whether other hosts may see a file: its file system is not a local one."""
    resolved, kind, longest = str(path.resolve()), "", -1
    for line in Path("/proc/mounts").read_text(errors="replace").splitlines():
        _, mounted, name, *_ = line.split()
        inside = mounted == "/" or resolved == mounted or resolved.startswith(mounted + "/")
        if inside and len(mounted) >= longest:
            kind, longest = name, len(mounted)
    return kind not in OWN_FILE_SYSTEMS


def silence_expected() -> None:
    """Suppress harmless warnings in DeepSpeed's log, and torch's about its calls."""
    warnings.filterwarnings("ignore", DEPRECATED, FutureWarning)
    logging.getLogger("DeepSpeed").addFilter(_is_unexpected)


def _is_unexpected(record: logging.LogRecord) -> bool:
    return not any(phrase in record.getMessage() for phrase in EXPECTED)


@contextmanager
def quietly() -> Iterator[None]:
    """Suppress the output of DeepSpeed and its compilers, except warnings.

    If the block fails, all output is shown: it says why. File descriptors are redirected, because compilers write to
    them directly.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as captured:
        own = os.dup(1), os.dup(2)
        os.dup2(captured.fileno(), 1)
        os.dup2(captured.fileno(), 2)
        failed = True
        try:
            yield
            failed = False
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, original in zip((1, 2), own, strict=True):
                os.dup2(original, number)
                os.close(original)
            captured.seek(0)
            for line in captured.read().decode(errors="replace").splitlines():
                if failed or "[WARNING]" in line:
                    print(line, file=sys.stderr)
