"""What DeepSpeed needs of the host before it is imported, and its own voice while it starts."""

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
"""What CANN's set_env.sh sets; without it DeepSpeed raises a bare KeyError, once the model is loaded."""
EXPECTED = {
    "untested optimizer": "it is torch's AdamW, on purpose",
    "unknown inputs or outputs type": "the policy itself has no weights of its own that hooks would have to gather",
}
"""Warnings that tell nothing, and why."""
LOCK = "lock"
"""File that torch makes in the folder of an extension while it compiles it (`torch.utils.file_baton`, 2.13)."""
COMPILES_AT_MOST = 3600.0
"""Seconds that a compilation on another host may take."""
OWN_FILE_SYSTEMS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "tmpfs", "ramfs", "overlay", "bcachefs")
DEPRECATED = "`torch.distributed.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"
"""What DeepSpeed calls at every step, and torch 2.13 warns of."""


def check_needs(device: torch.device) -> None:
    """Check for DeepSpeed, and for what it compiles itself with or reads; put ninja on PATH where it is elsewhere.

    Raises:
        ConfigError: something is missing, with what installs it or sets it.
    """
    chosen = "trainer.strategy='deepspeed'"
    if importlib.util.find_spec("deepspeed") is None:
        raise ConfigError(
            f"{chosen}: the package deepspeed is not installed; {INSTALL}, or use fsdp2, which needs none"
        )
    try:
        found = version("deepspeed")
    except PackageNotFoundError:
        found = "0"
    if Version(found) < Version(OLDEST):
        raise ConfigError(f"{chosen}: deepspeed {found} is older than {OLDEST}; {INSTALL} --upgrade")
    if device.type == "npu" and not os.environ.get(CANN):  # hw: the one device for which DeepSpeed reads a variable
        raise ConfigError(
            f"{chosen}: DeepSpeed looks for CANN where the variable {CANN} says, which is not set; "
            "source the set_env.sh of CANN, as a rule /usr/local/Ascend/ascend-toolkit/set_env.sh"
        )
    # Only on a CPU does DeepSpeed compile a part of itself in any case (its reductions over shared memory).
    if device.type != "cpu":
        return
    if not _find_ninja():
        raise ConfigError(
            f"{chosen}: DeepSpeed compiles a part of itself on a CPU and needs ninja, which is neither on PATH nor "
            "beside the Python that runs; pip install ninja, or apt-get install ninja-build"
        )
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise ConfigError(
            f"{chosen}: DeepSpeed compiles a part of itself on a CPU and needs a C++ compiler, but there is no "
            f"{compiler!r} on PATH; apt-get install g++"
        )


def _find_ninja() -> bool:
    """Find ninja, and put it on PATH where it lies beside Python alone, as in a venv that is not activated."""
    if shutil.which("ninja") is not None:
        return True
    beside = str(Path(sys.executable).parent)
    if shutil.which("ninja", path=beside) is None:
        return False
    os.environ["PATH"] = os.pathsep.join(filter(None, (beside, os.environ.get("PATH"))))
    return True


def compile_note(device: torch.device) -> str | None:
    """Say that DeepSpeed will compile a part of itself, where it has not done so yet; None where it need not."""
    root = extensions_root()
    if device.type != "cpu" or any(root.glob("**/deepspeed_shm_comm.so")):
        return None
    return (
        f"DeepSpeed compiles a part of itself into {root}, once; it takes a minute or more. Should it never end, "
        "a start on another host was killed there: remove that folder"
    )


def extensions_root() -> Path:
    """Return the folder in which torch keeps what it has compiled."""
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())


def remove_dead_locks(root: Path) -> list[Path]:
    """Remove the locks of compilations that were killed, for which every later one would wait without an end.

    Args:
        root: folder in which torch compiles.

    Returns:
        The files that were removed.
    """
    removed = []
    for lock in root.glob(f"**/{LOCK}"):
        with suppress(FileNotFoundError):  # the compilation has just ended
            found = lock.stat()
            # Its process has it open for as long as it compiles. One on another host cannot be seen from here.
            elsewhere = _is_shared(lock) and time.time() - found.st_mtime < COMPILES_AT_MOST
            if not elsewhere and not _is_open(found) and os.path.samestat(found, lock.stat()):
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
    """Return whether other hosts may see a file: its file system is none of those that one host keeps alone."""
    resolved, kind, longest = str(path.resolve()), "", -1
    for line in Path("/proc/mounts").read_text(errors="replace").splitlines():
        _, mounted, name, *_ = line.split()
        inside = mounted == "/" or resolved == mounted or resolved.startswith(mounted + "/")
        if inside and len(mounted) >= longest:
            kind, longest = name, len(mounted)
    return kind not in OWN_FILE_SYSTEMS


def silence_expected() -> None:
    """Keep off the terminal warnings that tell nothing, in DeepSpeed's own log and torch's about it."""
    warnings.filterwarnings("ignore", DEPRECATED, FutureWarning)
    logging.getLogger("DeepSpeed").addFilter(_tells_something)


def _tells_something(record: logging.LogRecord) -> bool:
    return not any(words in record.getMessage() for words in EXPECTED)


@contextmanager
def quietly() -> Iterator[None]:
    """Keep off the terminal what DeepSpeed and the compilers it calls print, but for warnings.

    Where the block fails, all of it is shown: it says why. The file descriptors are moved, since compilers write to
    those.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as kept:
        own = os.dup(1), os.dup(2)
        os.dup2(kept.fileno(), 1)
        os.dup2(kept.fileno(), 2)
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
            kept.seek(0)
            for line in kept.read().decode(errors="replace").splitlines():
                if failed or "[WARNING]" in line:
                    print(line, file=sys.stderr)
