"""`hwgrpo bench kernels`: what is computed and compared before anything is timed, and what is said of the times."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hwgrpo_backends.cpu import BACKEND
from hwgrpo_backends.device import Device
from hwgrpo_kernels import Implementation, Shape, default_registry, rows_torch

from hwgrpo.bench.kernels import cases, measure, peak, sides
from hwgrpo.bench.kernels import clock as clock_module
from hwgrpo.bench.kernels.cases import CASES, Case
from hwgrpo.bench.kernels.clock import LONGEST_BUSY, BusyDevice, Clock, Samples, median_ratio
from hwgrpo.bench.kernels.exact import LinearTruth, LogitsTruth, forward_error, gradient_error
from hwgrpo.bench.kernels.kernel_result import CaseBench, KernelBench, SideBench
from hwgrpo.bench.kernels.measure import measure_cases, measure_kernels
from hwgrpo.bench.kernels.peers import PEERS, Peer
from hwgrpo.bench.kernels.peers.peer import anywhere
from hwgrpo.bench.kernels.problem import PROBLEMS, linear_problem, logits_problem
from hwgrpo.bench.times import Times

SHAPE = Shape(72, 8, 300)  # more rows than are compared with fp64 at a time
HOST = torch.device("cpu")
BY_NAME = {case.name: case for case in CASES}


@pytest.fixture(autouse=True)
def _small_ceilings(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hwgrpo.bench.kernels.ceiling.HOST_GEMM_SIDE", 32)
    monkeypatch.setattr("hwgrpo.bench.kernels.ceiling.HOST_COPY_BYTES", 4096)


@contextmanager
def registered(implementation: Implementation) -> Iterator[None]:
    """Have an implementation for the length of a block."""
    default_registry.register(implementation)
    try:
        yield
    finally:
        del default_registry._implementations[implementation.op][implementation.name]
        default_registry._selected.clear()


def problem_of(case: Case, dtype: torch.dtype = torch.float32) -> Any:
    return PROBLEMS[case.kind](SHAPE, dtype, HOST)


def bench(*names: str, repeat: int = 1, dtype: torch.dtype = torch.float32) -> KernelBench:
    chosen = [BY_NAME[name] for name in names] if names else list(CASES)
    return measure_kernels(Device(BACKEND), {"tiny": SHAPE}, dtype, chosen, repeat, memory=False)


def sides_of(result: KernelBench, name: str) -> dict[str, SideBench]:
    (case,) = (case for shape in result.shapes for case in shape.cases if case.name == name)
    return {side.name: side for side in case.sides}


def peer(monkeypatch: pytest.MonkeyPatch, **arguments: Any) -> None:
    """Make one peer the only one."""
    given = {"name": "theirs", "distribution": "nothing", "modules": (), "cannot": anywhere, **arguments}
    monkeypatch.setattr(cases, "PEERS", (Peer(**given),))


def right(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs, entropy = sides.eager_stats(hidden @ weight.T)
    return sides.gather(logprobs, targets), entropy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_side_of_every_case_gives_what_it_must_and_agrees_with_fp64(dtype: torch.dtype):
    result = bench(dtype=dtype)
    expected = {case.name for case in CASES if case.applies(dtype)}
    assert {case.name for case in result.shapes[0].cases} == expected
    assert ("linear_token_loss-fp32" in expected) == (dtype == torch.bfloat16)
    assert result.wrong == []
    for name in expected:
        found = sides_of(result, name)
        assert {"torch", "definition"} <= set(found)
        for side in found.values():
            if side.group == "peer":
                continue
            assert side.state == "timed", f"{name} {side.name}: {side.reason}"
            assert set(BY_NAME[name].gives) <= set(side.errors)
            assert len(side.samples.seconds) == 1
        assert set(found["torch"].implementations.values()) == {"torch"}


def test_gradients_are_those_a_case_is_about():
    def grads(name: str) -> set[str]:
        case = BY_NAME[name]
        found = set()
        for side in case.sides(case, problem_of(case)):
            if side.work is not None:
                with side.in_force():
                    found.add(frozenset(key for key in side.work() if key.endswith(".grad")))
        assert len(found) == 1, f"sides of {name} make different gradients: {found}"
        return set(found.pop())

    assert grads("linear_logprob") == grads("token_logprob") == grads("row_stats") == set()
    assert grads("linear_logprob+grad") == grads("linear_token_loss") == {"hidden.grad", "weight.grad"}
    assert grads("linear_token_loss-frozen") == {"hidden.grad"}
    assert grads("row_grad") == grads("token_logprob+grad") == {"logits.grad"}


def test_fp32_logits_are_fp32_when_the_row_kernels_see_them():
    seen: list[torch.dtype] = []

    def spy(logits: torch.Tensor, *arguments: Any) -> Any:
        seen.append(logits.dtype)
        return rows_torch.row_stats(logits, *arguments)

    with registered(Implementation("row_stats", "spy", lambda: spy)):
        for name, dtype in (("linear_token_loss-fp32", torch.float32), ("linear_token_loss", torch.bfloat16)):
            case = BY_NAME[name]
            (side,) = (s for s in case.sides(case, problem_of(case, torch.bfloat16)) if s.name == "spy")
            seen.clear()
            with side.in_force():
                assert side.work is not None
                side.work()
            assert set(seen) == {dtype}, name


@pytest.mark.parametrize("name", ["row_stats", "token_logprob", "linear_logprob", "linear_token_loss"])
def test_each_implementation_is_a_side_and_runs_in_its_own_rounds_only(name: str):
    calls: list[str] = []

    def spy(*arguments: Any) -> Any:
        calls.append("spy")
        return rows_torch.row_stats(*arguments)

    with registered(Implementation("row_stats", "spy", lambda: spy, rank=9)):
        case = BY_NAME[name]
        found = {side.name: side for side in case.sides(case, problem_of(case)) if side.group == "ours"}
        assert set(found) == {"torch", "compiled", "spy"}
        for each, side in found.items():
            calls.clear()
            with side.in_force():
                assert side.work is not None
                side.work()
            assert bool(calls) == (each == "spy"), each
            assert side.implementations["row_stats"] == each


def test_the_rounds_of_a_side_run_its_own_implementation():
    calls: list[str] = []

    def spy(*arguments: Any) -> Any:
        calls.append("spy")
        return rows_torch.row_stats(*arguments)

    with registered(Implementation("row_stats", "spy", lambda: spy, rank=9)):
        found = sides_of(bench("row_stats", repeat=3), "row_stats")
    assert {"torch", "spy"} <= set(found)
    assert len(calls) == 5, "compared, warmed up and timed three times; never in the rounds of the other"


def test_a_pin_of_the_environment_leaves_only_what_it_pins(monkeypatch: pytest.MonkeyPatch):
    case = BY_NAME["row_stats"]
    with registered(Implementation("row_stats", "other", lambda: rows_torch.row_stats, rank=9)):
        monkeypatch.setenv("HWGRPO_KERNELS", "row_stats=torch")
        found = [side.name for side in case.sides(case, problem_of(case)) if side.group == "ours"]
    assert found == ["torch"]


def test_an_implementation_whose_result_is_off_is_named_and_not_timed():
    def off(*arguments: Any) -> Any:
        logprob, *others = rows_torch.row_stats(*arguments)
        return logprob + 1e-3, *others

    with registered(Implementation("row_stats", "off", lambda: off)):
        result = bench("row_stats", "linear_logprob")
    for name in ("row_stats", "linear_logprob"):
        found = sides_of(result, name)["off"]
        assert (found.state, found.samples.seconds, found.ratio) == ("wrong", [], None)
        assert "its logprob is" in found.reason
        assert sides_of(result, name)["torch"].state == "timed"
    assert result.wrong == ["tiny linear_logprob off", "tiny row_stats off"]


def test_a_peer_with_another_gradient_is_named_and_not_timed(monkeypatch: pytest.MonkeyPatch):
    class OtherSign(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logprob: torch.Tensor) -> torch.Tensor:
            return logprob.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            return -grads[0]

    def wrong(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logprob, entropy = right(*arguments)
        return OtherSign.apply(logprob), entropy  # pyright: ignore[reportReturnType]

    peer(monkeypatch, score=lambda: wrong)
    result = bench("linear_logprob", "linear_token_loss")
    assert sides_of(result, "linear_logprob")["theirs"].state == "timed", "without gradients it is right"
    found = sides_of(result, "linear_token_loss")["theirs"]
    assert (found.state, found.samples.seconds) == ("wrong", [])
    assert "its hidden.grad is 2.0e+00 from fp64's" in found.reason


def test_a_peer_that_is_right_is_timed_and_one_without_entropy_too(monkeypatch: pytest.MonkeyPatch):
    peer(monkeypatch, score=lambda: lambda *arguments: (right(*arguments)[0], None))
    found = sides_of(bench("linear_logprob"), "linear_logprob")["theirs"]
    assert (found.state, set(found.errors)) == ("timed", {"logprob"})


def test_a_peer_with_a_loss_of_its_own_is_measured_where_there_are_gradients(monkeypatch: pytest.MonkeyPatch):
    def loss(hidden: Any, weight: Any, targets: Any, advantages: torch.Tensor) -> torch.Tensor:
        rows = advantages.repeat_interleave(len(targets) // len(advantages))
        return -(rows * right(hidden, weight, targets)[0]).mean()

    peer(monkeypatch, loss=lambda: loss)
    result = bench("linear_logprob", "linear_token_loss", "linear_token_loss-frozen")
    assert "theirs" not in sides_of(result, "linear_logprob")
    for name in ("linear_token_loss", "linear_token_loss-frozen"):
        assert sides_of(result, name)["theirs"].state == "timed", sides_of(result, name)["theirs"].reason


def test_what_cannot_run_says_why_and_the_rest_is_measured(monkeypatch: pytest.MonkeyPatch):
    def fails() -> Any:
        raise ImportError("libnothing.so\nmore")

    def too_large(*_: Any) -> Any:
        raise torch.OutOfMemoryError

    for arguments, reason in (
        ({"modules": ("no_such_module",), "score": fails}, "not installed: no_such_module"),
        ({"cannot": lambda *_: "it needs more", "score": fails}, "it needs more"),
        ({"score": fails}, "ImportError: libnothing.so"),
        ({"score": lambda: too_large}, "it runs out of memory here"),
    ):
        peer(monkeypatch, **arguments)
        found = sides_of(bench("linear_logprob"), "linear_logprob")
        assert (found["theirs"].state, found["theirs"].reason) == ("impossible", reason)
        assert found["torch"].state == found["eager"].state == "timed"


def test_an_error_of_our_own_is_not_swallowed():
    def fails(*_: Any) -> Any:
        raise RuntimeError("our own")

    with registered(Implementation("row_stats", "fails", lambda: fails)), pytest.raises(RuntimeError, match="our own"):
        bench("row_stats")


class FakeClock(Clock):
    """Gives each side of a case seconds of its own, and writes down who was measured."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.name, self.seconds, self.order = "processor", seconds, []

    def measure(self, samples: Samples, work: Any) -> Any:
        name = work()
        self.order.append(name)
        samples.times.cpu_s.append(self.seconds[name])
        return name


def test_ratios_say_how_many_times_as_fast_as_eager_a_side_is_and_sides_take_turns():
    clock = FakeClock({"torch": 1.0, "eager": 4.0, "definition": 8.0})
    case = BY_NAME["token_logprob"]
    entries = [
        measure._Entry(
            sides.Side(name, "ours", lambda name=name: name, sides.loose(torch.float32)),
            SideBench(name, "ours", "timed", clock.samples()),
        )
        for name in clock.seconds
    ]
    device = Device(BACKEND)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "device_peak", lambda *_: None)
        found = measure._time(device, case, entries, SHAPE, torch.float32, 3, clock)
    assert found.baseline == "eager"
    assert {side.name: side.ratio for side in found.sides} == {"torch": 4.0, "eager": 1.0, "definition": 0.5}
    rounds = [clock.order[start : start + 3] for start in range(0, 9, 3)]
    assert all(set(each) == set(clock.seconds) for each in rounds)
    assert [each[0] for each in rounds] == ["eager", "definition", "torch"]
    torch_side = found.sides[0]
    assert found.rate(torch_side) == found.bytes == SHAPE.N * (SHAPE.V * 4 + 24)


@pytest.mark.parametrize("base", ["eager", "definition"])
def test_selected_sides_are_measured_after_they_agree_with_fp64(base: str):
    case = BY_NAME["token_logprob+grad"]
    device = Device(BACKEND)
    [found] = measure_cases(
        device, SHAPE, torch.float32, [case], 2, Clock(device), includes=lambda side: side.name in ("torch", base)
    )
    assert [(side.name, side.state, len(side.samples.seconds)) for side in found.sides] == [
        ("torch", "timed", 2),
        (base, "timed", 2),
    ]
    assert found.baseline == base
    assert all(set(side.errors) == {"logprob", "entropy", "logits.grad"} for side in found.sides)


def test_a_ratio_is_of_rounds_and_one_odd_round_does_not_move_it():
    def of(*seconds: float) -> Samples:
        return Samples("processor", Times([9.0] * len(seconds), list(seconds)))

    assert median_ratio(of(2, 2, 2), of(1, 1, 50)) == 2.0
    assert median_ratio(of(1, 1, 1), of(4, 4, 4)) == 0.25
    assert median_ratio(of(), of()) is None


def test_work_is_counted_without_anything_done_twice():
    n, h, v = SHAPE
    gemm = 2 * n * h * v
    flops = {case.name: case.flops(SHAPE, torch.bfloat16) for case in CASES if case.flops}
    assert flops == {
        "linear_logprob": gemm,
        "linear_logprob+grad": 3 * gemm,
        "linear_token_loss": 3 * gemm,
        "linear_token_loss-frozen": 2 * gemm,
        "linear_token_loss-fp32": 3 * gemm,
    }
    moved = {case.name: case.bytes(SHAPE, torch.bfloat16) for case in CASES if case.bytes}
    assert moved["row_stats"] == moved["token_logprob"] == n * (2 * v + 24)
    assert moved["row_grad"] == n * (4 * v + 32)
    assert moved["token_logprob+grad"] == moved["row_stats"] + moved["row_grad"]


def test_rates_are_shares_of_the_ceiling_of_their_kind():
    from hwgrpo.bench.kernels.ceiling import Ceiling

    ceiling = Ceiling(100, Samples("wall", Times([1e-3])), 1000, Samples("wall", Times([1e-3])))
    assert ceiling.flops_per_s == pytest.approx(2e9)
    assert ceiling.bytes_per_s == pytest.approx(2e6)
    side = SideBench("torch", "ours", "timed", Samples("wall", Times([0.5])))
    products = CaseBench("linear_logprob", "", int(5e8), None, [side], "eager")
    moves = CaseBench("row_stats", "", None, int(5e5), [side], "definition")
    assert products.share(side, ceiling) == moves.share(side, ceiling) == pytest.approx(0.5)


class FakeDevice:
    """The events of a device, for the clock of this machine: seconds pass as `log` says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, product_ms: float) -> None:
        self.log: list[str] = []
        device, product = self, torch.mm

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = len(device.log)
                device.log.append("record")

            def synchronize(self) -> None:
                device.log.append("synchronize")

            def elapsed_time(self, other: Event) -> float:
                done = device.log[self.at : other.at]
                return product_ms * done.count("product") + 7.0 * done.count("work")

        def mm(*arguments: torch.Tensor) -> torch.Tensor:
            self.log.append("product")
            return product(*arguments)

        monkeypatch.setattr(clock_module, "BUSY_SIZE", 2)
        monkeypatch.setattr(torch, "mm", mm)
        self.clock = Clock(Device(BACKEND))
        assert self.clock.name == "processor"
        monkeypatch.setattr(self.clock, "_events", type("Module", (), {"Event": Event}))
        monkeypatch.setattr(self.clock, "_busy", BusyDevice(Device(BACKEND), self.clock._events))
        self.clock.name = "device"

    def take(self) -> list[str]:
        """Return and clear the log."""
        log, self.log = self.log, []
        return log


def test_device_events_count_where_there_are_some(monkeypatch: pytest.MonkeyPatch):
    device = FakeDevice(monkeypatch, product_ms=100.0)
    samples = device.clock.samples()
    device.clock.measure(samples, lambda: device.log.append("work"))
    log = device.take()
    assert log[0] == "work", "on the clock of the wall, with nothing before it"
    assert log[-5:] == ["product", "record", "work", "record", "synchronize"]
    assert samples.seconds == [pytest.approx(0.007)], "neither the products nor the host's time"
    assert len(samples.times.wall_s) == 1


def test_the_device_is_busy_for_as_long_as_the_host_launches(monkeypatch: pytest.MonkeyPatch):
    device = FakeDevice(monkeypatch, product_ms=1.0)
    now = iter(range(1000))
    monkeypatch.setattr(clock_module.time, "perf_counter", lambda: 0.01 * next(now))
    device.clock.measure(device.clock.samples(), lambda: device.log.append("work"))
    device.take()
    device.clock.measure(device.clock.samples(), lambda: device.log.append("work"))
    launched = device.take()
    busy = launched.count("product")
    assert 10 <= busy <= 1000 * LONGEST_BUSY, "0.01 s of launching, products of 0.001 s"
    assert launched == ["work", *["product"] * busy, "record", "work", "record", "synchronize"]
    device.clock.measure(device.clock.samples(), lambda: [device.log.append("work"), *(next(now) for _ in range(99))])
    assert device.take().count("product") == round(1000 * LONGEST_BUSY), "a second of launching"


def test_several_threads_go_by_the_wall_clock():
    torch.set_num_threads(2)
    try:
        assert Clock(Device(BACKEND)).name == "wall"
    finally:
        torch.set_num_threads(1)


def test_errors_tell_nan_shape_and_size():
    exact = torch.tensor([1.0, 3.0], dtype=torch.float64)
    assert forward_error(torch.tensor([1.0, 3.4]), exact) == pytest.approx(0.1)
    assert gradient_error(torch.tensor([1.0, 4.0]), exact) == pytest.approx(1 / 10**0.5)
    assert forward_error(torch.ones(3), exact) == gradient_error(torch.ones(3), exact) == float("inf")
    case, side = BY_NAME["linear_logprob"], sides.Side("s", "ours", None, sides.loose(torch.float32))
    nan = {"logprob": float(forward_error(torch.tensor([float("nan"), 3.0]), exact))}
    assert "its logprob is nan" in cases.fault(case, side, {"logprob": exact}, nan)
    assert cases.fault(case, side, {}, {}) == "it gives no logprob"


@pytest.mark.parametrize("output", ["logprob", "entropy", "row_max"])
def test_a_nan_in_the_first_rows_is_still_there_after_the_last(output: str):
    problem = logits_problem(SHAPE, torch.float32, HOST)
    result = dict(zip(("logprob", "entropy", "row_max", "log_sum"), (each.clone() for each in problem.stats)))
    assert LogitsTruth(problem).errors(result)[output] <= 1e-6
    result[output][3] = float("nan")
    error = LogitsTruth(problem).errors(result)[output]
    assert error != error


def test_truth_is_autograd_in_fp64():
    problem = linear_problem(SHAPE, torch.float32, HOST)
    hidden, weight = (each.double().requires_grad_() for each in (problem.hidden, problem.weight))
    logprob, entropy = right(hidden, weight, problem.targets)
    (logprob * problem.row_weight).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    exact = {
        "logprob": logprob.detach(),
        "entropy": entropy.detach(),
        "hidden.grad": hidden.grad,
        "weight.grad": weight.grad,
    }
    assert max(LinearTruth(problem).errors(exact).values()) < 1e-12
    assert LinearTruth(problem).errors({"weight.grad": -weight.grad})["weight.grad"] == pytest.approx(2)


@pytest.mark.skipif(not peak.can_measure_host(), reason="only Linux resets the highest mark of a resident set")
def test_memory_of_the_host_is_what_work_takes_beyond_its_results():
    large = peak.host_peaks(Shape(64, 8, 60000), torch.float32, [("token_logprob", "eager"), ("row_stats", "torch")])
    logits = 64 * 60000 * 4
    assert set(large) == {("token_logprob", "eager"), ("row_stats", "torch")}
    assert 2 * logits < large["token_logprob", "eager"] < 5 * logits
    assert 0 < large["row_stats", "torch"] < large["token_logprob", "eager"]


def test_peers_name_what_is_missing():
    assert len({each.name for each in PEERS}) == len(PEERS)
    for each in PEERS:
        assert (each.score is None) != (each.loss is None)
    verl, cce = (next(each for each in PEERS if each.name == name) for name in ("verl", "cut-cross-entropy"))
    assert "multiple of 128, not 100" in verl.cannot("meta", torch.bfloat16, Shape(8, 100, 50))
    assert verl.cannot("meta", torch.bfloat16, Shape(8, 128, 50)) == ""
    assert "16-bit" in cce.cannot("meta", torch.float32, SHAPE)
    assert "accelerator" in cce.cannot("cpu", torch.bfloat16, SHAPE)
