"""Startup checks of models that amplify rounding: measured on the model, so that faults alone are refused."""

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from hwgrpo.models.rounding import DRAWS, Excess, check_ids, embeddings_rounded_once, find_excess
from hwgrpo.rollout.local import architectures
from hwgrpo.rollout.local.architectures import ARCHITECTURES
from hwgrpo.rollout.local.decode_rows import check_cache
from hwgrpo.rollout.local.lean_step_check import check_lean_step
from hwgrpo.training.policy.layout_check import select_supported_layout
from hwgrpo.training.policy.layouts import GROUPED, GROUPED_MASKED
from hwgrpo.training.policy.policy_model import HeadOptions, PolicyModel
from tests.rollout.decoders import CPU, SHAPE
from tests.support.models.tiny import settings

BF16 = torch.bfloat16


@pytest.mark.parametrize("vocabulary", [1, 5, 37, 99, 32000, 49152, 151936])
def test_ids_are_ordinary_tokens_and_distinct_where_there_are_as_many(vocabulary):
    ids = check_ids(vocabulary, 23).tolist()
    assert all(0 <= each < vocabulary for each in ids)
    assert len(set(ids)) == min(23, vocabulary)
    if vocabulary > 1000:
        assert 0.2 * vocabulary < min(ids) < 0.35 * vocabulary
        assert 0.65 * vocabulary < max(ids) < 0.8 * vocabulary


def test_tokens_are_compared_at_the_rounding_of_their_own():
    expected = torch.tensor([[10.0, -4.0], [3.0, 2.0], [1.0, 5.0]])
    rounding = torch.tensor([0.2, 0.001, 0.001])
    amplified, other = expected.clone(), expected.clone()
    amplified[0, 1] += 5
    other[1, 1] += 5
    assert find_excess(amplified, expected, 1e-3, lambda: rounding) is None
    assert find_excess(other, expected, 1e-3, lambda: rounding) == Excess(0.5, pytest.approx(0.001))
    assert find_excess(other * torch.nan, expected, 1e-3, lambda: rounding) is not None


def test_rounding_is_not_measured_where_no_difference_exceeds_the_floor():
    expected = torch.tensor([[10.0, -4.0]])
    assert find_excess(expected + 0.009, expected, 1e-3, lambda: pytest.fail("measured")) is None


def amplifying() -> Any:
    """Return a random Llama whose 16 layers turn one rounding to bf16 into a tenth of the largest logit and more."""
    torch.manual_seed(3)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE | {"num_hidden_layers": 16}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "layers" in name:
                parameter.mul_(3)
    return model.eval()


def test_the_lean_step_of_a_model_that_amplifies_rounding_is_accepted_and_a_fault_is_not(monkeypatch):
    model = amplifying().to(BF16)
    with torch.no_grad():
        assert check_lean_step(model, CPU) is None
        name = "llama.modeling_llama.LlamaForCausalLM"
        monkeypatch.setitem(architectures.ARCHITECTURES, name, replace(ARCHITECTURES[name], norm_offset=1.0))
        assert "would differ" in (check_lean_step(model, CPU) or "")


def test_the_layout_of_a_model_that_amplifies_rounding_is_accepted_and_a_fault_is_not():
    policy: Any = PolicyModel(amplifying(), compute_dtype=BF16, options=HeadOptions())
    assert select_supported_layout(settings(), policy, GROUPED) == (GROUPED, None)
    hidden_states = policy.hidden_states
    policy.hidden_states = lambda micro: hidden_states(dataclasses.replace(micro, branches=None))
    layout, reason = select_supported_layout(settings(), policy, GROUPED)
    assert layout is GROUPED_MASKED
    assert "would differ" in (reason or "")


def test_the_cache_of_a_model_that_amplifies_rounding_is_accepted_and_a_fault_is_not(monkeypatch):
    model = amplifying().to(BF16)
    forward = type(model).forward

    def by_other_kernels(self: Any, *args: Any, use_cache: bool, **options: Any) -> Any:
        if not use_cache:
            return forward(self, *args, use_cache=use_cache, **options)
        with embeddings_rounded_once(model.get_input_embeddings(), BF16, seed=DRAWS):
            return forward(self, *args, use_cache=use_cache, **options)

    monkeypatch.setattr(type(model), "forward", by_other_kernels)
    with torch.no_grad():
        assert check_cache(model, CPU)
        monkeypatch.setattr(
            type(model),
            "forward",
            lambda self, *args, attention_mask=None, **options: by_other_kernels(self, *args, **options),
        )
        assert not check_cache(model, CPU)
