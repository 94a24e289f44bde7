"""The machine beside its devices, gathered from made-up root folders and environments."""

from hwgrpo.doctor.host_facts import gather_host


def test_main_memory_is_read_and_absent_records_are_not_known(tmp_path):
    assert gather_host(tmp_path, {}).memory is None
    assert gather_host(tmp_path, {}).shm is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal:       2048 kB\nMemFree: 1 kB\n")
    (tmp_path / "dev" / "shm").mkdir(parents=True)
    host = gather_host(tmp_path, {})
    assert host.memory == 2048 * 1024
    assert host.shm is not None
    assert host.shm > 0


def test_the_folder_of_models_is_the_one_the_hub_would_take(tmp_path):
    assert gather_host(tmp_path, {"HOME": "/h"}).cache == "/h/.cache/huggingface/hub"
    assert gather_host(tmp_path, {"HOME": "/h", "XDG_CACHE_HOME": "/x"}).cache == "/x/huggingface/hub"
    assert gather_host(tmp_path, {"HOME": "/h", "HF_HOME": "/m"}).cache == "/m/hub"
    host = gather_host(tmp_path, {"HF_HOME": "/m", "HF_HUB_CACHE": str(tmp_path / "not" / "there")})
    assert host.cache == str(tmp_path / "not" / "there")
    assert host.cache_writable
    assert host.cache_free


def test_the_compiler_is_what_cc_names_or_the_first_on_the_path(tmp_path):
    for name in ("gcc", "clang"):
        (tmp_path / name).write_text("#!/bin/sh\n")
    (tmp_path / "clang").chmod(0o755)
    assert gather_host(tmp_path, {"PATH": str(tmp_path)}).c_compiler == "clang"
    (tmp_path / "gcc").chmod(0o755)
    assert gather_host(tmp_path, {"PATH": str(tmp_path)}).c_compiler == "gcc"
    assert gather_host(tmp_path, {"PATH": str(tmp_path), "CC": "clang -m64"}).c_compiler == "clang"
    assert gather_host(tmp_path, {"PATH": str(tmp_path), "CC": "icc"}).c_compiler is None


def test_variables_of_no_matter_are_left_out(tmp_path):
    told = gather_host(tmp_path, {"NCCL_DEBUG": "INFO", "EDITOR": "vi", "LD_LIBRARY_PATH": "/l", "MAIL": "x"})
    assert told.environment == {"LD_LIBRARY_PATH": "/l", "NCCL_DEBUG": "INFO"}
