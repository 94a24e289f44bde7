"""Families people bring: a training step and a rollout of each against plain transformers."""

import hwgrpo_backends
import pytest
import torch
from families import FAMILIES, measure
from rounding import STEP
from tiny import settings
from transformers import Gemma2Config, GptOssConfig, Qwen3Config

from hwgrpo.errors import ConfigError
from hwgrpo.training.choices import choose_attention


@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_and_a_rollout_are_those_of_plain_transformers(name, tmp_path):
    expected, found = FAMILIES[name], measure(name, tmp_path)
    assert (found.layout.name, found.decode) == (expected.layout, expected.decode)
    assert expected.says in (found.note or "")
    assert (found.note is None) == (not expected.says)
    assert sorted(found.layouts) == sorted(expected.layouts)
    assert found.logprob < STEP * found.magnitude
    assert found.entropy < STEP * found.magnitude
    assert found.loss < STEP * found.magnitude
    assert found.gradient < STEP
    assert found.same_tokens
    assert found.rollout_logprob < STEP * found.magnitude


@pytest.mark.parametrize(
    ("model", "chosen", "why"),
    [
        (Qwen3Config(), "sdpa", None),
        (Gemma2Config(), "eager", "soft-caps attention scores"),
        (Gemma2Config(attn_logit_softcapping=None), "sdpa", None),
        (GptOssConfig(), "eager", "GptOssForCausalLM has attention that sdpa cannot compute"),
    ],
    ids=["plain", "soft-capped", "without its soft-cap", "sinks"],
)
def test_attention_that_would_not_compute_what_the_model_defines_is_not_chosen(model, chosen, why):
    backend = hwgrpo_backends.get("cpu")
    assert choose_attention(settings(), backend, torch.float32, model).name == chosen
    if why is None:
        assert choose_attention(settings("model.attention=sdpa"), backend, torch.float32, model).name == "sdpa"
    else:
        with pytest.raises(ConfigError, match=f"model.attention='sdpa': .*{why}.*; use model.attention=eager"):
            choose_attention(settings("model.attention=sdpa"), backend, torch.float32, model)
