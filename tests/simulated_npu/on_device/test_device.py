"""The simulated device itself: that it refuses what a device refuses, and computes what the CPU does."""

import gc
import io

import pytest
import torch
import torch_npu
from hwgrpo_kernels import linear_token_loss
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels.token_loss_cases import ppo, problem
from tests.support.numbers.rounding import assert_gradients_close

OTHER_DEVICE = "Expected all tensors to be on the same device"


def test_what_is_put_on_the_device_comes_back_the_same():
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        here = torch.randint(0, 2, (3, 5)).to(dtype)
        there = here.to("npu")
        assert there.device == torch.device("npu", 0)
        assert torch.equal(there.cpu(), here)
        assert torch.equal(there.t().cpu(), here.t())


class Multiplied(TorchDispatchMode):
    """Records the elements of tensors on the device that are multiplied in place, and values that are read."""

    def __init__(self):
        super().__init__()
        self.elements, self.reads = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mul_.Tensor:
            self.elements.append(args[0].numel())
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("factor", [1.0, 0.5])
@pytest.mark.parametrize("final", [False, True])
def test_the_backward_of_a_loss_reads_nothing_and_multiplies_only_gradients_that_may_not_be_final(
    factor: float, final: bool
):
    p = problem(n=9, h=4, v=50)
    hidden, weight, targets = (each.detach().to("npu") for each in (p.hidden, p.weight, p.targets))
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    rows = {name: each.to("npu") for name, each in p.rows.items()}
    loss = linear_token_loss(*leaves, targets, ppo, rows=rows, final_gradients=final).loss
    with Multiplied() as seen:
        loss.backward(torch.tensor(factor, device="npu"))
    assert seen.reads == 0
    assert seen.elements == ([4, 4] if final else [9 * 4, 50 * 4])
    linear_token_loss(p.hidden, p.weight, p.targets, ppo, rows=p.rows).loss.backward()
    for leaf, plain in zip(leaves, (p.hidden, p.weight), strict=True):
        if final and factor != 1.0:
            assert leaf.grad.isnan().any(), "a broken promise"
        else:
            assert_gradients_close({"x": leaf.grad.cpu()}, {"x": plain.grad * factor})


MIXED = {
    "adding": lambda x, y: x + y,
    "multiplying": lambda x, y: x @ y.T,
    "adding in place": lambda x, y: x.add_(y),
    "an output on the other device": lambda x, y: torch.mul(x, x, out=y),
    "gathering": lambda x, y: x.gather(0, y.long()),
    "selecting": lambda x, y: x.index_select(0, y[0].long()),
    "an embedding": lambda x, y: torch.nn.functional.embedding(y.long(), x),
    "joining": lambda x, y: torch.cat([x, y]),
    "a list of tensors": lambda x, y: torch._foreach_add_([x], [y]),
    "an indexed write of values": lambda x, y: x.index_put_((torch.tensor([0]),), y[0]),
}


@pytest.mark.parametrize("name", MIXED)
@pytest.mark.parametrize("other", ["cpu", "npu:1"])
def test_tensors_of_two_devices_in_one_operator_are_refused(name: str, other: str):
    for left, right in (("npu:0", other), (other, "npu:0")):
        with pytest.raises(RuntimeError, match=OTHER_DEVICE):
            MIXED[name](torch.zeros(2, 2, device=left), torch.zeros(2, 2, device=right))


def test_numbers_and_indices_may_come_from_the_cpu():
    x = torch.arange(6.0, device="npu").view(2, 3)
    assert (x * torch.tensor(2.0)).tolist() == [[0, 2, 4], [6, 8, 10]]
    assert x[torch.tensor([1])].tolist() == [[3, 4, 5]]


def test_new_memory_holds_nothing_that_could_be_taken_for_a_result():
    assert torch.empty(9, device="npu").isnan().all()
    assert (torch.empty(9, dtype=torch.int64, device="npu") == -1).all()


def test_host_memory_that_was_pinned_is_known_as_such_and_holds_the_same():
    plain = torch.arange(5.0)
    pinned = plain.pin_memory()
    assert not plain.is_pinned()
    assert pinned.is_pinned()
    assert pinned[2:].is_pinned()
    assert pinned.pin_memory() is pinned
    assert torch.equal(pinned.to("npu", non_blocking=True).cpu(), plain)


@pytest.mark.parametrize("wait", ["device", "stream", "event", "query", "item", "blocking copy"])
def test_a_copy_to_the_host_that_does_not_wait_arrives_with_the_next_synchronization(wait: str):
    x = torch.arange(4.0, device="npu")
    copied, counted = x.to("cpu", non_blocking=True), x.long().to("cpu", non_blocking=True)
    x += 10  # later work of the stream is not in the copy
    assert copied.isnan().all()
    assert (counted == -1).all()
    event = torch.Event("npu")
    event.record()
    {
        "device": torch.npu.synchronize,
        "stream": torch.npu.current_stream().synchronize,
        "event": event.synchronize,
        "query": event.query,
        "item": lambda: x.sum().item(),
        "blocking copy": x.cpu,
    }[wait]()
    assert copied.tolist() == counted.tolist() == [0, 1, 2, 3]


def test_a_copy_of_another_stream_or_after_an_event_has_not_arrived():
    x = torch.ones(2, device="npu")
    event = torch.Event("npu")
    event.record()
    later = x.to("cpu", non_blocking=True)
    event.synchronize()
    assert later.isnan().all()
    with torch.npu.stream(torch.npu.Stream()):
        x.cpu()
    assert later.isnan().all()
    torch.npu.synchronize()
    assert later.tolist() == [1, 1]


def test_pinned_memory_is_read_late_and_other_memory_at_once():
    pinned, plain = torch.ones(2).pin_memory(), torch.ones(2)
    early, late = (each.to("npu", non_blocking=True) for each in (plain, pinned))
    pinned.fill_(5)
    plain.fill_(5)
    assert late.tolist() == [5, 5]
    assert early.tolist() == [1, 1]


def test_copies_there_and_back_keep_their_order():
    held = torch.ones(2).pin_memory()
    x = held.to("npu", non_blocking=True)
    for _ in range(2):
        x = x + 1
        held.copy_(x, non_blocking=True)
        x = held.to("npu", non_blocking=True)
    assert x.tolist() == [3, 3]


def test_memory_is_counted_per_device_and_freed():
    gc.collect()
    before = torch.npu.memory_allocated(1)
    x = torch.zeros(1000, device="npu:1")
    assert torch.npu.memory_allocated(1) == before + 4000
    assert torch.npu.memory_allocated(0) == torch.npu.memory_allocated()
    free, total = torch.npu.mem_get_info(1)
    assert total - free == before + 4000
    del x
    assert torch.npu.memory_allocated(1) == before
    assert torch.npu.max_memory_allocated(1) >= before + 4000
    torch.npu.reset_peak_memory_stats(1)
    assert torch.npu.max_memory_allocated(1) == before


def test_running_out_of_memory_raises_what_torch_raises_on_every_device():
    _, total = torch.npu.mem_get_info()
    used = torch.npu.memory_allocated()
    torch_npu._device.set_capacity(used + 4000)
    try:
        with pytest.raises(torch.OutOfMemoryError, match=r"NPU out of memory\. Tried to allocate 4004 bytes"):
            torch.zeros(1001, device="npu")
        torch.zeros(1000, device="npu")  # one block fits: nothing of the other was kept
        torch.zeros(1000, device="npu:1")  # and the other device is not full
    finally:
        torch_npu._device.set_capacity(total)


def test_the_device_draws_from_a_generator_of_its_own():
    def drawn() -> list[torch.Tensor]:
        x = torch.ones(50, device="npu", requires_grad=True)
        return [torch.rand(5, device="npu"), torch.nn.functional.dropout(x), torch.randperm(9, device="npu")]

    torch.manual_seed(3)
    first, host = drawn(), torch.rand(5)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(5), host), "drawing on the device has moved the CPU's generator"
    torch.rand(100)
    assert all(map(torch.equal, drawn(), first)), "drawing on the CPU has moved the device's generator"
    state = torch.npu.get_rng_state()
    second = drawn()
    torch.npu.set_rng_state(state)
    assert all(map(torch.equal, drawn(), second))
    assert not any(map(torch.equal, first, second))


def test_outputs_take_new_sizes_and_views_share_memory():
    x = torch.arange(6.0, device="npu")
    out = torch.empty(0, device="npu")
    assert torch.add(x, 1, out=out) is out
    assert out.tolist() == [1, 2, 3, 4, 5, 6]
    x.view(2, 3).t()[0].fill_(9)
    x.unfold(0, 2, 4)[1].mul_(2)
    assert x.tolist() == [9, 1, 2, 9, 8, 10]
    assert torch.view_as_complex(x.view(3, 2)).imag.tolist() == [1, 9, 10]


def test_a_module_keeps_its_tied_weights_on_the_device():
    left, right = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    right.weight = left.weight
    pair = torch.nn.Sequential(left, right).to("npu")
    assert pair[0].weight is pair[1].weight
    assert pair[0].weight.device.type == "npu"


def learned(device: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return the gradients of a layer and its parameters after a step, in one vector."""
    torch.manual_seed(0)
    model = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    data, goal = torch.randn(2, 2, 5, 16)
    model.to(device)
    # The gradient of a key's bias is nothing but rounding, which a small eps would turn into whole steps.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)
    with torch.autocast(device, dtype or torch.bfloat16, enabled=dtype is not None):
        out = model(data.to(device))
    (out.float() - goal.to(device)).square().mean().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert len(gradients) == 12
    optimizer.step()
    return torch.cat([each.detach().cpu().flatten() for each in (*gradients, *model.parameters())])


def test_a_layer_learns_as_on_the_cpu():
    assert_gradients_close({"all": learned("npu")}, {"all": learned("cpu")})


def test_autocast_multiplies_in_16_bits_and_sums_in_32():
    x = torch.randn(4, 4, device="npu")
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("npu", dtype):
            assert (x @ x).dtype is dtype
            assert torch.nn.functional.linear(x, x).dtype is dtype
            assert (x @ x).softmax(-1).dtype is torch.float32
            assert (x + x).dtype is torch.float32
    full, rounded = learned("npu"), learned("npu", torch.bfloat16)
    assert 1e-5 < (rounded - full).norm() / full.norm() < 1e-2


def test_tensors_are_saved_and_loaded_to_where_they_belong():
    file = io.BytesIO()
    torch.save({"x": torch.ones(2, device="npu:1")}, file)
    file.seek(0)
    assert torch.load(file)["x"].device == torch.device("npu:1")
    file.seek(0)
    assert torch.load(file, map_location="cpu")["x"].device.type == "cpu"


def test_a_device_that_is_not_there_is_refused():
    for wrong in (lambda: torch.zeros(1, device="npu:2"), lambda: torch.npu.set_device(2)):
        with pytest.raises(RuntimeError, match="invalid npu device 2: there are 2"):
            wrong()
