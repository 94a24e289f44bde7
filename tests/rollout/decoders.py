"""Tiny random models of the architectures that the lean step knows, and ways to decode them."""

import copy
from typing import Any

import numpy as np
import torch
import transformers

from hwgrpo.models.tiny import character_tokenizer
from hwgrpo.rollout.counter_rng import stream_keys, uniforms
from hwgrpo.rollout.local.decode_rows import ModelRows, Rows
from hwgrpo.rollout.local.decoding import Decoder
from hwgrpo.rollout.local.engine import LocalEngine
from hwgrpo.rollout.local.lean_step import LeanRows
from hwgrpo.rollout.local.token_sampling import draw
from hwgrpo.rollout.stopping import StopDetector
from hwgrpo.values import Prompt, PromptBatch, Sampling
from tests.support.numbers.rounding import assert_values_close

CPU = torch.device("cpu")
TOKENIZER = character_tokenizer("")
SHAPE: dict[str, Any] = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
EXTRA: dict[str, dict[str, Any]] = {
    "Llama": {"attention_bias": True, "mlp_bias": True, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "Mistral": {"sliding_window": 128},
    "Qwen2": {},
    "Qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "Granite": {
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "logits_scaling": 2.0,
        "attention_multiplier": 0.3,
    },
    "Gemma": {"head_dim": 8},
    "Olmo2": {},
}
PROMPTS = ([5, 6, 7, 8, 9, 10, 11], [12, 13], [14, 15, 16, 17])


def model_of(family: str, **extra: Any) -> Any:
    torch.manual_seed(3)
    config = getattr(transformers, f"{family}Config")(**SHAPE | copy.deepcopy(EXTRA[family]) | extra)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():  # norms and biases start as ones and zeros, which would hide that they are left out
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def engine_of(model, **options) -> LocalEngine:
    return LocalEngine(
        model, TOKENIZER, **{"device": CPU, "compute_dtype": torch.float32, "max_sequences": 64} | options
    )


def batch_of(prompts=PROMPTS) -> PromptBatch:
    return PromptBatch(tuple(Prompt(str(i), "", tuple(ids), None, {}) for i, ids in enumerate(prompts)))


def alone(model, prompt: tuple[int, ...], uid: str, sample: int, sampling: Sampling) -> dict[str, Any]:
    """Return a response by full forward passes of its own sequence, token by token."""
    watch = StopDetector(TOKENIZER, [*sampling.stop_token_ids, TOKENIZER.eos_token_id], sampling.stop)
    key = stream_keys(sampling.seed, [uid], [sample])
    found: dict[str, Any] = {"tokens": [], "logprobs": [], "floors": [], "finished": False}
    with torch.no_grad():
        while len(found["tokens"]) < sampling.max_response_tokens and not found["finished"]:
            logits = model(input_ids=torch.tensor([[*prompt, *found["tokens"]]]), use_cache=False).logits[:, -1]
            filters = {name: getattr(sampling, name) for name in ("temperature", "top_k", "top_p", "min_p")}
            uniform = None if sampling.greedy else uniforms(key, len(found["tokens"]), 1)[:, 0]
            drawn = draw(logits, uniform, **filters)
            found["tokens"].append(int(drawn.tokens))
            found["logprobs"].append(float(drawn.logprobs))
            found["floors"].append(-np.inf if drawn.floors is None else float(drawn.floors))
            found["finished"] = bool(watch.ended(np.zeros(1, np.int64), drawn.tokens.numpy())[0])
    found["text"] = watch.text(found["tokens"], found["finished"])
    return found


def lean_rows(model) -> Rows:
    return LeanRows(model, CPU)


def sync_every(steps: int, monkeypatch) -> None:
    """Have engines read the drawn tokens after so many steps, as on an accelerator."""
    monkeypatch.setattr(
        "hwgrpo.rollout.local.engine.Decoder",
        lambda *arguments, **more: Decoder(*arguments, **more | {"sync_every": steps}),
    )


def begin(rows: Any, prompts, prompt_of, longest: int = 20) -> torch.Tensor:
    """Start responses to some prompts, of so many tokens at most; return the logits after all prompts."""
    numbers, logits = rows.prefill(prompts)
    rows.arrange(~np.array(numbers)[np.array(prompt_of)], np.full(len(prompt_of), longest))
    return logits


def keep(rows: Any, kept, longest: int = 20) -> None:
    """Keep some responses, which may have so many more tokens at most."""
    rows.arrange(np.array(kept), np.full(len(kept), longest))


def both_ways(model, prompts, schedule, longest: int = 200, make=lean_rows) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Feed the same tokens to the model's rows and to those of `make`, and return pairs of logits.

    `schedule` is prompt_of, then pairs of steps to take and rows to keep.
    """
    prompt_of, *rest = schedule
    pairs = []
    with torch.no_grad():
        kinds = (ModelRows(model, CPU), make(model))
        pairs.append(tuple(begin(rows, prompts, prompt_of, longest).clone() for rows in kinds))
        count = len(prompt_of)
        for steps, kept in rest:
            longest -= steps
            for step in range(steps):
                token = (torch.arange(count) * 7 + step) % len(TOKENIZER)
                pairs.append(tuple(rows.step(token).clone() for rows in kinds))
            if kept is not None:
                for rows in kinds:
                    keep(rows, kept, longest)
                count = len(kept)
    return pairs


def assert_equal(pairs) -> None:
    for expected, found in pairs:
        assert_values_close(found, expected)
