"""Branched attention against transformers' sdpa under the dense mask that says the same."""

import json
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hwgrpo_kernels.module_replacement.attention import IMPLEMENTATION, fusion_attention, replace_attention
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import AutoModelForCausalLM, BloomConfig, BloomForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from hwgrpo.models.shared_prefix_masks import (
    LEAST_COLUMNS,
    MOST_KEYS_IN_FP32,
    MOST_NARROW_KEYS,
    NAME,
    _is_narrow,
    _narrow_attention,
    additive,
    branched_attention,
    enable,
)
from hwgrpo.training.policy.layouts import BRANCHED, GROUPED_MASKED
from hwgrpo.training.policy.micro_batch import build_micro_batch
from tests.support.models.tiny import ragged_batch, tiny_llama, tiny_qwen3
from tests.support.numbers import npu_reference_ops
from tests.support.numbers.rounding import STEP, assert_values_close, bound

HEADS, KEY_HEADS, SIZE, VALUE_SIZE = 4, 2, 8, 6
MODULE: Any = SimpleNamespace(num_key_value_groups=HEADS // KEY_HEADS, is_causal=True, training=True)
ROWS = {
    "even": [[0, 1, 2], [3, 4, 5]],
    "rows with fewer responses": [[0, 1, 2], [3], [6, 8]],
    "one row": [[4, 5]],
}


ATTENDS = {
    "sdpa": (sdpa_attention_forward, torch.float64, VALUE_SIZE, bound(dtype=torch.float64)),
    "few keys": (sdpa_attention_forward, torch.float32, VALUE_SIZE, STEP),
    "a fused one": (fusion_attention, torch.float32, SIZE, STEP),
}
"""What attends, in which dtype, with values of which size, and how close it is to sdpa."""


@pytest.mark.parametrize("attend", ATTENDS.values(), ids=ATTENDS)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("window", [None, 2, 5, 100])
@pytest.mark.parametrize("empty", [False, True])
def test_outputs_and_gradients_are_those_under_a_dense_mask(rows, empty, window, attend):
    attend, dtype, value_size, close = attend
    batch = ragged_batch(prompts=3, n=3, empty=empty)
    nothing = {}
    micro, masked = (build_micro_batch(batch, rows, nothing, layout) for layout in (BRANCHED, GROUPED_MASKED))
    assert micro.attention_mask is None
    assert masked.branches is None
    assert micro.branches is not None
    assert masked.attention_mask is not None
    assert torch.equal(micro.input_ids, masked.input_ids)
    module: Any = SimpleNamespace(**vars(MODULE), config=SimpleNamespace(sliding_window=window))
    position = micro.position_ids
    near = position[:, :, None] - position[:, None, :] < (window or 1000)
    mask = masked.attention_mask & near[:, None]
    generator = torch.Generator().manual_seed(0)
    shape = micro.input_ids.shape
    query, key, value = inputs = [
        torch.randn(shape[0], heads, shape[1], size, generator=generator, dtype=dtype, requires_grad=True)
        for heads, size in ((HEADS, SIZE), (KEY_HEADS, SIZE), (KEY_HEADS, value_size))
    ]
    weight = torch.randn(shape.numel(), HEADS, value_size, generator=generator, dtype=dtype)
    weight[~_tokens(batch, rows, shape)] = 0  # what a padded position returns is nobody's business
    with npu_reference_ops.registered():
        found = branched_attention(
            module, query, key, value, None, branches=micro.branches, attend=attend, scaling=0.3, sliding_window=window
        )[0]
    expected = sdpa_attention_forward(MODULE, query, key, value, mask, scaling=0.3)[0]
    results = []
    for output in (found, expected):
        total = (output.flatten(0, 1) * weight).sum()
        results.append((output.flatten(0, 1)[weight.abs().sum((1, 2)) > 0], torch.autograd.grad(total, inputs)))
    assert_values_close(results[0][0], results[1][0], close)
    for ours, theirs in zip(results[0][1], results[1][1], strict=True):
        assert theirs.abs().max() > 0.1
        assert_values_close(ours, theirs, close)


def _tokens(batch, rows, shape) -> torch.Tensor:
    """[B * L] bool: where there is a token and no padding."""
    here = torch.zeros(shape, dtype=torch.bool)
    for b, row in enumerate(rows):
        prompt = int(batch.prompt_offsets.diff()[batch.prompt_index[row[0]]])
        here[b, : prompt + int((batch.lengths[row] - 1).clamp_min(0).sum())] = True
    return here.flatten()


@pytest.mark.parametrize("keys", [3, LEAST_COLUMNS, LEAST_COLUMNS + 5])
@pytest.mark.parametrize("scaling", [None, 0.3])
def test_attention_to_few_keys_is_that_of_sdpa(keys, scaling):
    generator = torch.Generator().manual_seed(keys)
    query, key, value = inputs = [
        torch.randn(2, HEADS, count, size, generator=generator, requires_grad=True)
        for count, size in ((4, SIZE), (keys, SIZE), (keys, VALUE_SIZE))
    ]
    mask = additive(torch.rand(2, 1, 4, keys, generator=generator) > 0.5, torch.float32)
    mask[..., 0] = 0  # every query sees a key
    ours = _narrow_attention(query, key, value, mask, scaling)
    theirs = sdpa(query, key, value, attn_mask=mask, scale=scaling).transpose(1, 2)
    assert_values_close(ours, theirs)
    weight = torch.randn(ours.shape, generator=generator)
    for found, expected in zip(
        torch.autograd.grad((ours * weight).sum(), inputs),
        torch.autograd.grad((theirs * weight).sum(), inputs),
        strict=True,
    ):
        assert_values_close(found, expected)


def test_few_keys_with_dropout_or_in_16_bits_are_left_to_sdpa():
    keys = torch.zeros(2, HEADS, MOST_NARROW_KEYS, SIZE)
    assert _is_narrow(keys, {"dropout": 0.0})
    assert not _is_narrow(keys, {"dropout": 0.1})
    assert not _is_narrow(keys.bfloat16(), {})
    assert not _is_narrow(torch.zeros(2, HEADS, MOST_NARROW_KEYS + 1, SIZE), {})


@pytest.mark.parametrize(("keys", "in_fp32"), [(MOST_KEYS_IN_FP32, True), (MOST_KEYS_IN_FP32 + 1, False)])
def test_attention_of_16_bits_to_many_keys_is_left_to_its_kernel(keys, in_fp32):
    generator = torch.Generator().manual_seed(keys)
    inputs = [torch.randn(1, heads, keys, SIZE, generator=generator) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    inputs = [each.bfloat16() for each in inputs]
    output, _ = branched_attention(MODULE, *inputs, None)
    assert torch.equal(output, sdpa_attention_forward(MODULE, *inputs, None)[0]) != in_fp32


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("branched", [False, True])
def test_in_16_bits_a_cpu_attends_to_few_keys_in_fp32_and_rounds_the_result_once(branched, autocast):
    micro = build_micro_batch(ragged_batch(), [[0, 1, 2]], {}, BRANCHED if branched else GROUPED_MASKED)
    length = micro.input_ids.shape[1]
    mask = None if micro.attention_mask is None else additive(micro.attention_mask, torch.bfloat16)
    inputs = [
        torch.randn(1, heads, length, SIZE).bfloat16().requires_grad_() for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]
    exact = [each.detach().float().requires_grad_() for each in inputs]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output, _ = branched_attention(MODULE, *inputs, mask, branches=micro.branches)
    expected, _ = branched_attention(MODULE, *exact, None if mask is None else mask.float(), branches=micro.branches)
    assert torch.equal(output, expected.bfloat16())
    weight = torch.randn(output.shape).bfloat16()
    found = torch.autograd.grad((output * weight).sum(), inputs)
    for ours, theirs in zip(found, torch.autograd.grad((expected * weight.float()).sum(), exact), strict=True):
        assert torch.equal(ours, theirs.bfloat16())


def test_a_layer_that_keeps_its_window_to_itself_is_refused():
    micro = build_micro_batch(ragged_batch(), [[0, 1, 2]], {}, BRANCHED)
    tensors = [torch.randn(1, heads, micro.input_ids.shape[1], SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    kinds = ["sliding_attention", "full_attention"]
    for layer, refused in ((0, True), (1, False)):
        config = SimpleNamespace(sliding_window=4, layer_types=kinds)
        module: Any = SimpleNamespace(**vars(MODULE), config=config, layer_idx=layer)
        with pytest.raises(ValueError, match="sliding window") if refused else nullcontext():
            branched_attention(module, *tensors, None, branches=micro.branches)


def test_a_full_layer_that_tells_a_window_all_the_same_sees_everything():
    micro = build_micro_batch(ragged_batch(), [[0, 1, 2]], {}, BRANCHED)
    query, key, value = (torch.randn(1, n, micro.input_ids.shape[1], SIZE) for n in (HEADS, KEY_HEADS, KEY_HEADS))
    config = SimpleNamespace(sliding_window=2, layer_types=["full_attention"])
    module: Any = SimpleNamespace(**vars(MODULE), config=config, layer_idx=0)
    found, expected = (
        branched_attention(module, query, key, value, None, branches=micro.branches, sliding_window=window)[0]
        for window in (2, None)
    )
    assert torch.equal(found, expected)


def test_without_branches_it_is_transformers_sdpa():
    query, key, value = (torch.randn(2, heads, 5, SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS))
    mask = torch.ones(2, 1, 5, 5, dtype=torch.bool).tril()
    several: tuple[dict[str, Any], ...] = ({}, {"scaling": 0.2})
    for options in several:
        for given in (None, mask):
            found = branched_attention(MODULE, query, key, value, given, **options)[0]
            assert torch.equal(found, sdpa_attention_forward(MODULE, query, key, value, given, **options)[0])


@pytest.mark.parametrize("make", [tiny_qwen3, tiny_llama])
def test_a_model_with_it_computes_and_saves_as_before(make, tmp_path):
    model = make().eval()
    ids = torch.arange(12).view(2, 6)
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, :2] = 0
    before = model(input_ids=ids, attention_mask=mask).logits
    enable(model)
    assert model.config._attn_implementation == NAME
    assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, before)
    model.save_pretrained(tmp_path)
    assert NAME not in json.dumps(json.loads((tmp_path / "config.json").read_text()))
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again(input_ids=ids, attention_mask=mask).logits, before)


def test_it_is_built_on_the_attention_that_the_model_has():
    model = tiny_qwen3().eval()
    ids = torch.arange(12).view(2, 6)
    before = model(input_ids=ids).logits
    undo = replace_attention(model)
    enable(model)
    assert model.config._attn_implementation == f"{NAME}_{IMPLEMENTATION}"
    enable(model)
    with npu_reference_ops.registered():
        assert_values_close(model(input_ids=ids).logits, before)
        assert npu_reference_ops.calls["npu_fusion_attention"] == model.config.num_hidden_layers
    undo()
    assert torch.equal(model(input_ids=ids).logits, before)


def test_an_architecture_that_does_not_let_its_attention_be_replaced_is_named():
    model = BloomForCausalLM(BloomConfig(vocab_size=16, hidden_size=32, n_layer=1, n_head=4))
    with pytest.raises(ValueError, match="BloomForCausalLM does not support replacing its attention"):
        enable(model)


def test_under_autocast_masks_and_what_is_moved_have_its_dtype():
    batch = ragged_batch(prompts=2, n=2)
    micro = build_micro_batch(batch, BRANCHED.rows(batch, range(4), 1000, 32), {}, BRANCHED)
    length = micro.input_ids.shape[1]
    query, key, value = (torch.randn(len(micro.input_ids), 2, length, 8) for _ in range(3))
    moved = []

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        moved.extend((query.dtype, key.dtype, value.dtype))
        return sdpa(query, key, value, attn_mask=mask).transpose(1, 2), None

    with torch.autocast("cpu", torch.bfloat16):
        branched_attention(MODULE, query, key, value, None, branches=micro.branches, attend=attend)
    assert set(moved) == {torch.bfloat16}
    assert micro.branches is not None
    assert {mask.dtype for masks in micro.branches._masks.values() for mask in masks if mask is not None} == {
        torch.bfloat16
    }
