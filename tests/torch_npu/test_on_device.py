"""The real torch-npu on a virtual NPU: the tests of on_device/."""

from pathlib import Path

import pytest

from tests.torch_npu import torch_npu_process, virtual_acl

pytestmark = pytest.mark.slow


def test_the_tests_pass_in_a_process_that_has_the_device():
    done = torch_npu_process.tests_of(Path(__file__).parent / "on_device", virtual_acl.environment())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout


def test_it_refuses_a_second_thread_that_would_race_its_kernels():
    done = torch_npu_process.run("-c", "import torch", env=virtual_acl.environment(TASK_QUEUE_ENABLE="2"))
    assert done.returncode == 1
    assert "the virtual NPU needs TASK_QUEUE_ENABLE=0" in done.stderr
