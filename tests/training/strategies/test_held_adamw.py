"""AdamW with states in host memory is torch's, bit for bit; with states in 8 bits it stays close."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from hwgrpo.errors import ConfigError
from hwgrpo.training.strategies import host_gradients
from hwgrpo.training.strategies.held_adamw import BLOCK, STATES, Exact, HeldAdamW, In8Bits, dynamic_table, gradient_of
from hwgrpo.training.strategies.optimizer import build_optimizer, clip_by_norm
from hwgrpo.training.strategies.param_shard import copy_to_host, full_param_shards
from tests.support.models.tiny import settings
from tests.support.processes.wheels import fetched
from tests.training.strategies.adamw_error import error_of_updates, maker_of

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[3]
SHAPES = ((131, 77), (50,), (3, 100, 30), (5000,))
OFFLOADED, ON_HOST, CODED = "trainer.offload=optimizer", "trainer.offload=gradients", "optim.name=adamw_8bit"


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Let parameters have several chunks, the last one short."""
    monkeypatch.setattr(host_gradients, "CHUNK", 8 * BLOCK)


def coded(count: int, *, signed: bool) -> In8Bits:
    """Return a state of `count` elements in 8 bits."""
    return In8Bits(*(torch.empty(size, dtype=dtype) for size, dtype in In8Bits.parts(count)), signed=signed)


def parameters() -> nn.ParameterList:
    draw = torch.Generator().manual_seed(1)
    return nn.ParameterList(nn.Parameter(torch.randn(shape, generator=draw)) for shape in SHAPES)


def optimizer_of(module: nn.Module, *words: str) -> torch.optim.AdamW:
    config = settings("optim.lr=1e-3", "optim.weight_decay=0.1", *words)
    return build_optimizer(module, config.optim, offload=config.trainer.offload)


def trained(*words: str, steps: int = 20) -> tuple[nn.ParameterList, torch.optim.AdamW]:
    """Return parameters after steps whose gradients have many small entries; the last parameter has one every other."""
    module, draw = parameters(), torch.Generator().manual_seed(2)
    optimizer = optimizer_of(module, *words)
    for step in range(steps):
        for parameter in module:
            gradient = torch.randn(parameter.shape, generator=draw) * torch.rand(parameter.shape, generator=draw) ** 4
            parameter.grad = None if step % 2 and parameter is module[3] else gradient
        optimizer.step()
    return module, optimizer


@pytest.mark.parametrize("copies", [False, True])
def test_states_in_host_memory_change_nothing(copies, monkeypatch):
    if copies:  # as another device gets
        monkeypatch.setattr(Exact, "load", lambda self, start, stop, _: self._values[start:stop].clone())
    plain, optimizer = trained()
    held, own = trained(OFFLOADED)
    assert isinstance(own, HeldAdamW)
    assert not isinstance(optimizer, HeldAdamW)
    for parameter, expected in zip(held, plain, strict=True):
        assert torch.equal(parameter, expected)
        states = own.expanded(parameter)
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(states[key], optimizer.state[expected][key]), key


@pytest.mark.parametrize("more", [(), (CODED,)])
def test_gradients_in_host_memory_are_summed_as_on_the_device_and_leave_nothing_there(more):
    results = []
    for words in ((), (ON_HOST,)):
        module = parameters()
        optimizer = optimizer_of(module, *words, *more)
        draw = torch.Generator().manual_seed(4)
        for update in range(3):
            for passed in range(4):
                used = [p for p in module if passed or p is not module[3]]
                torch.stack([(p.square() * torch.randn(p.shape, generator=draw)).sum() for p in used]).sum().backward()
                assert words == () or all(p.grad is None for p in module)
                if update == passed == 1:  # as out of memory does
                    optimizer.zero_grad()
            gradients = [gradient_of(optimizer, p) for p in module]
            assert None not in gradients
            norm = clip_by_norm([g for g in gradients if g is not None], 0.5)
            results.append((norm, *(g.clone() for g in gradients if g is not None)))
            optimizer.step()
            optimizer.zero_grad()
            assert gradient_of(optimizer, module[0]) is None
        results.append(tuple(p.detach() for p in module))
    for expected, found in zip(results[:4], results[4:], strict=True):
        for one, other in zip(expected, found, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("words", [(CODED,), (CODED, OFFLOADED)])
def test_steps_with_states_in_8_bits_stay_close_to_those_in_fp32(words):
    plain, optimizer = trained()
    held, own = trained(*words)
    for number, (parameter, expected, start) in enumerate(zip(held, plain, parameters(), strict=True)):
        if number == 1:  # a small one
            assert torch.equal(parameter, expected)
            continue
        assert 0 < (parameter - expected).norm() < 0.2 * (expected - start).norm()
        assert isinstance(own, HeldAdamW)
        first = own.expanded(parameter)["exp_avg"]
        exact = optimizer.state[expected]["exp_avg"]
        assert (first - exact).norm() < 0.05 * exact.norm()


def test_a_step_from_states_in_8_bits_is_that_of_torch_from_the_decoded_ones_bit_for_bit():
    """Then they are rounded to the nearest codes, see below."""
    module, optimizer = trained(CODED)
    assert isinstance(optimizer, HeldAdamW)
    reference = nn.ParameterList(nn.Parameter(parameter.detach().clone()) for parameter in module)
    exact = optimizer_of(reference)
    draw = torch.Generator().manual_seed(3)
    for own, other in zip(module, reference, strict=True):
        own.grad = torch.randn(own.shape, generator=draw)
        other.grad = own.grad.clone()
        exact.state[other] = {key: value.clone() for key, value in optimizer.read(own).items()}
    optimizer.step()
    exact.step()
    for own, other in zip(module, reference, strict=True):
        assert torch.equal(own, other)
        for key, signed in STATES.items():
            expected = exact.state[other][key]
            if optimizer.in_8_bits(own):
                held = coded(own.numel(), signed=signed)
                held.store(0, expected.flatten())
                expected = held.read().view(own.shape)
            assert torch.equal(optimizer.read(own)[key], expected)


@pytest.fixture(scope="module")
def error_in_8_bits() -> float:
    return error_of_updates(maker_of("adamw_8bit"))


def test_100_steps_with_states_in_8_bits_differ_by_what_the_docs_state(error_in_8_bits):
    with open(ROOT / "docs/settings.md", encoding="utf-8") as page:
        [stated] = re.findall(r"adamw_8bit`.* updates of 100 steps differ by (\S+) %", page.read())
    assert 100 * error_in_8_bits == pytest.approx(float(stated), abs=0.1)


@pytest.mark.slow
def test_they_differ_as_much_as_with_those_of_bitsandbytes(error_in_8_bits):
    folder = fetched("bitsandbytes", ("bitsandbytes",))
    paths = (folder, ROOT, ROOT / "kernels", ROOT / "backends")
    done = subprocess.run(
        [sys.executable, "-m", "tests.training.strategies.adamw_error"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert error_in_8_bits == pytest.approx(float(done.stdout), rel=0.05)


def test_a_checkpoint_decodes_states_in_8_bits_once_and_keeps_nothing_of_them():
    module, optimizer = trained(CODED)
    shards = full_param_shards(module, optimizer, read_only=True)
    copied = copy_to_host(shards)
    for shard, copy, parameter in zip(shards, copied, module, strict=True):
        for key, value in copy.values.items():
            live = key == "parameter" or not shard.in_8_bits
            assert torch.equal(value, shard.values[key])
            assert (value.data_ptr() != shard.values[key].data_ptr()) == live
        state = optimizer.state[parameter]
        assert all(getattr(state[key], "_expanded", None) is None for key in STATES)
    assert [shard.in_8_bits for shard in shards] == [True, False, True, True]


def test_states_in_8_bits_take_a_quarter():
    _, optimizer = trained(CODED, steps=1)
    state = optimizer.state[next(iter(optimizer.state))]
    for key in ("exp_avg", "exp_avg_sq"):
        count = SHAPES[0][0] * SHAPES[0][1]
        assert state[key]._codes.nbytes + state[key]._scales.nbytes == count + 4 * -(-count // BLOCK)


@pytest.mark.parametrize("signed", [True, False])
def test_coding_what_was_decoded_changes_nothing(signed):
    held = coded(10 * BLOCK + 7, signed=signed)
    values = torch.randn(10 * BLOCK + 7, generator=torch.Generator().manual_seed(0)) ** 3
    held.store(0, values if signed else values.abs())
    codes, scales = held._codes.clone(), held._scales.clone()
    first = held.expanded().clone()
    held.refresh()
    assert torch.equal(held.expanded(), first)
    held.refresh()
    assert torch.equal(held._codes, codes)
    assert torch.equal(held._scales, scales)


@pytest.mark.parametrize("signed", [True, False])
def test_a_value_gets_the_nearest_code_of_its_block(signed):
    table = dynamic_table(signed)
    assert len(table) == len(set(table.tolist())) == 256
    assert table[-1] == 1.0
    values = torch.randn(3 * BLOCK, generator=torch.Generator().manual_seed(0)) ** 3
    values = values if signed else values.abs()
    held = coded(3 * BLOCK, signed=signed)
    held.store(0, values)
    for block, found in zip(values.split(BLOCK), held.expanded().split(BLOCK), strict=True):
        scale = block[block.abs().argmax()]
        nearest = table[(block[:, None] / scale - table).abs().argmin(1)] * scale
        if not signed:
            nearest = nearest.maximum(table[1] * scale * (block > 0))
        assert torch.equal(found, nearest)


def test_a_positive_second_moment_never_becomes_zero_and_a_zero_stays_zero():
    values = torch.tensor([1.0, 1e-12, 0.0]).repeat(BLOCK)
    held = coded(len(values), signed=False)
    held.store(0, values)
    assert torch.equal(held.expanded() > 0, values > 0)
    blank = coded(7, signed=True)
    assert torch.equal(blank.load(0, 7, CPU), torch.zeros(7))


def test_what_is_written_into_expanded_states_counts_from_the_next_step_on():
    results = []
    for words in ((), (OFFLOADED,)):
        module, optimizer = trained(*words)
        for parameter in module:
            states = optimizer.expanded(parameter) if isinstance(optimizer, HeldAdamW) else optimizer.state[parameter]
            states["exp_avg"].mul_(0.5)
            states["step"].add_(3)
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        results.append(module)
    for own, expected in zip(*results, strict=True):
        assert torch.equal(own, expected)
    module, optimizer = trained(CODED)
    assert isinstance(optimizer, HeldAdamW)
    optimizer.expanded(module[0])["exp_avg"].fill_(0.25)
    optimizer.refresh()
    assert torch.equal(optimizer.expanded(module[0])["exp_avg"], torch.full(SHAPES[0], 0.25))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((OFFLOADED, "trainer.strategy=deepspeed"), "trainer.offload='optimizer' with trainer.strategy='deepspeed'"),
        ((CODED, "trainer.strategy=deepspeed"), "optim.name='adamw_8bit' with trainer.strategy='deepspeed'"),
        ((OFFLOADED, "trainer.strategy=fsdp2", "trainer.fsdp2.offload=true"), "use one of them"),
        (("optim.name=adamw_torch",), "that is adamw here"),
        ((ON_HOST, "trainer.strategy=fsdp2", "trainer.fsdp2.sync_every=update"), "use auto or micro_batch"),
        (("trainer.offload=true",), "that is optimizer here"),
        (("optim.name=adamw_bnb_8bit",), "that is adamw_8bit here"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_remedy(words, told):
    with pytest.raises(ConfigError, match=told):
        settings(*words)
