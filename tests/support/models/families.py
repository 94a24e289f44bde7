"""Model families as tiny random models, and how far a step and a rollout are from plain transformers."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from hwgrpo.catalog import LAYOUTS
from hwgrpo.config import Config
from hwgrpo.errors import ConfigError
from hwgrpo.models.attention_implementations import reason_model_cannot_use
from hwgrpo.models.loading import load_model
from hwgrpo.models.tiny import character_tokenizer
from hwgrpo.rollout.local.engine import LocalEngine
from hwgrpo.training.policy.auto_settings import choose_layout, layout_note
from hwgrpo.training.policy.layout_check import select_supported_layout
from hwgrpo.training.policy.layouts import Layout
from hwgrpo.training.policy.micro_batch import build_micro_batch
from hwgrpo.training.update.policy_update import PolicyUpdate
from hwgrpo.values import Prompt, PromptBatch, Sampling, TrainBatch
from tests.support.models.steps import gradients, reference_gradients, updater
from tests.support.models.tiny import ragged_batch, settings
from tests.support.numbers.rounding import gaps

TOKENIZER = character_tokenizer("")
WINDOW = 4
"""Of families with a sliding window: shorter than most sequences of the batch, and than its longest prompt."""
TEMPERATURE = 0.8

SHAPE: dict[str, Any] = {
    "vocab_size": len(TOKENIZER),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
ALTERNATING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT: dict[str, Any] = EXPERTS | {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}


@dataclass(frozen=True)
class Family:
    """A family, and the attention, layout and decoding of its run."""

    layout: str
    """The one that auto selects."""
    decode: str
    """The path that decodes: lean or model."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Of the configuration."""
    says: str = ""
    """Part of a run's note about the layout."""
    layouts: tuple[str, ...] = ("grouped", "grouped_masked", "packed", "padded")
    """Those the model supports."""


WINDOWED = ("grouped", "packed", "padded")
"""Layouts of models with sliding windows: one mask over a row of several responses would not say all."""

FAMILIES: dict[str, Family] = {
    "Llama": Family("grouped", "lean"),
    "Qwen2": Family("grouped", "lean", {"vocab_size": len(TOKENIZER) + 5}),
    "Qwen3": Family("grouped", "lean", {"head_dim": 16, "tie_word_embeddings": True}),
    "Mistral": Family("grouped", "model", {"sliding_window": WINDOW}, layouts=WINDOWED),
    "Gemma": Family("grouped", "lean", {"head_dim": 16}),
    "Gemma2": Family(
        "padded",
        "model",
        {"head_dim": 16, "attn_logit_softcapping": 2.0, **ALTERNATING},
        says="sliding_window=4 is shorter than a sequence can be, and attention eager",
        layouts=("padded",),
    ),
    "Gemma3": Family("grouped", "model", {"head_dim": 16, **ALTERNATING}, layouts=WINDOWED),
    "Gemma4": Family(
        "grouped",
        "model",
        {
            "head_dim": 8,
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 16,  # its norm over 4 values would now and then divide by nearly zero
            "vocab_size_per_layer_input": len(TOKENIZER),
            **ALTERNATING,
        },
        layouts=WINDOWED,
    ),
    "Phi": Family("grouped", "model"),
    "Phi3": Family("grouped", "model", {"sliding_window": WINDOW}, layouts=WINDOWED),
    "Glm": Family("grouped", "model", {"head_dim": 8}),
    "Glm4": Family("grouped", "model", {"head_dim": 8}),
    "Granite": Family(
        "grouped",
        "lean",
        {
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
            "attention_multiplier": 0.3,
        },
    ),
    "Cohere": Family("grouped", "model", {"logit_scale": 0.25}),
    "Cohere2": Family("grouped", "model", {"logit_scale": 0.25, **ALTERNATING}, layouts=WINDOWED),
    "Olmo": Family("grouped", "model"),
    "Olmo2": Family("grouped", "lean"),
    "Olmo3": Family("grouped", "model", ALTERNATING, layouts=WINDOWED),
    "SmolLM3": Family("grouped", "model"),
    "StableLm": Family(
        "grouped_masked",
        "model",
        says="StableLmForCausalLM does not support the grouped layout",
        layouts=("grouped_masked", "packed", "padded"),
    ),
    "Mixtral": Family("grouped", "model", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "Qwen3Moe": Family("grouped", "model", {"num_experts": 4, "head_dim": 8, **EXPERTS}),
    "DeepseekV2": Family("grouped", "model", LATENT),
    "DeepseekV3": Family("grouped", "model", LATENT),
    "GptOss": Family(
        "padded",
        "model",
        {"num_local_experts": 4, "head_dim": 8, **EXPERTS, **ALTERNATING},
        says="sliding_window=4 is shorter than a sequence can be, and attention eager",
        layouts=("padded",),
    ),
}

MAMBA = {"mamba_d_state": 4, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_expand": 2}
MAMBA1 = {"state_size": 4, "time_step_rank": 4}
DELTA = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
FALLING_BACK: dict[str, tuple[dict[str, Any], str]] = {
    "FalconH1": (MAMBA | {"mamba_d_ssm": 64}, "hybrid"),
    "Lfm2": ({"layer_types": ["conv", "full_attention"]}, "conv"),
    "Qwen3Next": (DELTA | {"num_experts": 4, **EXPERTS, "shared_expert_intermediate_size": 16}, "linear_attention"),
    "Qwen3_5": (DELTA, "linear_attention"),
    "Jamba": ({"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "mamba_d_state": 4, "mamba_dt_rank": 4,
               "use_mamba_kernels": False}, "linear_attention"),
    "Bamba": (MAMBA | {"attn_layer_indices": [1]}, "linear_attention"),
    "Llama4": ({"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8, "intermediate_size_mlp": 48,
                "attention_chunk_size": WINDOW, "layer_types": ["chunked_attention", "full_attention"],
                "no_rope_layers": [1, 0]}, "chunked_attention"),
    "NemotronH": ({"layers_block_type": ["linear_attention", "full_attention", "mlp"], "ssm_state_size": 8,
                   "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1, "head_dim": 8}, "linear_attention"),
    "Zamba2": ({"layers_block_type": ["linear_attention", "hybrid"], "num_mem_blocks": 1, "hybrid_layer_ids": [1],
                "attention_hidden_size": 64, "attention_head_dim": 16, "mamba_expand": 2, "n_mamba_heads": 4,
                "mamba_headdim": 16, "mamba_d_state": 8, "mamba_ngroups": 1}, "linear_attention"),
    "OlmoHybrid": (DELTA, "linear_attention"),
    "GraniteMoeHybrid": (MAMBA | {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 4,
                         "num_experts_per_tok": 2, "shared_intermediate_size": 48}, "linear_attention"),
    "Qwen3_5Moe": (DELTA | {"num_experts": 4, **EXPERTS, "shared_expert_intermediate_size": 16}, "linear_attention"),
    "KimiLinear": (LATENT | {"layer_types": ["linear_attention", "full_attention"], "linear_num_heads": 4,
                             "linear_head_dim": 8}, "linear_attention"),
    "Lfm2Moe": ({"layer_types": ["conv", "full_attention"], "num_experts": 4, "num_dense_layers": 1, **EXPERTS},
                "conv"),
    "Zamba": ({"num_hidden_layers": 3, "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
               "attention_hidden_size": 64, "attention_head_dim": 16, "mamba_d_state": 4, "mamba_dt_rank": 4,
               "n_mamba_heads": 2, "use_mamba_kernels": False}, "linear_attention"),
    "Mamba": (MAMBA1, "linear_attention"),
    "Mamba2": ({"num_heads": 4, "head_dim": 16, "n_groups": 1, "state_size": 8}, "linear_attention"),
    "FalconMamba": (MAMBA1, "linear_attention"),
    "MiniMax": ({"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 4,
                 "num_experts_per_tok": 2, "head_dim": 8, "block_size": 8}, "linear_attention"),
}  # fmt: skip
"""Families that train in padded rows -> values of the configuration, and the layers that need it."""

ONE_LENGTH = ("Mamba", "FalconMamba", "MiniMax")
"""Those of which the local engine decodes prompts of one length at a time: padding changes their state."""


def config_class(name: str) -> Any:
    """Return transformers' class of the configuration of a family's language model."""
    return getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")


def make(name: str, folder: Path) -> Any:
    """Save a random model of a family to a folder and load it as a run does."""
    extra = FAMILIES[name].extra if name in FAMILIES else FALLING_BACK[name][0]
    torch.manual_seed(3)
    config = config_class(name)(**SHAPE | copy.deepcopy(extra))
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():  # norms and biases start as ones and zeros, which would hide that they are left out
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
        for key, parameter in model.named_parameters():
            if key.endswith("dt_bias"):  # time steps of 0.0025 are below the limits that some configurations have
                parameter.sub_(6)
    model.save_pretrained(folder)
    attention = next(name for name in ("sdpa", "eager") if reason_model_cannot_use(name, config) is None)
    return load_model(run_settings(folder).model, attention=attention)


def run_settings(folder: Path, *overrides: str) -> Config:
    """Return the configuration of a run with the model of a folder."""
    return settings(f"model.path={folder}", f"rollout.temperature={TEMPERATURE}", *overrides)


@dataclass(frozen=True)
class Differences:
    """How far a family is from plain transformers; all largest absolute differences, over the layouts tried."""

    architecture: str
    """Transformers' class."""
    layout: Layout
    """The one that auto selects."""
    layouts: tuple[str, ...]
    """Those the model supports, by name: a step was computed in each."""
    note: str | None
    """A run's note about the layout."""
    attention: str
    decode: str
    logprob: float
    """Trainer's log-probs against log-softmax over plain logits."""
    entropy: float
    loss: float
    gradient: float
    """Against fp64 autograd, as a share of the magnitude of what it sums."""
    same_tokens: bool
    """Greedy responses are those of `generate`."""
    rollout_logprob: float
    """Rollout's log-probs against plain logits."""
    engine_notes: tuple[str, ...]
    """Of the local engine."""
    magnitude: float
    """The largest log-prob among all tokens, without its sign: as large as logits are."""


def measure(name: str, folder: Path) -> Differences:
    """Compare a training step, in each layout that a family can have, and a rollout with plain transformers."""
    model = make(name, folder)
    reference = reference_of(model)
    batch = ragged_batch(prompts=3, n=3, old=True)
    attention = model.config._attn_implementation
    update = updater(model, f"rollout.temperature={TEMPERATURE}")
    expected_loss, expected_gradient = reference_gradients(reference, update.config, batch)
    expected_logprob, expected_entropy = plain_logprobs(reference, batch), plain_entropies(reference, batch)
    chosen, note = run_layout(update, folder, "auto", attention)
    tried = [layout for name in LAYOUTS.names() if (layout := possible_layout(update, folder, name, attention))]
    logprob = entropy = apart = gradient = 0.0
    assert chosen.name in [layout.name for layout in tried]
    for layout in tried:
        model.set_attn_implementation(attention)
        update.layout = replace(layout, dense_up_to=0)  # these rows are short
        loss, ours, _ = gradients(update, batch)
        logprob = max(logprob, float((update.score(batch) - expected_logprob).abs().max()))
        entropy = max(entropy, float((entropies(update, batch) - expected_entropy).abs().max()))
        apart = max(apart, abs(loss - expected_loss))
        gradient = max(gradient, largest_gap(ours, expected_gradient))
    model.set_attn_implementation(attention)
    decode, notes, same, rollout = rollout_differences(model, reference)
    return Differences(
        architecture=type(model).__name__,
        layout=chosen,
        layouts=tuple(layout.name for layout in tried),
        note=note,
        attention=attention,
        decode=decode,
        logprob=logprob,
        entropy=entropy,
        loss=apart,
        gradient=gradient,
        same_tokens=same,
        rollout_logprob=rollout,
        engine_notes=notes,
        magnitude=float(plain_distributions(reference, batch).abs().max()),
    )


def run_layout(update: PolicyUpdate, folder: Path, name: str, attention: str) -> tuple[Layout, str | None]:
    """Return the layout that a run with `model.layout=name` has, and its note; ConfigError if unsupported."""
    config, model = run_settings(folder, f"model.layout={name}"), update.policy.base
    model.set_attn_implementation(attention)
    layout, reason = select_supported_layout(config, update.policy, choose_layout(config, model.config, attention))
    return layout, layout_note(config, model.config, attention) or reason


def possible_layout(update: PolicyUpdate, folder: Path, name: str, attention: str) -> Layout | None:
    """Return the layout of that name, or None if the model does not support it and another one is used."""
    try:
        layout, _ = run_layout(update, folder, name, attention)
    except ConfigError:
        return None
    return layout if layout.name == name else None


def entropies(update: PolicyUpdate, batch: TrainBatch) -> torch.Tensor:
    """Return the entropy [R] of each response token's distribution, as a training step computes it."""
    found = torch.zeros(len(batch.tokens))
    for part in update._micro_batches(batch, range(len(batch))):
        micro = build_micro_batch(batch, part, {}, update.layout)
        found[micro.token_index] = update.policy(micro, lambda stats, rows: (-stats.logprob, {})).entropy_N
    return found


def reference_of(model: Any) -> Any:
    """Return a copy with transformers' own attention and loops over experts, which can compute in fp64."""
    reference = copy.deepcopy(model).eval()
    reference.set_attn_implementation("eager")
    if hasattr(reference.config, "_experts_implementation"):
        reference.config._experts_implementation = "eager"
    return reference


def plain_logprobs(model: Any, batch: TrainBatch) -> torch.Tensor:
    """Return the log-prob [R] of each response token from all logits."""
    return plain_distributions(model, batch).gather(1, batch.tokens[:, None])[:, 0]


def plain_entropies(model: Any, batch: TrainBatch) -> torch.Tensor:
    """Return the entropy [R] of each response token's distribution from all logits."""
    distributions = plain_distributions(model, batch)
    return -(distributions.exp() * distributions).sum(-1)


def plain_distributions(model: Any, batch: TrainBatch) -> torch.Tensor:
    """Return log-softmax [R, V] of the logits at a temperature, one sequence at a time."""
    rows = []
    for s, length in enumerate(batch.lengths.tolist()):
        p = int(batch.prompt_index[s])
        prompt = batch.prompt_tokens[batch.prompt_offsets[p] : batch.prompt_offsets[p + 1]]
        response = batch.tokens[batch.offsets[s] : batch.offsets[s + 1]]
        with torch.no_grad():
            logits = model(input_ids=torch.cat([prompt, response])[None]).logits[0, -1 - length : -1]
        rows.append((logits / TEMPERATURE).log_softmax(-1))
    return torch.cat(rows)


def rollout_differences(model: Any, reference: Any) -> tuple[str, tuple[str, ...], bool, float]:
    """Return decode path and notes of the engine, whether it samples as `generate`, and the difference of log-probs."""
    prompts = ((5, 6, 7, 8, 9, 10, 11), (12, 13, 14))
    batch = PromptBatch(tuple(Prompt(str(i), "", ids, None, {}) for i, ids in enumerate(prompts)))
    engine = LocalEngine(model, TOKENIZER, device=torch.device("cpu"), compute_dtype=torch.float32, max_sequences=64)
    found = engine.generate(batch, Sampling(2, 12, greedy=True))
    same, apart = len(found) == 4, 0.0
    for i in range(len(found)):
        prompt = torch.tensor(prompts[i // 2])[None]
        response = found.tokens[found.offsets[i] : found.offsets[i + 1]]
        with torch.no_grad():
            theirs = reference.generate(
                input_ids=prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=12,
                do_sample=False,
                eos_token_id=TOKENIZER.eos_token_id,
                pad_token_id=TOKENIZER.pad_token_id,
            )
            logits = reference(input_ids=torch.cat([prompt, response[None]], dim=1)).logits[0, -1 - len(response) : -1]
        same &= response.tolist() == theirs[0, prompt.shape[1] :].tolist()
        expected = logits.log_softmax(-1).gather(1, response[:, None])[:, 0]
        apart = max(apart, float((found.logprobs[found.offsets[i] : found.offsets[i + 1]] - expected).abs().max()))
    return engine.decode_path, engine.notes, same, apart


def largest_gap(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Return the largest difference by the magnitude of a gradient's summands; all parameters must be there."""
    expected = {name: gradient for name, gradient in theirs.items() if gradient is not None}
    assert expected.keys() <= ours.keys(), sorted(expected.keys() - ours.keys())
    rest = [float(ours[name].abs().max()) for name in ours.keys() - expected.keys()]
    assert not any(rest)
    return max(gaps({name: ours[name] for name in expected}, expected).values())
