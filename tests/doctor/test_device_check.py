"""Tier 2: tests that pass on a sound CPU, tests that see a wrong result, children that die."""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hwgrpo_backends.device import Device, Memory
from hwgrpo_kernels import Key, default_registry

from hwgrpo.doctor import device_check, device_check_child
from hwgrpo.doctor.child_environment import ChildOutput
from hwgrpo.doctor.device_check import SelfTest, run_self_tests
from tests.support.devices.hosts import BUILTIN

CPU = Device(BUILTIN["cpu"])


@pytest.fixture(scope="module")
def tests():
    # without a C++ compiler some kernels are left out with their reason, and nothing is compiled for minutes
    return run_self_tests(BUILTIN["cpu"], 1, environ={**os.environ, "CXX": "no-such-compiler", "OMP_NUM_THREADS": "1"})


def test_a_sound_cpu_passes_every_self_test(tests):
    states = {test.name: test.state for test in tests}
    assert "FAIL" not in states.values(), tests
    for what in ("allocate", "bf16 matmul", "collectives"):
        assert states[what] == "PASS"
    for op in ("row_stats", "row_grad", "row_stats_kl", "row_grad_kl", "token_logprob", "linear_logprob"):
        assert states[f"kernel {op}=torch float32"] == "PASS"


def test_what_cannot_run_is_skipped_with_its_reason(tests):
    skipped = {test.name: test.detail for test in tests if test.state == "SKIP"}
    assert set(skipped) == {
        "kernel row_stats=compiled float32",
        "kernel row_grad=compiled float32",
        "kernel decode_attention=compiled float32",
        "memory released",
    }
    assert "no-such-compiler" in skipped["kernel row_stats=compiled float32"]


def outcome(work):
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_check_child, "print_line", lambda **fields: said.append(fields))
        device_check_child.run_test("it", work)
    return said[-1]["state"], said[-1]["detail"]


def compare(change):
    """Try a kernel whose result is changed."""
    op = next(op for op in default_registry.ops() if op.name == "row_stats")
    [right] = [each for each in default_registry.implementations("row_stats") if each.name == "torch"]
    wrong = replace(right, load=lambda: lambda **inputs: change(right.function()(**inputs)))
    key = Key("row_stats", "cpu", torch.float32, 1024)
    return outcome(lambda: device_check_child.kernel(CPU, op, wrong, key, op.shapes[1]))


def test_a_kernel_that_is_off_fails_and_one_that_is_not_passes():
    assert compare(lambda stats: stats)[0] == "PASS"
    state, told = compare(lambda stats: (stats[0] + 1e-3, *stats[1:]))
    assert state == "FAIL"
    assert "logprob is off by" in told
    assert compare(lambda stats: (stats[0] * torch.nan, *stats[1:]))[1] == "logprob is not finite"
    assert "has the shape" in compare(lambda stats: (stats[0][:3], *stats[1:]))[1]
    assert compare(lambda stats: stats[:2])[0] == "FAIL"


def test_a_gradient_that_is_off_fails():
    op = next(op for op in default_registry.ops() if op.name == "row_grad")
    [right] = [each for each in default_registry.implementations("row_grad") if each.name == "torch"]
    wrong = replace(right, load=lambda: lambda **inputs: right.function()(**inputs).mul_(1.001))
    state, told = outcome(
        lambda: device_check_child.kernel(CPU, op, wrong, Key("row_grad", "cpu", torch.float32, 1024), op.shapes[1])
    )
    assert (state, told.startswith("out is off by")) == ("FAIL", True)


def test_a_device_that_multiplies_wrongly_fails(monkeypatch):
    assert outcome(lambda: device_check_child.matmul(CPU))[0] == "PASS"
    to = torch.Tensor.to
    monkeypatch.setattr(
        torch.Tensor, "to", lambda self, *a, **k: to(self, *a, **k) * (1.1 if a[0] == CPU.torch_device else 1)
    )
    assert outcome(lambda: device_check_child.matmul(CPU))[0] == "FAIL"


def test_a_device_without_bf16_skips_the_products():
    old = SimpleNamespace(name="V100", compute_dtypes=(torch.float16, torch.float32))
    assert outcome(lambda: device_check_child.matmul(old)) == ("SKIP", "V100 does not compute in bf16")


class Metered:
    """A device with memory of its own, some of which may stay taken."""

    torch_device = torch.device("cpu")

    def __init__(self, free):
        self.free = iter(free)

    def synchronize(self):
        pass

    def empty_cache(self):
        pass

    def memory(self):
        return Memory(free=next(self.free) * 2**20)


@pytest.mark.parametrize(
    ("free", "state", "told"),
    [
        ((64, 48, 64), "PASS", "16 of 16 MiB free again"),
        ((64, 48, 48), "FAIL", "16 MiB are not free after empty_cache"),
        ((64, 64, 64), "FAIL", "0 MiB fewer are free"),
    ],
)
def test_memory_that_is_let_go_of_must_be_free_again(free, state, told):
    found = outcome(lambda: device_check_child.memory(Metered(free)))
    assert found[0] == state
    assert told in found[1]


def answers(monkeypatch, *given):
    left = iter(given)
    monkeypatch.setattr(
        device_check.child_environment, "run_children", lambda script, questions, *_: [next(left) for _ in questions]
    )


PASSED = {"test": "allocate", "state": "PASS", "detail": ""}


def test_the_self_test_in_which_a_child_dies_has_failed(monkeypatch):
    ranks = [ChildOutput([{"test": "collectives", "state": "PASS", "detail": ""}])] * 2
    died = ChildOutput([{"started": "allocate"}, PASSED, {"started": "bf16 matmul"}], "it ended with signal SIGSEGV: x")
    answers(monkeypatch, died, *ranks)
    tests = run_self_tests(BUILTIN["cpu"], 1)
    assert tests[0] == SelfTest("cpu", "allocate", "PASS", "")
    assert tests[1] == SelfTest("cpu", "bf16 matmul", "FAIL", "it ended with signal SIGSEGV: x")
    assert tests[2].state == "PASS"
    answers(monkeypatch, ChildOutput([], "it took more than 1 seconds"), *ranks)
    assert run_self_tests(BUILTIN["cpu"], 1)[0] == SelfTest("cpu", "start", "FAIL", "it took more than 1 seconds")
    answers(monkeypatch, ChildOutput(), *ranks)
    assert run_self_tests(BUILTIN["cpu"], 1)[0] == SelfTest("cpu", "start", "FAIL", "no output")


def test_every_device_is_tested_and_one_alone_has_no_second_rank(monkeypatch):
    answers(monkeypatch, ChildOutput([PASSED]))
    one = run_self_tests(BUILTIN["cuda"], 1)
    assert [(t.device, t.name, t.state) for t in one] == [
        ("cuda:0", "allocate", "PASS"), ("cuda x 2", "collectives", "SKIP")]  # fmt: skip
    assert one[1].detail == "needs 2 devices, this process sees 1"
    ok, bad = ({"test": "collectives", "state": state, "detail": state} for state in ("PASS", "FAIL"))
    answers(monkeypatch, *[ChildOutput([PASSED])] * 3, ChildOutput([ok]), ChildOutput([bad]))
    assert [(t.device, t.state) for t in run_self_tests(BUILTIN["cuda"], 3)] == [
        ("cuda:0", "PASS"), ("cuda:1", "PASS"), ("cuda:2", "PASS"), ("cuda x 2", "FAIL")]  # fmt: skip
