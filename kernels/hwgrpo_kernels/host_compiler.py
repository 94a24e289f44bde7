"""C++ of this package, compiled for the processor it runs on when it is first asked for, and kept."""

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
    """Return why nothing can be compiled on this machine, or None."""
    if sys.platform not in ("linux", "darwin"):
        return f"is compiled on Linux and macOS, not on {sys.platform}"
    chosen = os.environ.get("CXX")
    if chosen:
        command = shlex.split(chosen)[0]
        return None if shutil.which(command) else f"needs a C++ compiler, and CXX names {command!r}, which is not there"
    if not any(map(shutil.which, _NAMES)):
        return "needs a C++ compiler: install g++ or clang++, or set CXX"
    return None


def load(name: str, sources: tuple[str, ...]) -> ctypes.CDLL:
    """Compile C++ files beside this one, unless that was done before, and load what comes of it.

    The library is kept in `$HWGRPO_CACHE`, else `~/.cache/hwgrpo`, under a name made of the sources, the compiler and
    the processor's instructions, so that machines of different kinds can share the folder.

    Args:
        name: of the library.
        sources: file names; the first is compiled, the others are what it includes.

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
                made = Path(scratch) / library.name
                _run([*compiler, str(here / sources[0]), "-o", str(made)])
                made.replace(library)  # at once, so that processes which compile together do not meet half a file
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise ImportError(
            f"{library} could not be made or loaded ({error}); HWGRPO_CACHE names another folder"
        ) from error


def _compiler() -> list[str]:
    chosen = os.environ.get("CXX")
    if chosen:
        return shlex.split(chosen)
    return [next(name for name in _NAMES if shutil.which(name))]


def _tuned() -> str:
    return "-march=native" if platform.machine() in ("x86_64", "AMD64") else "-mcpu=native"


def _folder() -> Path:
    return Path(os.environ.get("HWGRPO_CACHE") or Path.home() / ".cache" / "hwgrpo") / "compiled"


def _run(command: list[str]) -> bytes:
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        told = done.stderr.decode(errors="replace").strip()[-2000:]
        raise ImportError(f"{shlex.join(command)} failed with code {done.returncode}: {told}")
    return done.stdout
