"""The real torch-npu with stand-ins for the libraries of CANN, in which nothing computes: no_device/ has the tests."""

from pathlib import Path

import pytest

from tests.torch_npu import cann_libraries, torch_npu_process, torch_npu_wheel

pytestmark = pytest.mark.slow


def test_the_tests_pass_in_a_process_that_has_torch_npu_and_no_device():
    libraries = cann_libraries.made(torch_npu_wheel.folder("2.13.0"), "no_device.c")
    done = torch_npu_process.tests_of(Path(__file__).parent / "no_device", torch_npu_process.environment(libraries))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout


def test_what_the_libraries_define_is_what_this_wheel_asks_for():
    functions, libraries = cann_libraries.asked_for(torch_npu_wheel.folder("2.13.0") / "torch_npu")
    assert {"aclrtMalloc", "aclopCompileAndExecute", "aclrtSynchronizeStream"} <= functions
    assert {"libascendcl.so", "libhccl.so"} <= libraries
    assert not {"dlopen", "pthread_create", "malloc"} & functions, "these are the C library's"
