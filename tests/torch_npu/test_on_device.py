"""The real torch-npu on a virtual NPU: the tests of on_device/, a process for each file."""

from pathlib import Path

import pytest
import torch_npu_process
import virtual_acl

pytestmark = pytest.mark.slow
FILES = sorted((Path(__file__).parent / "on_device").glob("test_*.py"))


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_the_tests_pass_in_a_process_that_has_the_device(file: Path):
    done = torch_npu_process.tests_of(file, virtual_acl.environment())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout


def test_it_refuses_a_second_thread_that_would_race_its_kernels():
    done = torch_npu_process.run("-c", "import torch", env=virtual_acl.environment(TASK_QUEUE_ENABLE="2"))
    assert done.returncode == 1
    assert "the virtual NPU needs TASK_QUEUE_ENABLE=0" in done.stderr
