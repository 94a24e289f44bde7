"""Libraries under the names of CANN's, so that the real torch-npu can be loaded where CANN is not.

What they have to define is asked of the wheel with nm each time they are made. Files in C and C++ say what some
functions do; every other one returns an error, those that compute above all: a stand-in that says a kernel succeeded
would leave whatever was in memory as its result. They are compiled with the headers in the wheel, so they cannot define
a function otherwise than torch-npu calls it.
"""

import ctypes
import hashlib
import subprocess
from pathlib import Path

import torch

from tests.support.processes.launch import ROOT
from tests.support.processes.made_once import made_once

SOURCES = Path(__file__).parent / "cann"
BUILT = ROOT / "build" / "cann"  # git ignores build/
RUNTIME = "libascendcl.so"
NOT_SUPPORTED = 207000  # ACL_ERROR_RT_FEATURE_NOT_SUPPORT
INSTALLED = ("libop_plugin_atb.so",)  # asks for a further library of Ascend's, and is loaded only where that is


def made(wheel: Path, *sources: str) -> Path:
    """Return the folder with the libraries that the torch-npu in `wheel` wants; make them first.

    Args:
        wheel: the folder torch-npu was installed into.
        sources: the files among cann/*.c and cann/*.cpp that say what some functions do.

    Raises:
        RuntimeError: a tool is missing or failed.
    """
    files = [SOURCES / source for source in sources]
    texts = [file.read_text() for file in (*files, Path(__file__))]
    key = repr((wheel.name, torch.__version__, texts, _run("cc", "--version")))
    folder = BUILT / f"{files[0].stem}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    return made_once(folder, lambda there: _make(there, wheel / "torch_npu", files))


def asked_for(package: Path) -> tuple[set[str], set[str]]:
    """Return the C functions that torch-npu's libraries leave to CANN's, and the libraries that would have them."""
    mine = [*package.glob("_C*.so"), *(file for file in package.glob("lib/*.so") if file.name not in INSTALLED)]
    torchs = list((Path(torch.__file__).parent / "lib").glob("*.so*"))
    there = set().union(*(_symbols(file, "--defined-only") for file in (*mine, *torchs)))
    wanted = set().union(*(_symbols(file, "--undefined-only") for file in mine))
    # Symbols of the C++ library carry a version (@GLIBCXX_3.4), and those of Python and the C library are here.
    here = ctypes.CDLL(None)
    functions = {name for name in wanted - there if "@" not in name and not name.startswith("_")}
    functions = {name for name in functions if not hasattr(here, name)}
    needed = {
        line.split("[")[1].rstrip("]")
        for file in mine
        for line in _run("readelf", "--dynamic", "--wide", str(file)).splitlines()
        if "(NEEDED)" in line
    }
    system = ("libc.", "libm.", "libdl.", "librt.", "libpthread.", "libgcc_s.", "libstdc++.", "ld-linux")
    present = {file.name for file in (*mine, *torchs)}
    return functions, {name for name in needed - present if not name.startswith(system)}


def _make(folder: Path, package: Path, sources: list[Path]) -> None:
    folder.mkdir()
    functions, libraries = asked_for(package)
    if RUNTIME not in libraries:
        raise RuntimeError(f"{package} does not ask for {RUNTIME}: this is another torch-npu than the tests know")
    headers = [f"-I{package / 'include' / part}" for part in (".", "third_party/acl/inc", "third_party/hccl/inc")]
    compiled = [folder / f"{source.stem}.o" for source in sources]
    for source, code in zip(sources, compiled, strict=True):
        _run("cc", "-c", "-fPIC", "-O1", "-Wall", "-Werror", *headers, str(source), "-o", str(code))
    rest = sorted(functions.difference(*(_symbols(code, "--defined-only", "--extern-only") for code in compiled)))
    # Functions that make an object return its address: there is none.
    answers = [f"long {name}(void) {{ return {0 if 'Create' in name else NOT_SUPPORTED}; }}" for name in rest]
    (folder / "rest.c").write_text("\n".join(answers))
    _library(folder / RUNTIME, *map(str, compiled), str(folder / "rest.c"), "-ldl")
    (folder / "empty.c").write_text("")
    for name in libraries - {RUNTIME}:
        # torch-npu looks functions up by library: each finds them in the one that has all.
        linked = ("-Wl,--no-as-needed", f"-L{folder}", "-lascendcl", "-Wl,-rpath,$ORIGIN")
        _library(folder / name, str(folder / "empty.c"), *linked)


def _library(file: Path, *words: str) -> None:
    _run("cc", "-shared", "-fPIC", "-fno-builtin", "-w", f"-Wl,-soname,{file.name}", "-o", str(file), *words)


def _symbols(file: Path, *which: str) -> set[str]:
    """Return names of symbols that are not weak: of the linker's view of a library, of all of an object."""
    dynamic = () if file.suffix == ".o" else ("--dynamic",)
    lines = _run("nm", *dynamic, *which, str(file)).splitlines()
    split = [line.split()[-2:] for line in lines if line.strip()]
    return {name for kind, name in split if kind not in ("w", "v") or "--defined-only" in which}


def _run(*words: str) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError as error:
        raise RuntimeError(f"these libraries are made with {words[0]}, which is missing: {error}") from error
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} failed:\n{done.stderr[-3000:]}")
    return done.stdout
