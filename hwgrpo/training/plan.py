"""What a run would do, worked out without loading weights: `hwgrpo train --dry-run`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from hwgrpo_backends import Backend
from hwgrpo_backends.device import Device
from transformers import AutoModelForCausalLM

from hwgrpo.config import Config
from hwgrpo.config.validate import planned_steps, prompts_per_update
from hwgrpo.data.prompts import build_dataset
from hwgrpo.models.loading import load_tokenizer, model_settings
from hwgrpo.models.lora import rank_of, uses_lora
from hwgrpo.models.router import check_router_loss
from hwgrpo.training.checkpoints import Checkpoint
from hwgrpo.training.choices import attention_of, choose_layout, micro_batch_tokens
from hwgrpo.training.components import build_rewards, check_length, choose_kernels
from hwgrpo.training.resume import already_finished, compare_data, find_checkpoint
from hwgrpo.training.trial import try_rewards


@dataclass(frozen=True)
class ModelShape:
    """Sizes that memory and work depend on."""

    architecture: str
    parameters: int
    trainable: int
    hidden: int
    layers: int
    vocab: int


def model_shape(config: Config) -> ModelShape:
    """Read a model's sizes from its configuration alone; its weights are not touched.

    With LoRA the trainable parameters are those of rank-r adapters on the linear layers named.
    """
    settings = model_settings(config.model)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(settings, trust_remote_code=config.model.trust_remote_code)
    total = sum(p.numel() for p in model.parameters())
    trainable = total
    lora = config.model.lora
    if uses_lora(lora):
        rank = rank_of(lora)
        head = model.get_output_embeddings()
        everywhere = list(lora.target_modules) == ["all-linear"]
        layers = [
            module
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear)
            and module is not head
            and (everywhere or any(name == t or name.endswith(f".{t}") for t in lora.target_modules))
        ]
        trainable = sum(rank * (layer.in_features + layer.out_features) for layer in layers)
    text = settings.get_text_config()
    return ModelShape(
        architecture=type(model).__name__,
        parameters=total,
        trainable=trainable,
        hidden=text.hidden_size,
        layers=text.num_hidden_layers,
        vocab=text.vocab_size,
    )


def state_bytes(config: Config, shape: ModelShape) -> dict[str, int]:
    """Return the bytes per device that do not depend on the batch.

    fp32 parameters, fp32 gradients and AdamW's two moments of the trainable ones, and the frozen reference where a KL
    term needs a copy.
    """
    parts = {
        "parameters (fp32)": 4 * shape.parameters,
        "gradients (fp32)": 4 * shape.trainable,
        "AdamW moments": 8 * shape.trainable,
    }
    if config.algorithm.kl.coef and not uses_lora(config.model.lora):
        parts["reference model"] = 4 * shape.parameters
    return parts


def make_plan(config: Config, backend: Backend, world_size: int) -> str:
    """Check what can be checked without loading the model, and describe the run.

    Opens the data, the tokenizer and the model's configuration, and tries the reward functions on one row.

    Raises:
        ConfigError, DataError: naming what is wrong.
    """
    t = config.trainer
    tokenizer = load_tokenizer(config.model)
    training, validation = (build_dataset(config.data, tokenizer, which) for which in ("train", "validation"))
    assert training is not None
    rewards = build_rewards(config, training, validation)
    tried = try_rewards(rewards, training, tokenizer)
    check_length(config, training, validation)
    choose_kernels(config, backend)
    check_router_loss(config.model.router_loss_coef, model_settings(config.model))
    device = Device(backend)
    layout = choose_layout(config, model_settings(config.model), attention_of(config, device))
    checkpoint, notes = find_checkpoint(config, Path(t.output_dir))
    notes += compare_data(checkpoint, train=training, validation=validation)
    shape = model_shape(config)
    steps = planned_steps(config, len(training))
    finished = already_finished(config, len(training))
    updates = t.prompts_per_step // prompts_per_update(config) * t.epochs_per_batch
    sequences = t.prompts_per_step * config.rollout.n
    most = sequences * (training.longest + config.rollout.max_response_tokens)
    memory = state_bytes(config, shape)
    state = finished.splitlines() if finished else [f"{t.output_dir}, {_start(checkpoint)}", *notes]
    lines = [
        ("backend", f"{backend.name}, {_counted(world_size, 'process', 'processes')}"),
        ("model", f"{config.model.path}: {shape.architecture}, {shape.layers} layers, hidden {shape.hidden}"),
        ("", f"{shape.parameters:,} parameters, {shape.trainable:,} trainable, vocabulary {shape.vocab:,}"),
        ("data", f"{training.name}: {len(training):,} prompts, longest {training.longest} tokens"),
        ("", f"{training.filtered} dropped and {training.truncated} cut at {config.data.max_prompt_tokens} tokens"),
        ("validation", f"{validation.name}: {len(validation):,} prompts" if validation else "none"),
        *_item("rewards", tried),
        (
            "schedule",
            f"{steps} steps of {t.prompts_per_step} prompts x {config.rollout.n} samples, "
            f"{_counted(updates, 'update', 'updates')} each",
        ),
        ("", f"at most {most:,} tokens a step, {micro_batch_tokens(config, device.torch_device):,} per micro-batch"),
        ("memory", f"{_size(sum(memory.values()))} per device before activations and the key-value cache:"),
        *_item("", [f"{_size(size)} {part}" for part, size in memory.items()]),
        ("layout", layout.name),
        *_item("output", state),
    ]
    return "\n".join(f"{name:<11}{text}" for name, text in lines)


def _item(name: str, texts: Sequence[str]) -> list[tuple[str, str]]:
    """Return an item of the plan that may take several lines; only the first has its name."""
    return [(name if number == 0 else "", text) for number, text in enumerate(texts)]


def _start(checkpoint: Checkpoint | None) -> str:
    return f"continuing after step {checkpoint.step}" if checkpoint else "a fresh run"


def _size(count: int) -> str:
    """Return bytes as people read them."""
    return f"{count / 2**30:.2f} GiB" if count >= 2**29 else f"{count / 2**20:.1f} MiB"


def _counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"
