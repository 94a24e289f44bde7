"""Load a reward model to train: a sequence-classification model, or a language model's backbone with a new head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
)

from hwgrpo.errors import ConfigError
from hwgrpo.models.experts import set_experts_forward
from hwgrpo.models.loading import resolve_model_path, turn_dropout_off, unreadable
from hwgrpo.models.meta_device import META
from hwgrpo.models.stored_quantization import check_stored, finish_dequantization, loading_options
from hwgrpo.rewards.models.score_head import draw_head, is_classifier, missing_weights, without_load_report

if TYPE_CHECKING:
    from hwgrpo.config.schema import ModelConfig


def classifier_config(config: ModelConfig, pad_token_id: Any) -> PreTrainedConfig:
    """Read the configuration of `model.path` for a model with one score; no weights are loaded.

    Args:
        config: the run's `model` settings.
        pad_token_id: the tokenizer's, for a model whose configuration names none.

    Raises:
        ConfigError: the model cannot be found or read, has no sequence-classification form, several labels, or
            quantized weights that cannot be dequantized.
    """
    source = resolve_model_path(config.path)
    options: dict[str, Any] = {"revision": config.revision, "trust_remote_code": config.trust_remote_code}
    try:
        settings = AutoConfig.from_pretrained(source, **options)
    except (OSError, ValueError, ImportError) as error:
        raise unreadable("model.path", source, "model", error) from error
    remote = "AutoModelForSequenceClassification" in (getattr(settings, "auto_map", None) or {})
    if type(settings) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING and not (remote and config.trust_remote_code):
        raise ConfigError(
            f"model.path={config.path!r}: transformers has no sequence-classification model of type "
            f"{settings.model_type!r}, which a reward model is; use a model of another type, e.g. llama or qwen3"
        )
    if not is_classifier(settings):
        settings.num_labels = 1
    elif settings.num_labels != 1:
        raise ConfigError(
            f"model.path={config.path!r} is a classifier with {settings.num_labels} labels, and a reward model has one "
            "score: use a model with one label, or a language model, which gets a new head"
        )
    check_stored(config.path, settings)
    turn_dropout_off(settings)
    text = settings.get_text_config()
    if text.pad_token_id is None:  # a batch's scores are read at the last token that is not padding
        text.pad_token_id = pad_token_id
    return settings


def load_classifier(
    config: ModelConfig, settings: PreTrainedConfig, *, attention: str, seed: int, on_meta_device: bool = False
) -> Any:
    """Load the reward model of `model.path` in fp32 on the CPU, without dropout.

    A language model's backbone gets a new head (`draw_head`).

    Args:
        config: the run's `model` settings.
        settings: from `classifier_config`.
        attention: attention implementation by transformers' name.
        seed: of a new head.
        on_meta_device: create the model on the meta device, without reading weights.

    Raises:
        ConfigError: the model cannot be read, or lacks weights besides a new head.
    """
    source = resolve_model_path(config.path, weights=not on_meta_device)
    dequantizing = loading_options(settings)
    try:
        with without_load_report():
            loaded: Any = AutoModelForSequenceClassification.from_pretrained(
                source,
                config=settings,
                dtype=torch.float32,
                attn_implementation=attention,
                output_loading_info=True,
                revision=config.revision,
                trust_remote_code=config.trust_remote_code,
                device_map=META if on_meta_device else None,
                **dequantizing,
            )
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise unreadable("model.path", source, "model", error) from error
    model, report = loaded
    if dequantizing:
        finish_dequantization(model, torch.float32)
    head, missing = missing_weights(model, report, new_head=not is_classifier(settings))
    if missing:
        raise ConfigError(
            f"model.path={config.path!r} lacks {len(missing)} weights of {type(model).__name__}, e.g. {missing[0]}: "
            "they would be random. Use a complete copy of the model"
        )
    if not on_meta_device:
        draw_head(model, head, seed)
    set_experts_forward(model)
    if config.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.disable_input_require_grads()  # a hook that only reentrant checkpointing needs
    return model
