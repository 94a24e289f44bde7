"""Write a trained model and its tokenizer to a folder in Hugging Face format."""

from __future__ import annotations

import copy
import errno
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME, logging

from hwgrpo.errors import ConfigError
from hwgrpo.models.final_dtype import cast_weights
from hwgrpo.models.loading import record_untied_head, resolve_model_path
from hwgrpo.models.lora import TRAINED_ADAPTER, has_adapters, without_weights
from hwgrpo.models.quantization import dequantize
from hwgrpo.models.stored_dtype import cached_folder
from hwgrpo.support.permissions import follow_umask

if TYPE_CHECKING:
    from peft import PeftModel

    from hwgrpo.config.schema import ModelConfig

ORIGINAL_NAME = "original_name.txt"
"""File of a model that was given as an object, with its name."""
PROCESSOR_FILES = "*processor_config.json"
COPIED_FILES = (
    "generation_config.json",
    PROCESSOR_FILES,
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "**/*.py",
)
"""Files of a model's folder, besides weights, config and tokenizer, that a processor, a sampler or its code needs."""


def save_model(
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: str | Path,
    merge: bool,
    max_shard_size: str | None = None,
    source: Path | None = None,
    dtype: str = "float32",
) -> None:
    """Write a model and its tokenizer in Hugging Face format.

    Args:
        model: the trained model; it is not modified.
        tokenizer: written to the same folder.
        folder: created if it is missing.
        merge: with LoRA, write the full model with the trained adapter merged in, instead of the adapter alone.
        max_shard_size: largest weight file of a full model, as transformers writes it ("5GB"); None: its default.
        source: folder of the base model, from which a full model gets its processor's files and code.
        dtype: of the written weights: float32, bfloat16, float16, or auto: that of each weight in `source`, and
            fp32 for an adapter.
    """
    folder = Path(folder)
    adapted = has_adapters(model)
    if adapted and not merge:
        with _original_base(model):
            model.save_pretrained(str(folder), selected_adapters=[TRAINED_ADAPTER])
        source = None
    else:
        sizes: dict[str, Any] = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
        full = _merged(_fp32_copy(model)) if adapted else model
        write_pretrained(full, folder, source, **sizes)
    tokenizer.save_pretrained(folder)
    if source is not None:
        _copy_missing_files(source, folder)
    cast_weights(folder, dtype, source, adapter=adapted and not merge)
    follow_umask(folder)


def write_pretrained(model: Any, folder: Path, source: Path | None = None, **options: Any) -> None:
    """Write a full model by transformers, with the generation configuration of its base model as it is.

    transformers loads a generation configuration whose values do not fit together (a temperature without `do_sample`),
    and refuses to write it.

    Args:
        model: a transformers model without adapters.
        folder: created if it is missing.
        source: folder of the base model.
        options: further arguments of `save_pretrained`.
    """
    own = getattr(model, "generation_config", None)
    record_untied_head(model)
    if own is not None:
        model.generation_config = GenerationConfig()
    try:
        model.save_pretrained(folder, **options)
    finally:
        if own is not None:
            model.generation_config = own
    file = folder / GENERATION_CONFIG_NAME
    if source is not None and (source / GENERATION_CONFIG_NAME).is_file():
        shutil.copyfile(source / GENERATION_CONFIG_NAME, file)
    elif own is not None and file.is_file():
        own.to_json_file(file, use_diff=True, keys_to_pop=["compile_config"])


def check_saving(model: Any, config: ModelConfig, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Merge the adapters of a model without weights, and write all that a trained model's folder has besides weights.

    So what would fail after the last step fails before the first.

    Args:
        model: the run's model on the meta device, which is used up; None: it cannot be made there.
        config: the run's `model` settings.
        tokenizer: the run's tokenizer; None: it is not here.

    Raises:
        ConfigError: the final model could not be written.
    """
    source = source_folder(config)
    try:
        scratch = tempfile.TemporaryDirectory(prefix="hwgrpo-saving-")
    except OSError:
        return  # no temporary files here, which says nothing on the folder of the final model
    try:
        with scratch as name:
            folder = Path(name)
            if model is not None:
                with without_weights():
                    full = _merged(model) if has_adapters(model) else model
                with _without_progress_bar():
                    write_pretrained(full, folder, source, state_dict={})
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            if source is not None:
                _copy_missing_files(source, folder)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return  # as above
        reason = str(error).strip() or type(error).__name__
        raise ConfigError(
            f"model.path={config.path!r}: the trained model could not be saved ({type(error).__name__}: {reason}); "
            "correct the named file of the model, or use another model"
        ) from error


@contextmanager
def _without_progress_bar() -> Iterator[None]:
    """Let transformers show no bar of no weights."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _merged(model: PeftModel) -> Any:
    """Return the base model with the trained adapter merged in; the model itself is used up."""
    return model.merge_and_unload(adapter_names=[TRAINED_ADAPTER])


@contextmanager
def _original_base(model: PeftModel) -> Iterator[None]:
    """Name the base model as it was given, where it was an object, which a run loads from a folder of its own."""
    base: Any = model.get_base_model()
    holders = (model.peft_config[TRAINED_ADAPTER], "base_model_name_or_path"), (base.config, "_name_or_path")
    holders = *holders, (base, "name_or_path")
    before = [getattr(*each) for each in holders]
    file = Path(before[0] or "") / ORIGINAL_NAME
    if file.is_file():
        for each in holders:
            setattr(*each, file.read_text(encoding="utf-8"))
    try:
        yield
    finally:
        for each, value in zip(holders, before, strict=True):
            setattr(*each, value)


def _fp32_copy(model: PeftModel) -> PeftModel:
    """Return a copy in host memory to merge adapters in: merging into the model itself would round its base."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(
            parameter.detach().to("cpu", torch.float32 if parameter.is_floating_point() else None, copy=True),
            requires_grad=False,
        )
        for parameter in model.parameters()
    }
    merged = copy.deepcopy(model, memo)
    dequantize(merged)
    return merged


def source_folder(config: ModelConfig) -> Path | None:
    """Return the folder of `model.path`, in the hub's cache for a hub name; None if it is missing."""
    try:
        path = resolve_model_path(config.path)
    except ConfigError:  # deleted since the run began, which is no reason to lose the trained model
        return None
    return cached_folder(path, config.revision)


def copy_processor(path: str, folder: Path) -> None:
    """Copy the settings of a model's image processor, of a folder or of the hub's cache, where they are there."""
    source = cached_folder(path, None)
    for file in sorted(source.glob(PROCESSOR_FILES)) if source is not None else ():
        shutil.copyfile(file, folder / file.name)


def _copy_missing_files(source: Path, folder: Path) -> None:
    """Copy the other files that loaders need, without overwriting any."""
    for pattern in COPIED_FILES:
        for file in sorted(source.glob(pattern)):
            target = folder / file.relative_to(source)
            if not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, target)
