"""The comparison of a step on a device with fp64: tensors, their tolerances, and the stages that they form."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hwgrpo_backends.device import Device
from hwgrpo_kernels import default_registry

from hwgrpo.config import Config
from hwgrpo.config.schema import ModelConfig
from hwgrpo.errors import ConfigError
from hwgrpo.models.loading import image_sample, load_model, load_tokenizer
from hwgrpo.models.placeholders import placeholder_ids
from hwgrpo.parity.fixed_adapter import with_adapter
from hwgrpo.parity.fixed_step import FixedStep, make_step
from hwgrpo.parity.golden import (
    AFTER,
    NORM,
    Gradients,
    adamw,
    clip_coefficient,
    golden_step,
    gradient_name,
    gradient_norm,
    greedy_tokens,
    layer_names,
    load_golden_model,
    logprobs_after,
    logprobs_of,
    parameters_by_part,
    rounding_of,
    second_name,
    trained_parameters,
    updated,
    updated_name,
)
from hwgrpo.parity.measured import MeasuredStep, build_measured, measured_step
from hwgrpo.parity.rounded_operations import Precision
from hwgrpo.parity.saved_step import SavedTensor, checksum_of
from hwgrpo.parity.settings import BASE
from hwgrpo.rollout.stopping import end_token_ids
from hwgrpo.support.stage_differences import Stage, compare_tensor, rounding_tolerance, worst_of
from hwgrpo.training.strategies.strategy import raise_on_all_ranks
from hwgrpo.training.vision_checks import check_vision

BYTES_PER_PARAMETER = 4 * 9 + 8 * 4
"""Host memory: in fp32 the model, the engine's copy, gradient, two optimizer states, and copies of gradient, clipped
gradient and weights after two updates; in fp64 weights before and after the update, gradients without and with
rounding."""
DENSE = "log-probs, dense mask"
GREEDY = "greedy tokens"
SAMPLED = "sampled log-probs"
"""Of the engine, after the update."""
UPDATED = "updated weights"
SECOND_UPDATE = "second update"


@dataclass(frozen=True)
class Parity:
    """Result of a comparison."""

    stages: Sequence[Stage]
    """In the order in which a step computes them; gradients from the head to the embeddings."""
    layout: str
    dtype: str
    notes: tuple[str, ...]
    """What runs on the device: attention, fused modules, a fallback of the layout, the engine's decoding, kernels."""
    tensors: Mapping[str, SavedTensor]
    """What the device computed, by name; on rank 0, as the checksum."""
    model: str
    """Checksum of the model's weights and of the step."""
    is_main: bool
    """Whether this is rank 0."""


def compare(config: Config, device: Device, folder: Path) -> Parity:
    """Run the step on a device and in fp64 on the CPU, and compare each stage.

    Args:
        config: `settings.BASE` with overrides.
        device: the device, prepared.
        folder: for files of the run, removed by the caller.

    Raises:
        ConfigError: the model cannot be read, does not fit the host's memory, or reads images, which other settings do
            not take.
    """
    check_features(config.model)
    empty = load_model(config.model, attention="eager", on_meta_device=True)
    check_vision(config, empty.config)
    check_memory(config.model.path, sum(p.numel() for p in empty.parameters()))
    tokenizer = load_tokenizer(config.model)
    layers = layer_names(empty)
    config = with_adapter(config, empty, folder / "adapter")
    measured = build_measured(config, device, tokenizer, layers, folder)
    strategy, dtype = measured.strategy, measured.update.policy.compute_dtype
    sample = image_sample(config.model, empty.config, tokenizer)
    rows, without = measured.model.get_input_embeddings().weight.shape[0], placeholder_ids(empty.config)
    step = make_step(rows, config.trainer.seed, sample, without)
    # a frozen base, and all weights that are sharded, are held in the compute dtype
    held = strategy.shards or measured.models.frozen_dtype == dtype
    precision = Precision(dtype, rounds_embeddings=held, rounds_results=strategy.shards)
    golden = raise_on_all_ranks(strategy, lambda: golden_of(config, step, precision) if strategy.rank == 0 else None)
    logprobs = strategy.gather_objects(golden and golden.stages["log-probs"])[0]
    actual = measured_step(measured, step, logprobs)
    kept: dict[str, SavedTensor] = {}
    stages: Sequence[Stage] = ()
    if golden is not None:
        ends = end_token_ids(tokenizer, golden.model.generation_config, ())
        stages = [*_stages(config, golden, step, actual, ends, kept)]
    stages = strategy.gather_objects(stages)[0]
    strategy.close()
    return Parity(
        stages=stages,
        layout=measured.update.layout.name,
        dtype=str(dtype).removeprefix("torch."),
        notes=(*measured.notes, *actual.engine_notes, *default_registry.explain()),
        tensors=kept,
        model=checksum_of(golden.model, step, (*BASE, str(config.algorithm.entropy_coef))) if golden else "",
        is_main=strategy.rank == 0,
    )


def golden_of(config: Config, step: FixedStep, precision: Precision) -> Golden:
    """Return the step in fp64, and how far rounding moves it on a device of a precision."""
    model = load_golden_model(config.model)
    expected, gradients = golden_step(model, step, config)
    return Golden(model, expected, gradients, rounding_of(model, step, config, precision, expected, gradients))


@dataclass(frozen=True)
class Golden:
    """The step in fp64."""

    model: Any
    stages: Mapping[str, torch.Tensor]
    gradients: Gradients
    moved: Mapping[str, Sequence[float]]
    """Tensor -> how far rounding moves it, in several draws."""


def _stages(
    config: Config,
    golden: Golden,
    step: FixedStep,
    measured: MeasuredStep,
    ends: Collection[int],
    kept: dict[str, SavedTensor],
) -> Iterator[Stage]:
    """Yield the stages, and write what the device computed into `kept`."""

    def compared(stage: str, tensor: str, actual: torch.Tensor, right: torch.Tensor, summands: torch.Tensor) -> Stage:
        tolerance = rounding_tolerance(golden.moved.get(tensor, ()), summands)
        kept[tensor] = SavedTensor(stage, actual.float(), tolerance)
        return compare_tensor(stage, tensor, actual, right, tolerance)

    for name, right in golden.stages.items():
        # the loss is a mean of products of ratios and advantages, which cancel
        summands = golden.stages["advantages"] if name == "loss" else right
        of_ranks = [compared(name, name, stages[name], right, summands) for stages in measured.stages if name in stages]
        yield worst_of(of_ranks) if len(of_ranks) == len(measured.stages) else missing(name, name)
        if name == "log-probs" and measured.dense is not None:
            tolerance = kept[name].tolerance
            kept[DENSE] = SavedTensor(DENSE, measured.dense, tolerance)
            yield compare_tensor(DENSE, DENSE, measured.dense, right, tolerance)
        if name == "entropy":
            yield _greedy(golden, step, measured.greedy, ends, kept["log-probs"].tolerance)
    weights = trained_parameters(golden.model)
    for part, names in parameters_by_part(golden.model).items():
        if measured.gradients is None:
            break
        rows = []
        for name in names:
            gradient = golden.gradients[name]
            right = torch.zeros_like(weights[name]) if gradient is None else gradient
            stage, actual = f"gradients, {part}", measured.gradients.get(name)
            if actual is None and gradient is not None:
                rows.append(missing(stage, gradient_name(name)))
            else:
                actual = torch.zeros_like(right) if actual is None else actual
                rows.append(compared(stage, gradient_name(name), actual, right, right))
        yield worst_of(rows)
    norm = gradient_norm(golden.gradients)
    yield compared(NORM, NORM, measured.norm, norm, norm)
    scale = clip_coefficient(norm, config)

    def of_weights(stage: str, steps: int, actual: Mapping[str, torch.Tensor], named: Callable[[str], str]) -> Stage:
        rows = []
        for name, weight in weights.items():
            before, gradient = weight.detach(), golden.gradients[name]
            if name not in actual:
                rows.append(missing(stage, named(name)))
                continue
            after = before if gradient is None else adamw(before, gradient * scale, config, steps)
            rows.append(compared(stage, named(name), actual[name].double() - before, after - before, before))
        return worst_of(rows)

    yield of_weights(UPDATED, 1, measured.updated, updated_name)
    right = logprobs_after(golden.model, step, config, golden.gradients)
    yield compared(AFTER, AFTER, measured.after, right, right)
    rows = []
    with updated(golden.model, golden.gradients, config):
        # the step's tokens, whose tolerance this is, are less likely than what an engine samples
        for of_rank in measured.sampled:
            if of_rank is None:
                rows.append(missing(SAMPLED, SAMPLED))
                continue
            right = logprobs_of(golden.model, step, of_rank, config.rollout.temperature)
            rows.append(compare_tensor(SAMPLED, SAMPLED, of_rank.logprobs, right, kept[AFTER].tolerance))
    yield worst_of(rows)
    if measured.second is not None:
        yield of_weights(SECOND_UPDATE, 2, measured.second, second_name)


def missing(stage: str, tensor: str) -> Stage:
    """Return a stage that the device did not compute, which fails."""
    return Stage(stage, math.nan, 0.0, f"{tensor} (missing)")


def check_features(model: ModelConfig) -> None:
    """Check that the model and its settings ask for nothing that fp64 lacks.

    Raises:
        ConfigError: they ask for quantized weights, the router's loss, dropout or new DoRA adapters.
    """
    for key, chosen, what in (
        ("model.lora.dora", model.lora.dora, "new DoRA adapters (existing ones: model.lora.adapter=FOLDER)"),
        ("model.lora.dropout", model.lora.dropout > 0, "dropout"),
        ("model.quantize", model.quantize != "none", "quantized weights"),
        ("model.router_loss_coef", model.router_loss_coef > 0, "the router's loss"),
    ):
        if chosen:
            raise ConfigError(f"{key}: parity does not compare {what}; leave it out")


def check_memory(path: str, parameters: int) -> None:
    """Check that the copies of a model fit the host's memory, before it is loaded.

    Raises:
        ConfigError: they do not.
    """
    needed, memory = BYTES_PER_PARAMETER * parameters, host_bytes()
    if needed > memory:
        raise ConfigError(
            f"model.path={path!r}: comparing {parameters:,} parameters with fp64 takes "
            f"{needed / 2**30:.1f} GiB of host memory, and this host has {memory / 2**30:.1f} GiB; compare it "
            "layer by layer, with --layers 2, or use a smaller model of the same architecture"
        )


def _greedy(
    golden: Golden,
    step: FixedStep,
    measured: Sequence[Sequence[Sequence[int]]],
    ends: Collection[int],
    tolerance: float,
) -> Stage:
    """Count the responses that leave the likeliest tokens where these lead by more than rounding."""
    tokens, leads = greedy_tokens(golden.model, step, ends)
    different = decided = 0
    for right, lead, *of_ranks in zip(tokens, leads, *measured, strict=True):
        count = next((i for i, each in enumerate(lead) if each <= 2 * tolerance), len(lead))
        for actual in of_ranks:
            ends_alike = count < len(right) or len(actual) == len(right)
            different += actual[:count] != right[:count] or not ends_alike
        decided += count
    leading = f"{decided} of {sum(map(len, leads))} tokens lead by more than rounding"
    return Stage(GREEDY, float(different), 0.0, leading, is_coarse=decided == 0)


def host_bytes() -> int:
    """Return the host's memory, or the limit of this process's control group."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    with suppress(OSError, ValueError):  # no such file, or "max"
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(limits)
