"""Layers of the same input are one product; their parameters stay the model's own."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from hwgrpo.rollout.local.adapted_linear import Concatenated, Projection, read_joined
from hwgrpo.rollout.local.frozen_copy import copy_frozen, refresh
from hwgrpo.rollout.local.joined_weights import join
from hwgrpo.rollout.local.lean_step import LeanRows
from tests.rollout.decoders import CPU, EXTRA, PROMPTS, assert_equal, both_ways, model_of

SCHEDULE = ([0, 0, 1], (3, None))


def layers(*outputs: int, bias: bool = True, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(3)
    return [nn.Linear(12, each, bias=bias, dtype=dtype).requires_grad_(False) for each in outputs]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_outputs_are_those_of_the_layers_one_after_another(bias, dtype):
    query, key, value = parts = layers(8, 4, 6, bias=bias, dtype=dtype)
    hidden = torch.randn(5, 12, dtype=dtype)
    expected = torch.cat([part(hidden) for part in parts], dim=1)
    joined = read_joined(query, key, value)
    assert isinstance(joined, Projection)
    torch.testing.assert_close(joined(hidden), expected, rtol=0, atol=12 * torch.finfo(dtype).eps)
    assert torch.equal(torch.cat([part.weight for part in parts]), joined.weight)


def test_an_update_in_place_is_one_of_the_joined_weight_and_reading_again_moves_nothing():
    parts = layers(8, 4)
    joined: Any = read_joined(*parts)
    where = [part.weight.data_ptr() for part in parts]
    with torch.no_grad():
        parts[1].weight.mul_(2)
        parts[0].bias.add_(1)
    assert torch.equal(joined.weight[8:], parts[1].weight)
    assert torch.equal(joined.bias[:8], parts[0].bias)
    again: Any = read_joined(*parts)
    assert [part.weight.data_ptr() for part in parts] == where
    assert again.weight.data_ptr() == joined.weight.data_ptr()


def test_weights_are_saved_one_by_one_as_before(tmp_path):
    parts = nn.ModuleList(layers(8, 4))
    before = {name: value.clone() for name, value in parts.state_dict().items()}
    read_joined(*parts)
    save_file(parts.state_dict(), tmp_path / "model.safetensors")
    loaded = load_file(tmp_path / "model.safetensors")
    assert loaded.keys() == before.keys()
    assert all(torch.equal(loaded[name], before[name]) for name in before)


def flattened(parts: Any) -> None:
    """What a strategy does that keeps all parameters in one buffer, in its own order."""
    flat = torch.cat([part.weight.detach().flatten() for part in reversed(parts)])
    for part, each in zip(reversed(parts), flat.split([p.weight.numel() for p in reversed(parts)]), strict=True):
        part.weight.data = each.view_as(part.weight)


def in_shared_memory(parts: Any) -> None:
    for part in parts:
        part.weight.data.share_memory_()


def of_two_dtypes(parts: Any) -> None:
    parts[1].weight.data = parts[1].weight.data.double()


def with_one_bias(parts: Any) -> None:
    parts[1].bias = None


def trained(parts: Any) -> None:
    parts[0].weight.requires_grad_(True)


@pytest.mark.parametrize("change", [trained, flattened, in_shared_memory, of_two_dtypes, with_one_bias])
def test_weights_that_cannot_be_moved_stay_and_are_products_of_their_own(change):
    parts = layers(8, 4)
    change(parts)
    where = [part.weight.data_ptr() for part in parts]
    separate = read_joined(*parts)
    assert isinstance(separate, Concatenated)
    assert [part.weight.data_ptr() for part in parts] == where
    if change is not of_two_dtypes:
        hidden = torch.randn(5, 12)
        assert torch.equal(separate(hidden), torch.cat([part(hidden) for part in parts], dim=1))


def test_neighbours_in_another_order_are_not_taken_for_joined():
    weights: list[torch.Tensor] = [nn.Parameter(each) for each in torch.randn(6, 3).split([2, 4])]
    joined = join(weights)
    assert joined is not None
    assert torch.equal(joined, torch.cat(weights))
    assert join(weights[::-1]) is None
    assert join([weights[0], nn.Parameter(torch.randn(2, 3)[1:])]) is None


@pytest.mark.parametrize("family", EXTRA)
def test_the_copy_of_a_joined_model_is_its_own_and_refreshed(family):
    model = model_of(family).requires_grad_(False)
    LeanRows(model, CPU)
    copied = copy_frozen(model, torch.float32)
    model.requires_grad_(True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    assert not any(torch.equal(one, other) for one, other in zip(model.parameters(), copied.parameters()) if one.any())
    LeanRows(copied, CPU)
    refresh(model, copied)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), copied.parameters(), strict=True))
    assert_equal(both_ways(copied, PROMPTS, SCHEDULE))


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_a_layer_of_the_lean_step_has_four_products(family):
    rows: Any = LeanRows(model_of(family).requires_grad_(False), CPU)
    block: SimpleNamespace = rows._blocks[0]
    assert isinstance(block.query_key_value, Projection)
    assert isinstance(block.gate_up, Projection)
