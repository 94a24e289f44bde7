"""Our commands where torch-npu is installed and CANN is not, which breaks `import torch` itself."""

import json

import pytest

from tests.torch_npu import torch_npu_process

pytestmark = pytest.mark.slow
MISSING = "ImportError: libhccl.so: cannot open shared object file"
FIX = "source the set_env.sh of CANN"


def hwgrpo(*words: str, **settings: str):
    done = torch_npu_process.run("-m", "hwgrpo", *words, env=torch_npu_process.environment(COLUMNS="400", **settings))
    assert "Traceback" not in done.stderr
    return done


def test_torch_itself_does_not_import():
    done = torch_npu_process.run("-c", "import torch", env=torch_npu_process.environment())
    assert done.returncode == 1
    assert MISSING in done.stderr, done.stderr


def test_detect_names_the_library_that_is_missing_and_the_script_that_brings_it():
    done = hwgrpo("detect", "--probe", "--json")
    assert done.returncode == 1, done.stdout + done.stderr
    said = json.loads(done.stdout)
    assert (said["requested"], said["selected"]) == ("auto", None)
    for name in ("npu", "cpu"):
        [candidate] = [each for each in said["candidates"] if each["name"] == name]
        assert candidate["verdict"] == "unusable"
        assert MISSING in candidate["reason"]
        assert FIX in candidate["fix"]


def test_detect_without_importing_anything_chooses_by_files():
    done = hwgrpo("detect", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["facts"]["distributions"]["torch-npu"] == "2.13.0"


def test_doctor_fails_and_names_library_and_script():
    done = hwgrpo("doctor")
    assert done.returncode == 1, done.stdout + done.stderr
    failed = {line.split("  ")[1].strip() for line in done.stdout.splitlines() if line.startswith("FAIL")}
    assert {"CANN", "import torch", "backend"} <= failed
    text = " ".join(done.stdout.split())
    assert MISSING in text
    assert FIX in text


@pytest.mark.parametrize("asked", ["npu", "auto"])
def test_training_ends_before_it_begins_and_names_library_and_script(asked, tmp_path):
    done = hwgrpo("train", "tiny_sort", f"backend.name={asked}", f"trainer.output_dir={tmp_path / 'run'}")
    assert done.returncode == 1, done.stdout + done.stderr
    assert MISSING in done.stderr
    assert FIX in done.stderr
    assert not (tmp_path / "run").exists()


def test_switching_the_loading_off_is_no_way_out_because_other_packages_import_it():
    done = hwgrpo("detect", "--probe", TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    said = " ".join((done.stdout + done.stderr).split())
    assert done.returncode == 1, said
    assert "torch_npu is installed but does not import: ImportError: libhccl.so" in said
    assert FIX in said
