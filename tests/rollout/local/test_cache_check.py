"""Models whose caches do not do what the local engine relies on: decoded another way, or refused."""

from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, RwkvConfig, RwkvForCausalLM

from hwgrpo.errors import ConfigError
from hwgrpo.models.tiny import character_tokenizer
from hwgrpo.rollout.local.engine import LocalEngine
from hwgrpo.values import Prompt, PromptBatch, Sampling
from tests.support.numbers.rounding import assert_values_close

TOKENIZER = character_tokenizer("")
PROMPTS = ((5, 6, 7, 8, 9), (10, 11), (12, 13), (14, 15, 16, 17, 18))


def engine_of(model: Any) -> LocalEngine:
    cpu = torch.device("cpu")
    return LocalEngine(model, TOKENIZER, device=cpu, compute_dtype=torch.float32, max_sequences=64)


def attention_model() -> Any:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(TOKENIZER), hidden_size=32, intermediate_size=48, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        )
    ).eval()  # fmt: skip


def test_a_model_that_lets_padding_in_decodes_prompts_of_one_length_at_a_time_and_right(monkeypatch):
    model = attention_model()
    assert engine_of(model).notes == ()
    forward = type(model).forward
    monkeypatch.setattr(
        type(model), "forward", lambda self, *words, attention_mask=None, **named: forward(self, *words, **named)
    )
    engine = engine_of(model)
    assert any("prompts of one length at a time" in note for note in engine.notes)
    batch = PromptBatch(tuple(Prompt(str(i), "", ids, None, {}) for i, ids in enumerate(PROMPTS)))
    found = engine.generate(batch, Sampling(2, 6, greedy=True))
    assert found.prompt_index.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    for row, prompt in enumerate(found.prompt_index.tolist()):
        here = slice(int(found.offsets[row]), int(found.offsets[row + 1]))
        response = found.tokens[here]
        with torch.no_grad():
            logits = model(input_ids=torch.cat([torch.tensor(PROMPTS[prompt]), response])[None], use_cache=False).logits
        logprobs = logits[0, -1 - len(response) : -1].log_softmax(-1)
        assert response.tolist() == logprobs.argmax(-1).tolist()
        assert_values_close(found.logprobs[here], logprobs.max(-1).values)


def test_a_model_that_neither_takes_nor_makes_a_cache_is_refused():
    torch.manual_seed(0)
    config = RwkvConfig(vocab_size=len(TOKENIZER), hidden_size=32, num_hidden_layers=2, attention_hidden_size=32)
    refused = r"rollout.engine='local' cannot sample from RwkvForCausalLM: .* \(TypeError: it returns no cache\)"
    with pytest.raises(ConfigError, match=refused):
        engine_of(RwkvForCausalLM(config).eval())


def test_a_model_that_fails_with_its_cache_is_refused_in_words(monkeypatch):
    model = attention_model()

    def fails(self, *words, **named):
        raise TypeError("no cache here\nand more")

    monkeypatch.setattr(type(model), "forward", fails)
    with pytest.raises(ConfigError, match=r"forward with a cache fails \(TypeError: no cache here\)"):
        engine_of(model)
