"""The tests of on_device/, a process with two simulated NPUs for each file."""

from pathlib import Path

import pytest

from tests.support.devices import simulated_npu
from tests.support.processes import preloaded

FILES = sorted((Path(__file__).parent / "on_device").glob("test_*.py"))
SLOW = ("test_conformance", "test_fused_modules")


@pytest.mark.parametrize(
    "file", [pytest.param(file, id=file.stem, marks=[pytest.mark.slow] * (file.stem in SLOW)) for file in FILES]
)
def test_the_tests_pass_in_a_process_that_has_the_device(file: Path):
    words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", str(file))
    repo = Path(__file__).parents[2]
    done = preloaded.run(0, *words, env=simulated_npu.environment(SIMULATED_NPU_DEVICES="2"), cwd=repo)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
