"""A model or tokenizer given as an object: written once to a folder from which everything of the run loads it."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hwgrpo.errors import ConfigError, RunError
from hwgrpo.models.loading import check_keeps_all_parts
from hwgrpo.models.lora import has_adapters
from hwgrpo.models.placeholders import reads_images
from hwgrpo.models.saving import ORIGINAL_NAME, copy_processor, write_pretrained
from hwgrpo.models.vision import OTHER, vision_parameters
from hwgrpo.support.permissions import follow_umask
from hwgrpo.support.terminal_width import format_bytes
from hwgrpo.support.waits import Wait
from hwgrpo.training.checkpoint.checkpoint_files import discard

FOLDER = "objects"
"""Folder of a run with the objects that it was given."""
GENERATES = ("CausalLM", "LMHeadModel", "ConditionalGeneration")


def check_model(model: Any, *, trains_all: bool = True, train_vision: str = "none") -> None:
    """Check that an object is a model that a run can load from its files.

    Args:
        model: the object.
        trains_all: whether every parameter is trained, as without LoRA.
        train_vision: parts of a vision tower that are, `model.train_vision`.

    Raises:
        ConfigError: it is not; the message has the remedy.
    """
    kind = type(model).__name__
    if has_adapters(model) or getattr(model, "_hf_peft_config_loaded", False):
        raise ConfigError(
            f"model={kind} has adapters already: give the base model and set model.lora.rank, with model.lora.adapter "
            "for the folder of an adapter to continue; or give model.merge_and_unload()"
        )
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"model={kind} is no transformers PreTrainedModel; give the model itself, without a wrapper such as "
            "torch.compile or DistributedDataParallel"
        )
    if getattr(model, "is_quantized", False) or getattr(model, "hf_quantizer", None) is not None:
        raise ConfigError(
            f"model={kind} is quantized: give the unquantized model, and set model.quantize and model.lora.rank to "
            "train adapters on a quantized base"
        )
    if not kind.endswith(GENERATES):
        raise ConfigError(
            f"model={kind} is not a causal language model; GRPO needs a decoder with a language-model head, e.g. of "
            "AutoModelForCausalLM"
        )
    check_keeps_all_parts(f"model={kind}", model.config)
    untrained = {
        id(each) for part, _, each in vision_parameters(model) if part == OTHER or train_vision not in (part, "all")
    }
    parameters = ((name, each) for name, each in model.named_parameters() if id(each) not in untrained)
    frozen = next((name for name, each in parameters if not each.requires_grad), None)
    if trains_all and frozen is not None:
        raise ConfigError(
            f"model={kind} has requires_grad=False on {frozen}, which would be trained all the same: set "
            "model.lora.rank to train adapters, or call model.requires_grad_(True)"
        )
    missing = next((name for name, tensor in model.state_dict().items() if tensor.is_meta), None)
    if missing is not None:
        raise ConfigError(f"model={kind} has no weights for {missing}, which is on the meta device; load it in full")


def write_model(model: PreTrainedModel, output: Path, rank: int, timeout: float) -> tuple[Path, str | None]:
    """Write a model to `output/objects/model-HASH` on rank 0; the others wait for the folder.

    Args:
        model: a model that `check_model` accepts.
        output: the run's folder, which all ranks share.
        rank: this process's rank.
        timeout: seconds that the other ranks wait.

    Returns:
        The folder, and a note if this call wrote it.

    Raises:
        RunError: the folder cannot be written, or does not appear: this rank has another model than rank 0.
    """
    folder = output / FOLDER / f"model-{fingerprint(model)}"

    def write(partial: Path) -> None:
        write_pretrained(model, partial)
        if model.name_or_path:
            (partial / ORIGINAL_NAME).write_text(model.name_or_path, encoding="utf-8")
            if reads_images(model.config):
                copy_processor(model.name_or_path, partial)

    written = _place(folder, rank, timeout, write)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    note = f"the given {type(model).__name__} was written to {folder} ({format_bytes(size)}), which the run loads"
    return folder, note if written else None


def write_tokenizer(tokenizer: Any, output: Path, rank: int, timeout: float) -> tuple[Path, bool]:
    """Write a tokenizer to `output/objects/tokenizer-HASH`, as `write_model`; return whether this call wrote it, too.

    Raises:
        ConfigError: the object is no tokenizer.
        RunError: as `write_model`.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ConfigError(
            f"tokenizer={type(tokenizer).__name__} is no transformers tokenizer; of a processor, give its tokenizer"
        )
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory() as scratch:
        tokenizer.save_pretrained(scratch)
        for file in sorted(Path(scratch).rglob("*")):
            if file.is_file():
                digest.update(f"{file.relative_to(scratch)}\0".encode() + file.read_bytes())
    folder = output / FOLDER / f"tokenizer-{digest.hexdigest()[:12]}"
    return folder, _place(folder, rank, timeout, tokenizer.save_pretrained)


def write_adapter(model: Any, name: str, output: Path, rank: int, timeout: float) -> Path:
    """Write an adapter of a peft model to `output/objects/adapter-HASH`, as `write_model`; return the folder.

    Args:
        model: the peft model.
        name: the adapter's.
        output, rank, timeout: as of `write_model`.

    Raises:
        RunError: as `write_model`.
    """
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    tensors = get_peft_model_state_dict(model, adapter_name=name)
    tensors = {key: tensor.detach().cpu().contiguous() for key, tensor in sorted(tensors.items())}
    config = model.peft_config[name]
    digest = hashlib.sha256(json.dumps(config.to_dict(), sort_keys=True, default=_sorted_text).encode())
    for key, tensor in tensors.items():
        _add_tensor(digest, key, tensor)
    folder = output / FOLDER / f"adapter-{digest.hexdigest()[:12]}"

    def write(partial: Path) -> None:
        save_file(tensors, partial / "adapter_model.safetensors", metadata={"format": "pt"})
        config.save_pretrained(str(partial))

    _place(folder, rank, timeout, write)
    return folder


def fingerprint(model: PreTrainedModel) -> str:
    """Return 12 hexadecimal digits of the SHA-256 of a model's configuration and weights."""
    settings = model.config.to_diff_dict()
    for name in ("_name_or_path", "transformers_version"):
        settings.pop(name, None)
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode())
    for name, tensor in sorted(model.state_dict().items()):
        _add_tensor(digest, name, tensor)
    return digest.hexdigest()[:12]


def _add_tensor(digest: Any, name: str, tensor: torch.Tensor) -> None:
    """Add a tensor's name, dtype, shape and values to a digest."""
    digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\0".encode())
    digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def _sorted_text(value: Any) -> str:
    """Return a value of a configuration as text; a set in one order in every process."""
    return str(sorted(value)) if isinstance(value, set) else str(value)


@torch.no_grad()
def copy_weights(trained: PreTrainedModel, model: PreTrainedModel) -> None:
    """Copy the weights of a trained model to an object of the same model, in the object's dtypes and devices."""
    own = model.state_dict()
    for name, tensor in trained.state_dict().items():
        own[name].copy_(tensor)


def remove_unused(written: list[Path], made: list[Path]) -> None:
    """Remove what a failed start has written.

    Args:
        written: folders of objects.
        made: folders that it made to hold them, the innermost first; those with other files stay.
    """
    for folder in written:
        shutil.rmtree(folder, ignore_errors=True)
    for folder in made:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


def _place(folder: Path, rank: int, timeout: float, write: Any) -> bool:
    """Write a folder that appears complete or not at all; return whether this call wrote it."""
    if folder.is_dir():
        return False
    if rank:
        wait = Wait(f"rank 0 to write {folder}", timeout)
        while not folder.is_dir():
            if wait.over:
                raise RunError(f"{folder} was not written by rank 0: give every rank the same model and tokenizer")
            wait.pause(0.1)
        return False
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        discard(partial)
        partial.mkdir(parents=True)
        write(partial)
        follow_umask(partial)
        os.replace(partial, folder)
    except OSError as error:
        raise RunError(f"{folder} cannot be written: {error}; make room, or set another trainer.output_dir") from error
    return True
