"""The plan of a run, made without loading weights: `--dry-run` of the training commands.

A device, data or tokenizer that this machine lacks is reported next to the plan, which is made without it. A mistake in
the settings, in existing data or in a reward function is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import chdir
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from hwgrpo_backends import Backend
from hwgrpo_backends.device import Device
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from hwgrpo.config import Config
from hwgrpo.config.derived import planned_steps, prompts_per_update, ranks_per_sequence
from hwgrpo.config.named_files import with_absolute_paths
from hwgrpo.config.schema import DataConfig, ModelConfig, RolloutConfig
from hwgrpo.config.validate import missing_loggers
from hwgrpo.data.missing_data import missing_data
from hwgrpo.data.prompts import PromptDataset, dataset_notes, repeats_note
from hwgrpo.data.sources import sources_of
from hwgrpo.errors import ConfigError
from hwgrpo.models.loading import load_tokenizer
from hwgrpo.models.lora import uses_lora
from hwgrpo.planning.memory import Memory, Work, estimate
from hwgrpo.planning.model_shape import ModelShape, model_shape, planned_settings
from hwgrpo.planning.planned_sharding import replicated_strategy, sharding_of
from hwgrpo.planning.reward_model_memory import uncounted_reward_models
from hwgrpo.planning.reward_probe import try_rewards
from hwgrpo.rollout.engine_kind import engine_kind
from hwgrpo.rollout.local.architectures import describe_fallback, predict_fallback
from hwgrpo.rollout.server.weight_transfer import count_host_copies
from hwgrpo.rollout.shared_devices import shares_device, sleeps
from hwgrpo.support.terminal_width import format_bytes
from hwgrpo.support.text import terminal_line
from hwgrpo.training.checkpoint.restore import Checkpoint
from hwgrpo.training.end_of_turn import end_of_turn_note
from hwgrpo.training.online_rewards import final_folders
from hwgrpo.training.policy.auto_settings import micro_batch_tokens
from hwgrpo.training.policy.layouts import Layout
from hwgrpo.training.resume import (
    already_finished,
    compare_data,
    find_checkpoint,
    reason_against_saving,
    template_date,
)
from hwgrpo.training.run_folder import reason_against_folder
from hwgrpo.training.startup_checks import Data, Prompts, check_start, missing_requirements, open_data

if TYPE_CHECKING:
    from hwgrpo.training.supervised.supervised_setup import Training
from hwgrpo.training.text_notes import text_notes


@dataclass(frozen=True)
class Plan:
    """The plan of a run, and why this machine cannot run it now."""

    text: str
    problems: tuple[str, ...]


def make_plan(
    config: Config,
    backend: Backend,
    world_size: int,
    *,
    no_device: str | None = None,
    chip: str | None = None,
    allow_finished: bool = False,
    strategy_notes: Sequence[str] = (),
    rollout_notes: Sequence[str] = (),
) -> Plan:
    """Check what can be checked without loading the model, and describe the run.

    Opens the data, the tokenizer and the model's configuration, and tests the reward functions on one row. A hub model
    whose shape ships with hwgrpo is not looked up.

    Args:
        config: checked settings; the data may be missing.
        backend: device family of the planned run.
        world_size: processes of the run.
        no_device: why the plan is not of this machine's device; the device's properties are then assumed.
        chip: name of the chip that stands for it; None: none does.
        allow_finished: a finished run of other settings is not an error.
        strategy_notes: why `trainer.strategy=auto` is this strategy.
        rollout_notes: why the engine has this share of the memory.

    Raises:
        ConfigError, DataError: with the wrong value.
    """
    t = config.trainer
    problems = [no_device] if no_device else []
    settings, shipped = planned_settings(config.model)
    device = Device(backend) if no_device is None else None
    if device is not None:
        in_the_way = reason_against_folder(Path(t.output_dir), final_folders(config.reward))
        problems += filter(None, (*missing_requirements(config, device), in_the_way))
    checkpoint, notes = find_checkpoint(config, Path(t.output_dir))
    dated = replace(config, data=replace(config.data, template_date=template_date(config, checkpoint)))
    missing = missing_data(config)
    problems += (*missing_loggers(config), *missing)
    if missing:
        data, tried = None, ("not tried: that needs the data",)
    else:
        data, tried = _open_data(dated, problems, settings, from_hub=shipped is not None)
    training, validation = (data.training, data.validation) if data else (None, None)
    start = check_start(config, backend, settings, device=device, data=data, resumes=checkpoint is not None)
    end_of_turn = data and end_of_turn_note(
        config, settings, data.tokenizer, training, validation, ask_hub=shipped is None
    )
    dtype, attention, layout = start.dtype, start.attention, start.layout
    notes += compare_data(checkpoint, train=training, validation=validation)
    shape = model_shape(config.model, settings)
    work = planned_work(
        config,
        backend,
        world_size,
        dtype,
        layout,
        prompt_tokens=training.longest if training else config.data.max_prompt_tokens,
        images=_images(config, shape, training, validation),
        known_prompts=sum(each.prompts_with_images for each in (training, validation) if each) if training else None,
    )
    budget = work.micro_batch_tokens
    sharding = sharding_of(config.trainer, world_size)
    memory = estimate(config, shape, work, sharding)
    padding = sharding.padding_note(shape.sharded_units)
    computes = f"{str(dtype).removeprefix('torch.')}, {attention.name} attention, {layout.name} layout"
    finished = None
    if training is not None or (t.max_steps and not missing):
        finished = already_finished(config, open_data=lambda _: training, allow_changes=allow_finished)
    if device is not None and finished is None:
        problems += filter(None, (reason_against_saving(config, Path(t.output_dir)),))
    lines = [
        ("backend", _backend_line(backend, world_size, no_device, chip)),
        *_item("strategy", [t.strategy if t.strategy != "auto" else replicated_strategy(world_size), *strategy_notes]),
        ("model", f"{config.model.path}: {shape.architecture}, {shape.layers} layers, hidden {shape.hidden}"),
        ("", f"{shape.parameters:,} parameters, {shape.trainable:,} trainable, vocabulary {shape.vocab:,}"),
        *([("", _vision_line(config, shape))] if shape.vision_parameters else []),
        *([("", f"shape from {shipped.parent.name}/{shipped.name}, not from the hub")] if shipped else []),
        *_item("", start.notes),
        *_item("data", [*_data_lines(config.data, training, validation), *filter(None, (end_of_turn,))]),
        *_item("rewards", tried),
        *_item("schedule", _schedule(config, training, budget)),
        *_item(
            "memory",
            [
                *_memory_lines(memory),
                *([] if training else image_notes(config, work)),
                *uncounted_reward_models(config.reward, config.model),
                *filter(None, (padding,)),
                *rollout_notes,
            ],
        ),
        *_item("computes", (computes, *_fall_backs(config.data, config.rollout, settings, start.layout_note))),
        *_item("output", _output_lines(t.output_dir, checkpoint, notes, finished)),
    ]
    return Plan(_text(lines), tuple(problems))


def _vision_line(config: Config, shape: ModelShape) -> str:
    lora, model = uses_lora(config.model.lora), config.model
    key, part = ("model.lora.vision", model.lora.vision) if lora else ("model.train_vision", model.train_vision)
    trains = {"none": "neither is", "projector": "the projector is", "all": "both are"}[part]
    other = f"; {shape.other_parameters:,} are of neither images nor text and never trained"
    return (
        f"{shape.vision_parameters:,} parameters are of its tower and projector of images; {trains} trained ({key})"
        f"{other if shape.other_parameters else ''}"
    )


def _images(
    config: Config, shape: ModelShape, training: PromptDataset | None, validation: PromptDataset | None
) -> tuple[int, ...]:
    """Return the tokens of each image of the prompt whose images have the most; assumed where there are no data."""
    if training is None:
        return assumed_images(config, shape)
    return max(training.image_tokens, validation.image_tokens if validation else (), key=sum)


def assumed_images(config: Config, shape: ModelShape) -> tuple[int, ...]:
    """Return the tokens of the image that each prompt is assumed to have: as many as the settings allow."""
    if shape.tower is None:
        return ()
    most, area = config.data.max_prompt_tokens, shape.tower.area
    return (most if area is None else max(1, min(most, int(config.data.images.max_pixels / area))),)


def image_notes(config: Config, work: Work) -> list[str]:
    """Return what is assumed of the images of prompts, as a line."""
    if not work.images:
        return []
    most = config.data.max_prompt_tokens
    key = "data.max_prompt_tokens" if sum(work.images) == most else "data.images.max_pixels"
    return [f"assumed: an image of {sum(work.images):,} tokens in each prompt, as many as {key} allows"]


def _open_data(
    config: Config, problems: list[str], settings: PreTrainedConfig, *, from_hub: bool
) -> tuple[Data | None, Sequence[str]]:
    """Open the data and test the rewards on one row; add a tokenizer that is missing here to the problems.

    Args:
        config: checked settings.
        problems: is extended.
        settings: the model's configuration.
        from_hub: the model is of the hub, which is not asked.

    Returns:
        The data, its rewards closed; and the lines of the rewards' test.
    """
    tokenizer = _data_tokenizer(config.model, problems, from_hub=from_hub)
    if tokenizer is None:
        return None, ("not tried: that needs the tokenizer",)
    with chdir("."):  # a reward may change the directory, its file when it is loaded
        data = open_data(with_absolute_paths(config), tokenizer, settings=settings)
        with data.rewards as rewards:
            tried = try_rewards(rewards, data.training, tokenizer)
        return data, (*tried, *text_notes(config, tokenizer, data.training.texts, data.training.marks))


def _data_tokenizer(model: ModelConfig, problems: list[str], *, from_hub: bool) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer for the data; None where it is missing here, which is added to the problems."""
    try:
        return load_tokenizer(model, ask_hub=not from_hub)
    except ConfigError as error:
        if not from_hub:
            raise
        problems.append(str(error))
        return None


def make_supervised_plan(
    config: Config,
    training: Training,
    backend: Backend,
    world_size: int,
    *,
    no_device: str | None = None,
    chip: str | None = None,
    strategy_notes: Sequence[str] = (),
) -> Plan:
    """Check and describe a run on given examples, without loading the model.

    Args:
        config: from `supervised_settings`; the data may be missing.
        training: the command's own parts.

    The other args and the errors are those of `make_plan`.
    """
    problems = [no_device] if no_device else []
    settings, shipped = planned_settings(config.model)
    missing = missing_data(config)
    problems += missing
    tokenizer = None if missing else _data_tokenizer(config.model, problems, from_hub=shipped is not None)
    data = None if tokenizer is None else training.open_examples(config)
    memory = ["not estimated: the head is not that of a language model, which `hwgrpo plan --for sft` assumes"]
    if training.trains_head:
        device = Device(backend) if no_device is None else None
        start = check_start(config, backend, settings, device=device, data=data)
        longest = data.training.longest if data else config.data.max_prompt_tokens
        work = planned_work(
            config, backend, world_size, start.dtype, start.layout, prompt_tokens=longest, supervised=True
        )
        shape, sharding = model_shape(config.model, settings), sharding_of(config.trainer, world_size)
        memory = _memory_lines(estimate(config, shape, work, sharding))
    lines = [
        ("backend", _backend_line(backend, world_size, no_device, chip)),
        *_item("model", [f"{config.model.path}, strategy {config.trainer.strategy}", *strategy_notes]),
        *_example_lines(config, training, data),
        *_item("memory", memory),
        ("output", config.trainer.output_dir),
    ]
    return Plan(_text(lines), tuple(problems))


def _example_lines(config: Config, training: Training, data: Prompts | None) -> list[tuple[str, str]]:
    if data is None:
        return [("data", f"{', '.join(sources_of(config.data.train))}: not opened")]
    longest = max(len(each) for each in data.training.token_ids)
    what = "prompt" if training.trains_head else "text"
    return [
        ("data", f"{data.training.name}: {len(data.training):,} examples, longest {what} {longest} tokens"),
        *_item("", list(dataset_notes("training", data.training))),
        ("validation", f"{len(data.validation):,} examples" if data.validation is not None else "none"),
        *_item("", list(dataset_notes("validation", data.validation))),
        *_item("schedule", training.example_notes(config, data, planned_steps(config, len(data.training)))),
    ]


def planned_work(
    config: Config,
    backend: Backend,
    world_size: int,
    dtype: torch.dtype,
    layout: Layout,
    *,
    prompt_tokens: int,
    supervised: bool = False,
    images: tuple[int, ...] = (),
    known_prompts: int | None = None,
) -> Work:
    """Return the work of one of `world_size` devices in a step.

    Args:
        config: the run's settings.
        backend: the device family.
        world_size: processes of the run.
        dtype: compute dtype.
        layout: layout of micro-batches.
        prompt_tokens: length of the longest prompt.
        supervised: responses are given.
        images: tokens of each image of a prompt.
        known_prompts: prompts of the data with images.
    """
    rollout = config.rollout
    return Work(
        dtype=dtype,
        device_type=backend.device_type,
        prompts=config.trainer.prompts_per_step // world_size,
        prompt_tokens=prompt_tokens,
        # every device that is not the host has the same budget
        micro_batch_tokens=micro_batch_tokens(config, torch.device("cpu" if backend.is_host else "meta")),
        shares_prompt=layout.shares_prompt,
        branched=layout.attention == "branched" and layout.shares_prompt,
        samples=not supervised and engine_kind(rollout).samples_with_policy,
        beside=not supervised and shares_device(rollout),
        sleeps=not supervised and sleeps(rollout, on_host=backend.is_host),
        sent_copies=0 if supervised else count_host_copies(rollout.engine, rollout.server, config.model.lora),
        supervised=supervised,
        images=images,
        known_prompts=known_prompts,
    )


def _data_lines(data: DataConfig, training: PromptDataset | None, validation: PromptDataset | None) -> list[str]:
    if training is None:
        named = [", ".join(sources_of(each)) for each in (data.train, data.validation)]
        return [f"{named[0]}: not opened; validation {named[1] or 'none'}"]
    return [
        f"{training.name}: {len(training):,} prompts{_with_images(training)}, longest {training.longest} tokens",
        f"{training.filtered} dropped and {training.truncated} cut at {data.max_prompt_tokens} tokens",
        *dataset_notes("training", training),
        f"validation {validation.name}: {len(validation):,} prompts{_with_images(validation)}"
        if validation
        else "validation none",
        *dataset_notes("validation", validation),
    ]


def _with_images(dataset: PromptDataset) -> str:
    count = dataset.prompts_with_images
    if not count:
        return ""
    tokens = f"images of at most {sum(dataset.image_tokens):,} tokens"
    return f" with {tokens}" if count == len(dataset) else f" ({count:,} with {tokens})"


def _schedule(config: Config, training: PromptDataset | None, micro_batch: int) -> list[str]:
    t, r = config.trainer, config.rollout
    updates = t.prompts_per_step // prompts_per_update(config) * t.epochs_per_batch
    sequences = t.prompts_per_step * r.n
    longest = training.longest if training else config.data.max_prompt_tokens
    most = sequences * (longest + r.max_response_tokens)
    each = f"{t.prompts_per_step} prompts x {r.n} samples, {_counted(updates, 'update', 'updates')} each"
    tokens = f"at most {most:,} tokens a step, {micro_batch:,} per micro-batch"
    if ranks_per_sequence(config) > 1:
        tokens += f" on each of the {ranks_per_sequence(config)} devices that share sequences"
    if training is None and not t.max_steps:
        return [f"{_counted(t.epochs, 'pass', 'passes')} over the data in steps of {each}", tokens]
    steps = planned_steps(config, len(training) if training else 0)
    passes = f", {steps * t.prompts_per_step / len(training):.2f} passes over the data" if training else ""
    samples = f"{steps * t.prompts_per_step:,} prompts and {steps * sequences:,} samples{passes}"
    repeats = repeats_note(training, t.prompts_per_step) if training else None
    return [f"{steps} steps of {each}", f"in all {samples}", tokens, *filter(None, (repeats,))]


def _memory_lines(memory: Memory) -> list[str]:
    lines = [f"about {format_bytes(memory.peak)} per device at the most:"]
    parts = (
        ("", memory.always),
        ("rollout: ", memory.rollout),
        ("rewards: ", memory.rewards),
        ("update: ", memory.update),
        ("optimizer: ", memory.step),
        ("in the host's memory: ", memory.host),
        ("at the start: ", memory.loading),
    )
    return lines + [
        f"{format_bytes(size)} {when}{part}" for when, components in parts for part, size in components.items()
    ]


def _output_lines(
    folder: str,
    checkpoint: Checkpoint | None,
    notes: Sequence[str],
    finished: str | None,
) -> list[str]:
    if finished is not None:
        return finished.splitlines()
    start = f"continuing after step {checkpoint.step}" if checkpoint else "a fresh run"
    return [f"{folder}, {start}", *notes]


def _fall_backs(
    data: DataConfig, rollout: RolloutConfig, settings: PreTrainedConfig, layout_note: str | None
) -> list[str]:
    """Return the fallbacks and their reasons, as far as the model's configuration shows them."""
    longest = data.max_prompt_tokens + rollout.max_response_tokens
    reason = predict_fallback(settings, longest) if engine_kind(rollout).samples_with_policy else None
    lines = (layout_note, describe_fallback(reason) if reason else None)
    return [line for line in lines if line]


def _backend_line(backend: Backend, world_size: int, no_device: str | None, chip: str | None) -> str:
    assumed = "" if no_device is None else "; not on this machine, so dtype and attention are assumed"
    assumed += f", and the memory of {chip} (--chip names another)" if chip else ""
    return f"{backend.name}, {_counted(world_size, 'process', 'processes')}{assumed}"


def _text(lines: Sequence[tuple[str, str]]) -> str:
    return "\n".join(f"{name:<11}{terminal_line(text)}" for name, text in lines)


def _item(name: str, texts: Sequence[str]) -> list[tuple[str, str]]:
    """Return an item of the plan with one or more lines; only the first has its name."""
    return [(name if number == 0 else "", text) for number, text in enumerate(texts)]


def _counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"
