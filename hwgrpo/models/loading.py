"""From settings to a model and a tokenizer, and from a trained model to a folder in Hugging Face format."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from hwgrpo.errors import ConfigError
from hwgrpo.models import builtin
from hwgrpo.models.meta_device import META
from hwgrpo.paths import did_you_mean, find_model

if TYPE_CHECKING:
    from hwgrpo.config.schema import ModelConfig


def load_tokenizer(config: ModelConfig, *, ask_hub: bool = True) -> PreTrainedTokenizerBase:
    """Load the tokenizer of `model.tokenizer`, else of `model.path`; padding falls back to end-of-sequence.

    Args:
        config: the run's `model` settings.
        ask_hub: False takes a hub name's from the hub's cache alone.

    Raises:
        ConfigError: it cannot be found or read, has no end-of-sequence token, or the chat template is missing.
    """
    key = "model.path" if config.tokenizer is None else "model.tokenizer"
    source = locate(config.path if config.tokenizer is None else config.tokenizer, key)
    revision = config.revision if config.tokenizer is None else None
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source, revision=revision, trust_remote_code=config.trust_remote_code, local_files_only=not ask_hub
        )
    except (OSError, ValueError) as error:
        if not ask_hub and not Path(source).is_dir():
            raise ConfigError(
                f"{key}={source!r}: its tokenizer is not in the hub's cache here, and a dry run does not ask the hub "
                f"for it; run `hf download {source}` where there is a network, or set model.tokenizer to a folder"
            ) from error
        raise _unreadable(key, source, "a tokenizer", error) from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"{key}={source!r}: the tokenizer has no end-of-sequence token, so no response would ever end; "
            "set eos_token in its tokenizer_config.json"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if config.chat_template is not None:
        template = Path(config.chat_template).expanduser()
        if not template.is_file():
            raise ConfigError(f"model.chat_template={config.chat_template!r}: there is no such file")
        tokenizer.chat_template = template.read_text(encoding="utf-8")
    return tokenizer


def model_settings(config: ModelConfig) -> PreTrainedConfig:
    """Read the configuration of `model.path`; no weights are loaded.

    Raises:
        ConfigError: it cannot be found or read, or is not a causal language model.
    """
    source = locate(config.path)
    try:
        settings = AutoConfig.from_pretrained(
            source, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    except (OSError, ValueError, ImportError) as error:
        raise _unreadable("model.path", source, "a model", error) from error
    _check_is_causal_lm(config, settings)
    return settings


def load_model(config: ModelConfig, *, attention: str, hollow: bool = False) -> PreTrainedModel:
    """Load the causal language model of `model.path` with fp32 parameters and no dropout, on the CPU.

    Args:
        config: the run's `model` settings.
        attention: attention implementation as transformers names it ("sdpa", "eager", ...).
        hollow: make the same model on the meta device: no weight is read, and no tensor in it has memory.

    Raises:
        ConfigError: it cannot be found or read, is not a causal language model, or lacks weights.
    """
    source = locate(config.path)
    settings = model_settings(config)
    _turn_dropout_off(settings)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source,
            config=settings,
            dtype=torch.float32,
            attn_implementation=attention,
            output_loading_info=True,
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
            device_map=META if hollow else None,
        )
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise _unreadable("model.path", source, "a model", error) from error
    model, report = loaded
    if report["missing_keys"]:
        missing = sorted(report["missing_keys"])
        raise ConfigError(
            f"model.path={config.path!r} lacks {len(missing)} weights of {type(model).__name__}, e.g. {missing[0]}: "
            "they would start at random. Is it a base model without a language-model head, or an incomplete copy?"
        )
    return model


def _turn_dropout_off(settings: PreTrainedConfig) -> None:
    """Set a model's own dropout rates to 0: responses are sampled without, so training on them must be without too."""
    for name, value in vars(settings).items():
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
            setattr(settings, name, 0.0)
    for name in settings.sub_configs:
        part = getattr(settings, name)
        if part is not None:
            _turn_dropout_off(part)


def check_vocabulary(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `ConfigError` when the tokenizer knows ids that the model has no embedding for."""
    table: Any = model.get_input_embeddings()
    check_embeddings(table.weight.shape[0], tokenizer)


def check_embeddings(embeddings: int | None, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise `ConfigError` when the tokenizer knows ids beyond a number of embeddings; None: it is not known."""
    largest = max(tokenizer.get_vocab().values())
    if embeddings is not None and largest >= embeddings:
        raise ConfigError(
            f"the tokenizer's largest id is {largest}, but the model has {embeddings} embeddings: "
            "model.tokenizer does not belong to model.path; leave it out to take the model's own"
        )


def locate(path: str, key: str = "model.path") -> str:
    """Return a local folder that holds a model or tokenizer, or a hub name."""
    if path.startswith(builtin.PREFIX):
        return str(builtin.resolve(path))
    return str(find_model(path, key) or path)


def _unreadable(key: str, source: str, what: str, error: Exception) -> ConfigError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if Path(source).is_dir():
        return ConfigError(f"{key}={source!r}: the folder does not hold {what} that can be read: {reason}")
    offline = [
        name for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE") if os.environ.get(name, "0") not in ("", "0")
    ]
    because = f" ({', '.join(offline)} is set)" if offline else ""
    return ConfigError(
        f"{key}={source!r} is not a folder here, and the hub did not give {what} of that name{because}: {reason} "
        f"Check the name; or download it where there is a network (`hf download {source} --local-dir FOLDER`) and set "
        f"{key}=FOLDER; or take builtin://tiny?task=sort, which needs no download."
        f"{did_you_mean(Path(source), Path.is_dir)}"
    )


def _check_is_causal_lm(config: ModelConfig, found: PreTrainedConfig) -> None:
    named = found.architectures or []
    remote = "AutoModelForCausalLM" in (getattr(found, "auto_map", None) or {}) and config.trust_remote_code
    known = remote or type(found) in MODEL_FOR_CAUSAL_LM_MAPPING
    # Configurations of encoders and of bare backbones are in the mapping too: what was saved decides.
    generates = not named or any(name.endswith(("CausalLM", "LMHeadModel", "ConditionalGeneration")) for name in named)
    if not known or not generates or getattr(found, "is_encoder_decoder", False):
        kind = ", ".join(named) or type(found).__name__
        raise ConfigError(
            f"model.path={config.path!r} is not a causal language model but {kind} (model type {found.model_type!r}); "
            "GRPO needs a decoder with a language-model head"
        )
