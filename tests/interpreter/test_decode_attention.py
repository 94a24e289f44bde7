"""The Triton kernels of a decode step give what their definitions give, and a run's tokens are those without them."""

import pytest
import torch
from hwgrpo_kernels import Shape, decode_triton, default_registry
from hwgrpo_kernels.testing import cases

from hwgrpo.rollout.local.lean_step_check import check_lean_step
from hwgrpo.values import Sampling
from tests.rollout.decoders import CPU, batch_of, engine_of, model_of
from tests.support.numbers.decode_kernels_on_cpu import OPS, selected
from tests.support.numbers.op_agreement import assert_agrees
from tests.support.numbers.row_cases import DEVICE

BY_NAME = {op.name: op for op in default_registry.ops() if op.name in OPS}
ATTENTION = BY_NAME["decode_attention"]
KERNELS = {name: getattr(decode_triton, name) for name in OPS}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CASES = [
    pytest.param(op, case, shape, dtype, id=f"{op.name}-{case}-{'x'.join(map(str, shape))}-{str(dtype)[6:]}")
    for op in BY_NAME.values()
    for dtype in DTYPES
    for case, shape in cases(op, dtype)
]
SMALL = Shape(5, 20, 16)


def inputs_of(dtype: torch.dtype, shape: Shape = SMALL, case: str = "three") -> dict:
    return ATTENTION.inputs(shape, dtype, DEVICE, case)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return integers, of which NaN equals itself."""
    return tensor.cpu().view({4: torch.int32, 2: torch.int16}[tensor.element_size()])


@pytest.mark.parametrize("op,case,shape,dtype", CASES)
def test_kernel_equals_the_definition(op, case, shape, dtype):
    assert_agrees(op, KERNELS[op.name], op.inputs(shape, dtype, DEVICE, case), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_appended_to_a_cache_is_equal_bit_for_bit_and_nothing_else_is_written(dtype):
    found, expected = inputs_of(dtype), inputs_of(dtype)
    KERNELS["decode_attention"](**found)
    ATTENTION.definition(**{name: each.cpu() if torch.is_tensor(each) else each for name, each in expected.items()})
    if DEVICE == "cpu":  # a device may add a product unrounded
        assert torch.equal(bits(found["responses"]), bits(expected["responses"]))
    assert torch.equal(bits(found["prompts"]), bits(expected["prompts"]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_with_nan_changes_no_other(dtype):
    clean, poisoned = inputs_of(dtype), inputs_of(dtype)
    for name in ("query", "key", "value"):
        poisoned[name][2] = torch.nan
    poisoned["responses"][:, :, 2] = torch.nan
    expected, found = (KERNELS["decode_attention"](**each) for each in (clean, poisoned))
    assert found[2].isnan().all()
    others = [0, 1, 3, 4]
    assert torch.equal(bits(found[others]), bits(expected[others]))
    assert torch.equal(bits(poisoned["responses"][:, :, others]), bits(clean["responses"][:, :, others]))


def test_a_row_s_result_does_not_depend_on_the_rows_beside_it_or_on_the_capacity():
    together = inputs_of(torch.bfloat16)
    expected = KERNELS["decode_attention"](**inputs_of(torch.bfloat16))
    for row in (0, 3):
        alone = {name: each[row : row + 1] for name, each in together.items() if name in (
            "query", "key", "value", "offset", "prompt_of", "prompt_length", "length")}  # fmt: skip
        wider = torch.nn.functional.pad(together["responses"][:, :, row : row + 1], (0, 0, 0, 9), value=torch.nan)
        found = KERNELS["decode_attention"](**together | alone | {"responses": wider})
        assert torch.equal(found[0], expected[row])


def test_a_repeated_call_gives_the_same():
    inputs = inputs_of(torch.bfloat16)
    first = KERNELS["decode_attention"](**inputs)
    stored = inputs["responses"].clone()
    assert torch.equal(KERNELS["decode_attention"](**inputs), first)
    assert torch.equal(bits(inputs["responses"]), bits(stored))


@pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Olmo2"])
def test_a_batch_has_the_tokens_of_torch_s_operations(family, monkeypatch):
    monkeypatch.setattr("hwgrpo.rollout.local.engine.describe_drift", lambda *_: None)
    model, sampling = model_of(family, num_hidden_layers=2), Sampling(2, 8, seed=2, temperature=0.7)
    expected = engine_of(model, max_sequences=4).generate(batch_of(), sampling)
    with selected(KERNELS) as calls:
        engine = engine_of(model, max_sequences=4)
        assert not any("kernels" in note for note in engine.notes)
        before = calls["decode_attention"]
        found = engine.generate(batch_of(), sampling)
        steps, left = divmod(calls["decode_attention"] - before, 2)
    assert (steps >= 7, left) == (True, 0), "the kernel attends in every layer of every step"
    assert calls["swiglu"] == calls["decode_attention"]
    assert found.tokens.tolist() == expected.tokens.tolist()


def test_in_half_precision_the_logits_are_those_of_the_models_own_forward():
    model = model_of("Qwen2").to(torch.bfloat16)
    with selected(KERNELS) as calls, torch.no_grad():
        assert check_lean_step(model, CPU, kernels=True) is None
    assert calls["decode_attention"] > 0
