"""Compile this package's C++ for the host processor on first use, and cache the library."""

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-pthread")
_NAMES = ("g++", "clang++", "c++")


def reason_against() -> str | None:
    """Return why this machine cannot compile C++, or None."""
    if sys.platform not in ("linux", "darwin"):
        return f"is compiled on Linux and macOS, not on {sys.platform}"
    cxx = os.environ.get("CXX")
    if cxx:
        command = shlex.split(cxx)[0]
        return None if shutil.which(command) else f"needs a C++ compiler, but CXX={command!r} does not exist"
    if not any(map(shutil.which, _NAMES)):
        return "needs a C++ compiler: install g++ or clang++, or set CXX"
    return None


def load(name: str, sources: tuple[str, ...]) -> ctypes.CDLL:
    """Compile C++ files of this folder unless cached, and load the library.

    The library is cached in `$HWGRPO_CACHE`, else `~/.cache/hwgrpo`, under a hash of the sources, the compiler and
    the processor's instruction set, so that different machines can share the folder.

    Args:
        name: of the library.
        sources: file names; the first is compiled and includes the others.

    Raises:
        ImportError: there is no compiler, it failed, or the folder cannot be written.
    """
    reason = reason_against()
    if reason is not None:
        raise ImportError(f"{name} {reason}")
    here = Path(__file__).parent
    compiler = [*_compiler(), *_FLAGS, _tuned()]
    key = hashlib.sha256(_run([*compiler, "-dM", "-E", "-x", "c++", os.devnull]))  # its version and the instructions
    for part in (*(here / source for source in sources), Path(__file__)):
        key.update(part.read_bytes())
    library = _folder() / f"{name}-{key.hexdigest()[:16]}.so"
    try:
        if not library.exists():
            library.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
                built = Path(scratch) / library.name
                _run([*compiler, str(here / sources[0]), "-o", str(built)])
                built.replace(library)  # atomic, for processes that compile at the same time
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise ImportError(
            f"{library} could not be written or loaded ({error}); set HWGRPO_CACHE to another folder"
        ) from error


def _compiler() -> list[str]:
    cxx = os.environ.get("CXX")
    if cxx:
        return shlex.split(cxx)
    return [next(name for name in _NAMES if shutil.which(name))]


def _tuned() -> str:
    return "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"


def _folder() -> Path:
    return Path(os.environ.get("HWGRPO_CACHE") or "~/.cache/hwgrpo").expanduser() / "compiled"


def _run(command: list[str]) -> bytes:
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        message = done.stderr.decode(errors="replace").strip()[-2000:]
        raise ImportError(f"{shlex.join(command)} failed with code {done.returncode}: {message}")
    return done.stdout
