"""What DeepSpeed needs is checked before it is imported, and missing it says how to get it."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from hwgrpo.errors import ConfigError
from hwgrpo.training.strategies import deepspeed_host
from hwgrpo.training.strategies.deepspeed import Deepspeed
from hwgrpo.training.strategies.deepspeed_host import check_needs, quietly, remove_dead_locks
from hwgrpo.training.strategies.fsdp2 import Fsdp2
from tests.support.models.tiny import settings

CPU, ACCELERATOR = torch.device("cpu"), torch.device("meta")
NPU = cast(torch.device, SimpleNamespace(type="npu"))
"""As far as it is looked at: torch makes one only where its plug-in is installed."""


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host with DeepSpeed of the right version, whose only folder of programs is the one returned, and empty."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(name=name))
    monkeypatch.setattr(deepspeed_host, "version", lambda name: deepspeed_host.OLDEST)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv" / "bin" / "python"))
    (tmp_path / "venv" / "bin").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path / "bin"


def program(folder: Path, name: str) -> None:
    (folder / name).write_text("#!/bin/sh\n")
    (folder / name).chmod(0o755)


def refusal(device: torch.device = CPU) -> str:
    with pytest.raises(ConfigError) as error:
        check_needs(device)
    return str(error.value)


def test_a_host_with_ninja_and_a_compiler_is_enough(host: Path):
    program(host, "ninja")
    program(host, "c++")
    check_needs(CPU)


def test_without_the_package_it_says_which_extra_to_install(host: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    said = refusal(ACCELERATOR)
    assert "deepspeed is not installed" in said
    assert 'pip install "hwgrpo[deepspeed]"' in said


def test_an_old_package_is_refused_with_its_version(host: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(deepspeed_host, "version", lambda name: "0.9.1")
    assert "deepspeed 0.9.1 is older than 0.19.8" in refusal(ACCELERATOR)


def test_without_ninja_it_says_how_to_install_it(host: Path):
    program(host, "c++")
    assert "needs ninja" in refusal()
    assert "pip install ninja, or apt-get install ninja-build" in refusal()


def test_without_a_compiler_it_says_how_to_install_one(host: Path):
    program(host, "ninja")
    assert "no 'c++' on PATH; apt-get install g++" in refusal()


def test_a_compiler_that_was_named_is_the_one_that_is_looked_for(host: Path, monkeypatch: pytest.MonkeyPatch):
    program(host, "ninja")
    program(host, "my-compiler")
    monkeypatch.setenv("CXX", "my-compiler")
    check_needs(CPU)


def test_ninja_beside_python_is_put_on_path(host: Path):
    program(Path(sys.executable).parent, "ninja")
    program(host, "c++")
    check_needs(CPU)
    assert os.environ["PATH"].split(os.pathsep) == [str(Path(sys.executable).parent), str(host)]


def test_an_accelerator_needs_no_compiler(host: Path):
    check_needs(ACCELERATOR)


@pytest.mark.parametrize("value", [None, ""])
def test_on_an_npu_without_the_variables_of_cann_it_says_what_to_source(
    value: str | None, host: Path, monkeypatch: pytest.MonkeyPatch
):
    if value is None:
        monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    else:
        monkeypatch.setenv("ASCEND_HOME_PATH", value)
    said = refusal(NPU)
    assert "trainer.strategy='deepspeed': " in said
    assert "ASCEND_HOME_PATH, which is not set; source the set_env.sh of CANN" in said
    check_needs(ACCELERATOR)


def test_on_an_npu_with_the_variables_of_cann_nothing_is_missing(host: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ASCEND_HOME_PATH", "/usr/local/Ascend/ascend-toolkit/latest")
    check_needs(NPU)


@pytest.mark.parametrize("key", ["offload_optimizer", "offload_parameters"])
def test_offload_on_a_cpu_is_refused(key: str):
    strategy = Deepspeed.__new__(Deepspeed)
    strategy.device = CPU
    words = ["trainer.strategy=deepspeed", "trainer.deepspeed.stage=3", f"trainer.deepspeed.{key}=true"]
    with pytest.raises(ConfigError, match=f"trainer.deepspeed.{key}=true: on a CPU .* leave it out"):
        strategy.prepare(settings(*words))


def test_offload_of_fsdp2_on_a_cpu_is_refused_as_well():
    strategy = Fsdp2.__new__(Fsdp2)
    strategy.device = CPU
    with pytest.raises(ConfigError, match=r"trainer\.fsdp2\.offload=true: on a CPU .* leave it out"):
        strategy.prepare(settings("trainer.strategy=fsdp2", "trainer.fsdp2.offload=true"))


def test_what_is_printed_while_it_starts_is_kept_back_but_for_warnings(capfd: pytest.CaptureFixture[str]):
    with quietly():
        subprocess.run(["/bin/echo", "[INFO] chatter"], check=True)
        subprocess.run(["/bin/echo", "[WARNING] heed this"], check=True)
    assert capfd.readouterr() == ("", "[WARNING] heed this\n")


def test_where_it_fails_all_that_was_printed_is_shown(capfd: pytest.CaptureFixture[str]):
    def build() -> None:
        with quietly():
            subprocess.run(["/bin/echo", "an error of the compiler"], check=True)
            raise RuntimeError("no build")

    with pytest.raises(RuntimeError, match="no build"):
        build()
    assert capfd.readouterr() == ("", "an error of the compiler\n")


def test_optional_libraries_are_imported_only_where_they_are_used():
    code = (
        "import sys, hwgrpo.training.strategies.deepspeed, hwgrpo.training.setup, hwgrpo.training.finish\n"
        "print({'deepspeed', 'peft', 'tensorboard', 'datasets', 'pyarrow', 'pandas'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_paths())
    assert done.stdout == "set()\n"


def _paths() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def test_a_lock_that_a_killed_compilation_has_left_is_removed_and_one_in_use_is_not(tmp_path: Path):
    held, left = (tmp_path / "py311_cpu" / name / "lock" for name in ("held", "left"))
    for lock in (held, left):
        lock.parent.mkdir(parents=True)
    compiling = "import os, sys, time; os.open(sys.argv[1], os.O_CREAT | os.O_EXCL); print(flush=True); time.sleep(600)"
    processes = []
    for lock in (held, left):
        command = [sys.executable, "-c", compiling, str(lock)]
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE))
        assert processes[-1].stdout is not None
        processes[-1].stdout.readline()
    processes[1].kill()
    processes[1].wait()
    assert remove_dead_locks(tmp_path) == [left]
    assert held.exists()
    assert not left.exists()
    processes[0].kill()
    processes[0].wait()
    assert remove_dead_locks(tmp_path) == [held]


def test_a_lock_that_another_host_may_have_made_is_left_until_it_is_old(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(deepspeed_host, "_is_shared", lambda path: True)
    lock = tmp_path / "lock"
    lock.touch()
    assert remove_dead_locks(tmp_path) == []
    old = lock.stat().st_mtime - deepspeed_host.COMPILES_AT_MOST - 1
    os.utime(lock, (old, old))
    assert remove_dead_locks(tmp_path) == [lock]


def test_the_file_system_of_a_folder_is_that_of_the_innermost_mount(tmp_path: Path, monkeypatch):
    mounts = f"a / ext4 rw 0 0\nb {tmp_path} nfs4 rw 0 0\nc {tmp_path}/own xfs rw 0 0\nd {tmp_path}/ow nfs rw 0 0\n"
    monkeypatch.setattr(Path, "read_text", lambda path, **how: mounts)
    assert deepspeed_host._is_shared(tmp_path / "lock")
    assert not deepspeed_host._is_shared(tmp_path / "own" / "lock")
    assert not deepspeed_host._is_shared(tmp_path.parent / "lock")
