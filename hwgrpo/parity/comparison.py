"""The comparison of a step on a device with fp64: tensors, their tolerances, and the stages that they form."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hwgrpo_backends.device import Device

from hwgrpo.config import Config
from hwgrpo.config.schema import ModelConfig
from hwgrpo.errors import ConfigError
from hwgrpo.models.loading import load_model, load_tokenizer
from hwgrpo.models.lora import uses_lora
from hwgrpo.parity import golden
from hwgrpo.parity.fixed_step import FixedStep, make_step
from hwgrpo.parity.golden import NORM, Gradients, gradient_name, updated_name
from hwgrpo.parity.measured import (
    Measured,
    build_measured,
    measured_forward,
    measured_gradients,
    measured_greedy,
    measured_loss,
    measured_update,
)
from hwgrpo.parity.saved_step import SavedTensor, checksum_of
from hwgrpo.parity.stages import Stage, compare_tensor, worst_of
from hwgrpo.rollout.stopping import end_token_ids

MARGIN = 3.0
"""Tolerance in effects of rounding: the computation on the device is another draw of the same size."""
LEAST = 4.0
"""Least tolerance, in fp32's eps times the largest summand of the stage: what is exact is stored in fp32, too."""
BYTES_PER_PARAMETER = 4 * 5 + 8 * 5
"""Host memory: in fp32 the model, a copy of it for the engine, its gradient and two optimizer states; in fp64 the model,
gradients without and with rounding, gradients and weights of the device."""
GREEDY = "greedy tokens"
UPDATED = "updated weights"


@dataclass(frozen=True)
class Parity:
    """Result of a comparison."""

    stages: tuple[Stage, ...]
    """In the order in which a step computes them; gradients from the head to the embeddings."""
    layout: str
    dtype: str
    notes: tuple[str, ...]
    """What runs on the device: attention, fused modules, a fallback of the layout."""
    tensors: Mapping[str, SavedTensor]
    """What the device computed, by name; empty if not kept."""
    model: str
    """Checksum of the model's weights and of the step."""


def compare(config: Config, device: Device, folder: Path, *, keep: bool = False) -> Parity:
    """Run the step on a device and in fp64 on the CPU, and compare each stage.

    Args:
        config: `settings.BASE` with overrides.
        device: the device, prepared.
        folder: for files of the run, removed by the caller.
        keep: keep what the device computed.

    Raises:
        ConfigError: the model cannot be read, or does not fit the host's memory.
    """
    check_features(config.model)
    check_memory(config)
    tokenizer = load_tokenizer(config.model)
    measured = build_measured(config, device, tokenizer, folder)
    exact = _golden_model(config)
    step = make_step(exact.get_input_embeddings().weight.shape[0], config.trainer.seed)
    expected, gradients = golden.golden_step(exact, step, config)
    dtype = measured.update.policy.compute_dtype
    moved = golden.rounding_of(exact, step, config, dtype, expected, gradients)
    tensors: dict[str, SavedTensor] | None = {} if keep else None
    stages = tuple(_stages(exact, measured, step, expected, gradients, moved, tensors))
    return Parity(
        stages,
        measured.update.layout.name,
        str(dtype).removeprefix("torch."),
        tuple(measured.notes),
        tensors or {},
        checksum_of(exact, step) if keep else "",
    )


def _stages(
    exact: Any,
    measured: Measured,
    step: FixedStep,
    expected: dict[str, torch.Tensor],
    gradients: Gradients,
    moved: dict[str, float],
    tensors: dict[str, SavedTensor] | None,
) -> Iterator[Stage]:
    def compared(stage: str, tensor: str, actual: torch.Tensor, right: torch.Tensor, summands: torch.Tensor) -> Stage:
        floor = LEAST * torch.finfo(torch.float32).eps * float(summands.abs().max()) if summands.numel() else 0.0
        tolerance = max(MARGIN * moved.get(tensor, 0.0), floor)
        if tensors is not None:
            tensors[tensor] = SavedTensor(stage, actual.float(), tolerance)
        return compare_tensor(stage, tensor, actual, right, tolerance)

    for name, actual in measured_forward(measured, step):
        yield compared(name, name, actual, expected[name], expected[name])
    tolerance = max(MARGIN * moved["log-probs"], LEAST * torch.finfo(torch.float32).eps)
    yield _greedy(exact, measured, step, tolerance)
    # the loss is a mean of products of ratios and advantages, which cancel
    summands = {"loss": expected["advantages"]}
    for name, actual in measured_loss(measured, step, expected["log-probs"]):
        yield compared(name, name, actual, expected[name], summands.get(name, expected[name]))
    weights = dict(exact.named_parameters())
    actual = dict(measured_gradients(measured))
    parts = golden.parameters_by_part(exact)
    for part, names in parts.items():
        rows = []
        for name in names:
            gradient = gradients[name]
            right = torch.zeros_like(weights[name]) if gradient is None else gradient
            mine = actual.get(name, torch.zeros_like(right))
            rows.append(compared(f"gradients, {part}", gradient_name(name), mine, right, right))
        yield worst_of(rows)
    norm, updated = measured_update(measured)
    right_norm = golden.gradient_norm(gradients)
    yield compared(NORM, NORM, norm, right_norm, right_norm)
    scale = golden.clip_coefficient(gradients, measured.config)

    def after(name: str) -> torch.Tensor:
        gradient = gradients[name]
        before = weights[name].detach()
        return before if gradient is None else golden.adamw(before, gradient * scale, measured.config)

    yield worst_of(
        compared(UPDATED, updated_name(name), mine, after(name), weights[name].detach()) for name, mine in updated
    )


def check_features(model: ModelConfig) -> None:
    """Check that the settings of the model ask for nothing that fp64 lacks.

    Raises:
        ConfigError: they ask for adapters, quantized weights or the router's loss.
    """
    for key, chosen, what in (
        ("model.lora", uses_lora(model.lora), "adapters"),
        ("model.quantize", model.quantize != "none", "quantized weights"),
        ("model.router_loss_coef", model.router_loss_coef > 0, "the router's loss"),
    ):
        if chosen:
            raise ConfigError(f"{key}: parity does not compare {what}; leave it out")


def check_memory(config: Config) -> None:
    """Check that the copies of the model fit the host's memory, before it is loaded.

    Raises:
        ConfigError: they do not.
    """
    empty = load_model(config.model, attention="eager", on_meta_device=True)
    parameters = sum(p.numel() for p in empty.parameters())
    needed, memory = BYTES_PER_PARAMETER * parameters, _host_bytes()
    if needed > memory:
        raise ConfigError(
            f"model.path={config.model.path!r}: comparing {parameters:,} parameters with fp64 takes "
            f"{needed / 2**30:.1f} GiB of host memory, and this host has {memory / 2**30:.1f} GiB; use a smaller model "
            "of the same architecture"
        )


def _golden_model(config: Config) -> Any:
    model = load_model(config.model, attention="eager").double().eval()
    if hasattr(model.config, "_experts_implementation"):
        model.config._experts_implementation = "eager"
    return model


def _greedy(model: Any, measured: Measured, step: FixedStep, tolerance: float) -> Stage:
    """Count the responses that leave the likeliest tokens where these lead by more than rounding."""
    ends = end_token_ids(measured.tokenizer, model.generation_config, ())
    tokens, leads = golden.greedy_tokens(model, step, ends)
    different = decided = 0
    for right, lead, actual in zip(tokens, leads, measured_greedy(measured, step), strict=True):
        count = next((i for i, each in enumerate(lead) if each <= 2 * tolerance), len(lead))
        ends_alike = count < len(right) or len(actual) == len(right)
        different += actual[:count] != right[:count] or not ends_alike
        decided += count
    return Stage(GREEDY, float(different), 0.0, f"{decided} tokens that lead by more than rounding")


def _host_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
