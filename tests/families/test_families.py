"""Families people bring: a training step and a rollout of each against plain transformers."""

import copy
import re
from pathlib import Path

import hwgrpo_backends
import pytest
import torch
import transformers
from transformers import Gemma2Config, GptOssConfig, Qwen3Config

from hwgrpo.errors import ConfigError
from hwgrpo.rollout.local.architectures import describe_fallback, predict_fallback
from hwgrpo.rollout.local.engine import LocalEngine
from hwgrpo.training.policy.auto_settings import choose_attention, choose_layout
from hwgrpo.training.policy.layouts import PADDED
from hwgrpo.training.startup_checks import check_length
from tests.support.models.families import (
    FALLING_BACK,
    FAMILIES,
    ONE_LENGTH,
    SHAPE,
    TOKENIZER,
    config_class,
    measure,
    run_settings,
)
from tests.support.models.steps import CPU
from tests.support.models.tiny import settings
from tests.support.numbers.rounding import STEP


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
    assert not any("decoded one by one" in note for note in found.engine_notes)


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


@pytest.mark.parametrize("name", FALLING_BACK)
def test_in_padded_rows_a_step_and_a_rollout_are_those_of_plain_transformers_and_the_reason_is_named(name, tmp_path):
    _, layers = FALLING_BACK[name]
    found = measure(name, tmp_path)
    assert (found.layout, found.layouts, found.decode) == (PADDED, ("padded",), "model")
    assert re.search(rf"^layout padded .*: a \w+ model has layers .*{layers}", found.note or "")
    assert found.logprob < STEP * found.magnitude
    assert found.entropy < STEP * found.magnitude
    assert found.loss < STEP * found.magnitude
    assert found.gradient < STEP
    assert found.same_tokens
    assert found.rollout_logprob < STEP * found.magnitude
    reason, *others = found.engine_notes
    assert reason == (
        f"rollout decodes with the model's own forward: {name}ForCausalLM is not one of the supported architectures"
    )
    assert [note.split(":")[0] for note in others] == [
        "rollout decodes prompts of one length at a time" for _ in range(name in ONE_LENGTH)
    ]
    own = config_class(name)(**SHAPE | copy.deepcopy(FALLING_BACK[name][0]))
    assert describe_fallback(predict_fallback(own, 20) or "") == reason
    assert choose_layout(run_settings(Path("unused")), own, "sdpa") is PADDED


def test_a_rollout_that_outgrows_the_window_of_the_lean_step_is_named_before_it_does():
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**SHAPE | {"sliding_window": 16})).eval()
    for longest, expected in ((16, False), (17, True)):
        engine = LocalEngine(
            model, TOKENIZER, device=CPU, compute_dtype=torch.float32, max_sequences=8, longest=longest
        )
        assert any("its attention sees 16" in note for note in engine.notes) == expected
        assert (predict_fallback(model.config, longest) is not None) == expected


def test_rotary_embeddings_that_a_long_neighbour_changes_are_refused_beyond_their_length():
    factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    config = transformers.Phi3Config(
        **SHAPE | {"max_position_embeddings": 8192},
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **factors},
    )

    class Data:
        longest = 96

    check_length(
        settings("rollout.max_response_tokens=4000", "trainer.tokens_per_micro_batch=9000"), Data(), settings=config
    )
    longer = settings("rollout.max_response_tokens=4001", "trainer.tokens_per_micro_batch=9000")
    with pytest.raises(ConfigError, match=r"longrope.* has more than 4096; use at most 4000"):
        check_length(longer, Data(), settings=config)
