"""Compiling C++ on first use: what is kept, what is shared, and what is said when it cannot be done."""

import ctypes
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hwgrpo_kernels import default_registry, host_compiler, rows_compiled

ADD = 'extern "C" int add(int a, int b) { return a + b; }\n'


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A file that compiles in no time, in a place of its own, and what is run to compile it."""
    monkeypatch.setenv("HWGRPO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(host_compiler, "__file__", str(tmp_path / "host_compiler.py"))
    (tmp_path / "host_compiler.py").write_text("")
    file = tmp_path / "add.cpp"
    file.write_text(ADD)
    return file


@pytest.fixture
def commands(monkeypatch):
    ran = []
    real = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda command, **words: ran.append(command) or real(command, **words))
    return ran


def compilations(commands):
    return [command for command in commands if "-o" in command]


def kept(source) -> list[Path]:
    return sorted((source.parent / "cache" / "compiled").iterdir())


def test_a_library_is_compiled_once_and_kept(source, commands):
    assert host_compiler.load("sums", ("add.cpp",)).add(2, 3) == 5
    assert host_compiler.load("sums", ("add.cpp",)).add(20, 3) == 23
    assert len(compilations(commands)) == 1
    (library,) = kept(source)
    assert library.name.startswith("sums-")
    assert ctypes.CDLL(str(library)).add(1, 1) == 2


def test_a_changed_source_or_header_is_compiled_again(source, commands):
    header = source.with_suffix(".h")
    header.write_text("const int more = 100;\n")
    source.write_text('#include "add.h"\nextern "C" int add(int a, int b) { return a + b + more; }\n')
    assert host_compiler.load("sums", ("add.cpp", "add.h")).add(2, 3) == 105
    header.write_text("const int more = 200;\n")
    assert host_compiler.load("sums", ("add.cpp", "add.h")).add(2, 3) == 205
    assert len(kept(source)) == 2


def test_another_processor_or_compiler_gets_a_library_of_its_own(source, monkeypatch):
    host_compiler.load("sums", ("add.cpp",))
    monkeypatch.setattr(host_compiler, "_tuned", lambda: "-DTHIS_IS_ANOTHER_MACHINE")
    host_compiler.load("sums", ("add.cpp",))
    assert len(kept(source)) == 2


def test_a_source_that_does_not_compile_is_an_import_error_with_the_compilers_words(source):
    source.write_text("this is no C++;")
    with pytest.raises(ImportError, match=r"(?s)add\.cpp.* failed with code 1: .*error"):
        host_compiler.load("sums", ("add.cpp",))
    assert not kept(source)


def test_a_folder_that_cannot_be_written_is_named_with_the_variable_that_moves_it(source, monkeypatch):
    monkeypatch.setenv("HWGRPO_CACHE", str(source))
    with pytest.raises(ImportError, match=r"could not be written or loaded .*set HWGRPO_CACHE to another folder"):
        host_compiler.load("sums", ("add.cpp",))


def test_cxx_names_the_compiler_with_its_options(source, commands, monkeypatch):
    monkeypatch.setenv("CXX", f"{sys.executable} -c pass")  # "compiles", and leaves nothing behind
    assert host_compiler.reason_against() is None
    with pytest.raises(ImportError, match="could not be written or loaded"):
        host_compiler.load("sums", ("add.cpp",))
    assert all(command[:3] == [sys.executable, "-c", "pass"] for command in commands)


def test_what_is_missing_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler -O1")
    told = "needs a C++ compiler, but CXX='no-such-compiler' does not exist"
    assert host_compiler.reason_against() == told
    with pytest.raises(ImportError, match=re.escape(f"sums {told}")):
        host_compiler.load("sums", ("add.cpp",))
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert host_compiler.reason_against() == "needs a C++ compiler: install g++ or clang++, or set CXX"
    monkeypatch.setattr(sys, "platform", "win32")
    assert host_compiler.reason_against() == "is compiled on Linux and macOS, not on win32"


def test_a_pin_that_cannot_be_compiled_is_refused_and_a_preference_falls_back(monkeypatch, tmp_path):
    monkeypatch.setenv("HWGRPO_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    rows_compiled._library.cache_clear()
    with default_registry.pinned({"row_stats": "compiled"}):
        told = r"row_stats=compiled cannot run: failed to load: false .*failed with code 1.* Remove the pin, or pin one"
        with pytest.raises(ValueError, match=told):
            default_registry.resolve("row_stats", "cpu", torch.float32, 64)
    choice = default_registry.resolve("row_stats", "cpu", torch.float32, 64, preference=["compiled"])
    assert choice.name == "torch"
    assert dict(choice.skipped)["compiled"].startswith("failed to load: false ")
