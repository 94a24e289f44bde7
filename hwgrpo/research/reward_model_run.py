"""Builds a run of `hwgrpo reward-model`: the parts of a supervised run, with a reward model and its examples."""

from __future__ import annotations

from typing import Any

from hwgrpo_backends.device import Device
from transformers import AutoModelForSequenceClassification

from hwgrpo.config import Config
from hwgrpo.errors import ConfigError
from hwgrpo.models.gguf import conversion_note
from hwgrpo.models.loading import check_vocabulary, load_tokenizer
from hwgrpo.models.lora import uses_lora
from hwgrpo.models.meta_device import non_parameter_tensors, set_non_parameter_tensors
from hwgrpo.models.saving import check_saving
from hwgrpo.models.sequence_classifier import classifier_config, load_classifier
from hwgrpo.models.stored_quantization import dequantization_note
from hwgrpo.models.to_device import move_to_device
from hwgrpo.research.reward_steps import reward_step, validate_scores
from hwgrpo.research.reward_update import RewardUpdate
from hwgrpo.research.score_model import ScoreModel
from hwgrpo.research.scored_examples import ScoredDataset, build_scored, longest_text
from hwgrpo.rewards.models.score_head import is_classifier
from hwgrpo.training.model_setup import Models
from hwgrpo.training.module_fusion import Fused
from hwgrpo.training.policy.auto_settings import choose_attention, choose_dtype, choose_strategy
from hwgrpo.training.policy.layouts import PADDED
from hwgrpo.training.policy.rank0_weights import Rank0Weights
from hwgrpo.training.shared_setup import choose_kernels
from hwgrpo.training.startup_checks import Prompts, make_without_weights
from hwgrpo.training.strategies.strategy import Strategy, raise_on_all_ranks
from hwgrpo.training.supervised.supervised_setup import Training

STRATEGIES = ("single", "ddp", "fsdp2")


def check_settings(config: Config) -> None:
    """Check that a reward model can be trained with these settings.

    Raises:
        ConfigError: one is not supported.
    """
    t, model = config.trainer, config.model
    strategy = choose_strategy(t.strategy)
    rules = (
        (f"trainer.strategy={strategy!r}", strategy in STRATEGIES, f"use {', '.join(STRATEGIES)} or auto"),
        (f"trainer.sequence_parallel_size={t.sequence_parallel_size}", t.sequence_parallel_size == 1, "set it to 1"),
        (f"trainer.tensor_parallel_size={t.tensor_parallel_size}", t.tensor_parallel_size == 1, "set it to 1"),
        (
            f"model.lora.rank={model.lora.rank}, model.lora.adapter={model.lora.adapter}",
            not uses_lora(model.lora),
            "all parameters are trained: set rank to 0 and adapter to null, and trainer.strategy=fsdp2 or "
            "optim.name=adamw_8bit to save memory",
        ),
        (f"model.router_loss_coef={model.router_loss_coef}", not model.router_loss_coef, "set it to 0"),
    )
    for setting, supported, remedy in rules:
        if not supported:
            raise ConfigError(f"{setting} is not supported by hwgrpo reward-model; {remedy}")


def open_scored(config: Config) -> Prompts:
    """Open the training and validation examples, with the tokenizer.

    Raises:
        ConfigError, DataError: as `classifier_config`, `check_saving` and `build_scored` do.
    """
    tokenizer = load_tokenizer(config.model)
    settings = classifier_config(config.model, tokenizer.pad_token_id)
    if config.trainer.save_final_model:
        check_saving(
            make_without_weights(config.model, settings, AutoModelForSequenceClassification), config.model, tokenizer
        )
    longest = longest_text(config, settings, tokenizer)
    training, validation = (build_scored(config, tokenizer, longest, which) for which in ("train", "validation"))
    assert training is not None
    return Prompts(tokenizer, training, validation)


def scored_notes(config: Config, data: Prompts, total_steps: int) -> list[str]:
    """Return notes on the examples: passes over them, long ones, and a validation that has no scores."""
    count, drawn = len(data.training), total_steps * config.trainer.prompts_per_step
    what = "pairs" if config.reward_model.loss == "bradley_terry" else "responses"
    notes = [
        f"{total_steps} steps of {config.trainer.prompts_per_step} {what}: {drawn / count:.2f} passes over {count:,}"
    ]
    for name, each in (("training", data.training), ("validation", data.validation)):
        if isinstance(each, ScoredDataset) and (each.filtered or each.truncated):
            notes.append(f"{name} {what} above the limit of tokens: {each.filtered} dropped, {each.truncated} cut")
    if data.validation is None and config.data.validation:
        notes.append(f"no validation loss: {config.data.validation} has no {what} with the columns of the training")
    return notes


def load_untrained(config: Config, attention: str = "sdpa", *, on_meta_device: bool = False) -> Any:
    """Load the untrained reward model into host memory, in fp32."""
    settings = classifier_config(config.model, load_tokenizer(config.model).pad_token_id)
    seed = config.trainer.seed
    return load_classifier(config.model, settings, attention=attention, seed=seed, on_meta_device=on_meta_device)


def build_score_model(config: Config, device: Device, strategy: Strategy, data: Prompts) -> tuple[Models, list[str]]:
    """Load the reward model, and wrap it by the strategy; return it, and notes.

    If the strategy shards it, only rank 0 reads it, into host memory.

    Raises:
        ConfigError: the model cannot be read, or does not support these settings.
    """
    choose_kernels(config.kernels, device.backend)
    settings = classifier_config(config.model, data.tokenizer.pad_token_id)
    dtype = choose_dtype(config.model.dtype, device)
    attention = choose_attention(config, device.backend, dtype, settings, device.arch)
    main = strategy.rank == 0 or not strategy.shards

    def load() -> Any:
        model = load_untrained(config, attention.loaded_as, on_meta_device=not main)
        check_vocabulary(model, data.tokenizer)
        return model

    model = raise_on_all_ranks(strategy, load)
    weights = None
    if strategy.shards:
        tensors = strategy.gather_objects(non_parameter_tensors(model) if main else None)[0]
        set_non_parameter_tensors(model, tensors, device.torch_device)
        weights = Rank0Weights(model, device.torch_device, strategy.rank)
    else:
        move_to_device(model, device.torch_device)
    policy: Any = ScoreModel(model, compute_dtype=dtype)
    trainable = sum(parameter.numel() for parameter in policy.parameters())
    strategy.wrap(policy, config, weights)
    fused = Fused(attention)
    head = "trained further" if is_classifier(settings) else f"new, drawn with trainer.seed={config.trainer.seed}"
    models = Models(
        policy=policy,
        reference=None,
        replica=None,
        trainable=trainable,
        frozen_dtype=None,
        fused=fused,
        layout=PADDED,
        layout_reason=None,
        attention_note=None,
    )
    dequantized = filter(None, (dequantization_note(settings), conversion_note(config.model.path)))
    return models, [
        *dequantized,
        fused.attention.line,
        f"reward_model.loss={config.reward_model.loss}; the head is {head}",
    ]


REWARD_MODEL = Training(
    "reward-model",
    open_scored,
    scored_notes,
    reward_step,
    validate_scores,
    build_score_model,
    RewardUpdate,
    load_untrained,
    check_settings,
)
"""The parts of `hwgrpo reward-model`."""
