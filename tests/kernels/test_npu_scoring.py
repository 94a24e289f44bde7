"""Scoring through torch-npu's fused head: what our side of the call does, with a stand-in for the op.

The stand-in computes what CANN documents, and is called through the schema torch-npu ships. Nothing here ran on an NPU.
"""

from dataclasses import replace
from types import SimpleNamespace

import hwgrpo_kernels
import pytest
import torch
from hwgrpo_kernels import KernelRegistry, Key, default_registry, library, npu_scoring
from hwgrpo_kernels.op import Shape

from tests.support.numbers.op_agreement import assert_agrees, in_fp64
from tests.support.numbers.torch_npu_schema import SCHEMA

ON_NPU = "npu"  # hw: the device type the implementation is registered for
[LINEAR] = [op for op in default_registry.ops() if op.name == "linear_logprob"]
[SCORING] = [each for each in default_registry.implementations("linear_logprob") if each.name == ON_NPU]
SHAPE = Shape(40, 70, 517)


def fused(input, weight, target, vocab_start_index, vocab_end_index, return_logits=False):
    """The documented results, with logits rounded as on A2 and A3; the end of the vocabulary as the kernel takes it."""
    assert input.dtype == weight.dtype != torch.float32
    logits = (input.float() @ weight.float().T).to(input.dtype).float()
    top = logits.max(1).values
    distance = logits - top[:, None]
    outside = (target < vocab_start_index) | (target >= vocab_end_index)
    place = (target - vocab_start_index).masked_fill(outside, 0)
    predicted = distance.gather(1, place[:, None])[:, 0].masked_fill(outside, 0.0)
    mask = torch.zeros(-(-len(target) // 8), dtype=torch.uint8)
    return top, distance.exp().sum(1), predicted, mask, place, logits.new_empty(0)


@pytest.fixture
def registry(monkeypatch):
    """The implementations of a machine that has the op, with the CPU in place of the NPU, as the library finds them."""
    namespace = torch.library.Library(ON_NPU, "FRAGMENT")
    namespace.define(SCHEMA)
    namespace.impl(npu_scoring.OP, fused, "CPU")
    made = KernelRegistry({})
    for op in default_registry.ops():
        made.declare(op)
        for each in default_registry.implementations(op.name):
            if each is SCORING:
                each = replace(each, device_types=None, requires=(), supports=None)
            made.register(each)
    made.configure(preference=[ON_NPU, "torch"])  # asked for: by itself torch comes first
    monkeypatch.setattr(library, "default_registry", made)
    monkeypatch.setattr("hwgrpo_kernels.streaming.default_registry", made)
    yield made
    namespace._destroy()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", LINEAR.cases)
def test_every_declared_case_equals_the_definition_by_the_op_or_by_the_next(registry, case, dtype):
    choice = registry.resolve("linear_logprob", "cpu", dtype, SHAPE.V)
    assert choice.name == ON_NPU
    inputs = LINEAR.inputs(SHAPE, dtype, "cpu", case)
    assert_agrees(LINEAR, choice.function, inputs, dtype)
    assert choice.declined == ({} if case == "scaled" else {"has no entropy": 1})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["plain", "scaled", "row_scale"])
def test_scoring_equals_the_definition(registry, case, dtype):
    inputs = LINEAR.inputs(SHAPE, dtype, "cpu", case) | {"with_entropy": False}
    assert npu_scoring.declines(**inputs) is None
    assert_agrees(LINEAR, npu_scoring.linear_logprob, inputs, dtype)


def test_a_logit_scale_and_a_temperature_per_row_multiply(registry):
    inputs = LINEAR.inputs(SHAPE, torch.bfloat16, "cpu", "row_scale") | {"with_entropy": False, "scale": 0.4}
    assert_agrees(LINEAR, npu_scoring.linear_logprob, inputs, torch.bfloat16)


def test_scoring_is_as_exact_as_logits_in_16_bits_allow(registry):
    inputs = LINEAR.inputs(SHAPE, torch.bfloat16, "cpu", "plain") | {"with_entropy": False}
    logprob, *_ = npu_scoring.linear_logprob(**inputs)
    logits = (inputs["hidden"].float() @ inputs["weight"].float().T).bfloat16().double()
    rounded = logits.log_softmax(1).gather(1, inputs["targets"][:, None])[:, 0]
    torch.testing.assert_close(logprob.double(), rounded, rtol=0, atol=2e-6)


def test_a_temperature_that_is_a_power_of_two_rounds_nothing(registry):
    inputs = LINEAR.inputs(SHAPE, torch.bfloat16, "cpu", "plain") | {"with_entropy": False}
    halved = npu_scoring.linear_logprob(**inputs | {"scale": 0.5})
    by_hand = npu_scoring.linear_logprob(**inputs | {"hidden": inputs["hidden"] / 2})
    assert torch.equal(halved[0], by_hand[0])
    assert torch.equal(halved[2], 2 * by_hand[2]), "row_max belongs to the logits before the temperature"


def test_the_first_and_the_last_entry_of_the_vocabulary_are_targets(registry):
    inputs = LINEAR.inputs(SHAPE, torch.bfloat16, "cpu", "plain") | {"with_entropy": False}
    inputs["targets"] = torch.tensor([0, SHAPE.V - 1] * 20)
    assert_agrees(LINEAR, npu_scoring.linear_logprob, inputs, torch.bfloat16)


@pytest.mark.parametrize("target", [-100, SHAPE.V, 2**33])
def test_a_target_out_of_range_gives_nan_in_its_row_alone(registry, target):
    inputs = LINEAR.inputs(SHAPE, torch.bfloat16, "cpu", "plain") | {"with_entropy": False}
    inputs["targets"][3] = target
    logprob, *_ = npu_scoring.linear_logprob(**inputs)
    assert logprob.isnan().nonzero().flatten().tolist() == [3]


@pytest.mark.parametrize(
    "change,reason",
    [
        ({"with_entropy": True}, "has no entropy"),
        ({"bias": torch.zeros(SHAPE.V)}, "has no bias"),
        ({"squash": 0.1}, "has no softcap"),
        ({"logits_dtype": torch.float32}, "rounds logits to torch.bfloat16, but torch.float32 is requested"),
        ({"hidden": torch.zeros(4, 65_535, dtype=torch.bfloat16)}, "takes hidden sizes up to 65534"),
        ({"hidden": torch.zeros(0, 70, dtype=torch.bfloat16)}, "there are no rows"),
        (
            {"hidden": torch.zeros(4, 70, dtype=torch.bfloat16, requires_grad=True)},
            "is for scoring, and the hidden states require a gradient",
        ),
    ],
)
def test_what_the_op_cannot_do_is_declined_with_the_reason(change, reason):
    inputs = LINEAR.inputs(SHAPE, torch.bfloat16, "cpu", "plain") | {"with_entropy": False}
    assert npu_scoring.declines(**inputs | {"logits_dtype": torch.bfloat16}) is None
    assert npu_scoring.declines(**inputs | change) == reason


def test_through_the_public_function_scoring_takes_the_op_and_a_gradient_does_not(registry):
    inputs = LINEAR.inputs(SHAPE, torch.bfloat16, "cpu", "plain")
    hidden, weight, targets = inputs["hidden"], inputs["weight"], inputs["targets"]
    with torch.no_grad():
        scored = hwgrpo_kernels.linear_logprob(hidden, weight.requires_grad_(), targets, temperature=0.7).logprob
    choice = registry.resolve("linear_logprob", "cpu", torch.bfloat16, SHAPE.V)
    assert choice.declined == {}
    trained = hwgrpo_kernels.linear_logprob(hidden.requires_grad_(), weight, targets, temperature=0.7).logprob
    assert list(choice.declined) == ["is for scoring, and the hidden states require a gradient"]
    torch.testing.assert_close(scored, trained.detach(), rtol=0, atol=0.1)
    trained.sum().backward()
    assert hidden.grad.norm() > 0


def test_a_head_alone_that_is_trained_gets_its_gradient_after_scoring_by_the_op(registry):
    inputs = LINEAR.inputs(SHAPE, torch.bfloat16, "cpu", "plain")
    weight = inputs["weight"].requires_grad_()
    hwgrpo_kernels.linear_logprob(inputs["hidden"], weight, inputs["targets"], temperature=0.7).logprob.sum().backward()
    assert registry.resolve("linear_logprob", "cpu", torch.bfloat16, SHAPE.V).declined == {}
    exact = in_fp64({"hidden": inputs["hidden"], "weight": weight.detach()})
    exact["weight"].requires_grad_()
    logits = exact["hidden"] @ exact["weight"].T / 0.7
    logits.log_softmax(1).gather(1, inputs["targets"][:, None]).sum().backward()
    assert (weight.grad.double() - exact["weight"].grad).norm() < 2e-2 * exact["weight"].grad.norm()


@pytest.fixture
def npu(registry, monkeypatch):
    """A machine with the op and an A2."""
    module = SimpleNamespace(is_available=lambda: True, get_device_name=lambda: "Ascend910B2")
    monkeypatch.setattr(torch, "get_device_module", lambda device_type: module)
    return module


KEY = Key("linear_logprob", ON_NPU, torch.bfloat16, 2**18)


def test_16_bit_hidden_states_and_a_vocabulary_that_fp32_counts_are_supported(npu):
    assert npu_scoring.reason_against(KEY) is None
    assert npu_scoring.reason_against(KEY._replace(dtype=torch.float16)) is None
    assert "not float32" in npu_scoring.reason_against(KEY._replace(dtype=torch.float32))
    assert "16777216" in npu_scoring.reason_against(KEY._replace(shape_class=2**25))


@pytest.mark.parametrize("chip,runs", [("Ascend910_9391", True), ("Ascend950PR", True), ("Ascend310P3", False)])
def test_only_chips_the_op_is_documented_for_are_supported(npu, chip, runs):
    npu.get_device_name = lambda: chip
    assert (npu_scoring.reason_against(KEY) is None) == runs


def test_a_machine_without_the_op_or_without_a_device_says_so(npu, monkeypatch):
    npu.is_available = lambda: False
    assert npu_scoring.reason_against(KEY) == "torch-npu finds no device"
    monkeypatch.setattr(npu_scoring, "OP", "npu_no_such_op")
    assert "has no npu_no_such_op" in npu_scoring.reason_against(KEY)
    assert SCORING.reason_against(KEY) == "needs module 'torch_npu', which is not installed"


def test_it_scores_only_where_it_is_asked_for(registry):
    registry.configure(preference=[])
    assert registry.resolve("linear_logprob", "cpu", torch.bfloat16, SHAPE.V).name == "torch"
    with registry.pinned({"linear_logprob": ON_NPU}):
        assert registry.resolve("linear_logprob", "cpu", torch.bfloat16, SHAPE.V).name == ON_NPU
