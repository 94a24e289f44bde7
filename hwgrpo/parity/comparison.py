"""The comparison: error and tolerance of each stage, and the first stage that differs by more than rounding."""

from __future__ import annotations

import copy
import math
import os
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from hwgrpo_backends.device import Device

from hwgrpo.config import Config
from hwgrpo.errors import ConfigError
from hwgrpo.models.loading import load_model, load_tokenizer
from hwgrpo.parity import golden
from hwgrpo.parity.fixed_step import FixedStep, make_step
from hwgrpo.parity.measured import Parts, build_parts, measured_greedy, measured_stages
from hwgrpo.rollout.stopping import end_token_ids

MARGIN = 3.0
"""Tolerance in effects of rounding: the computation on the device is another draw of the same size."""
LEAST = 4.0
"""Least tolerance, in fp32's eps times the largest summand of the stage: what is exact is stored in fp32, too."""
COPIES = 4
"""Copies of the model in fp64 at the same time: the model, a changed one, gradients and updated weights."""
GREEDY = "greedy tokens"
OUTSIDE = "outside of layers"


@dataclass(frozen=True)
class Stage:
    """A stage on the device against fp64."""

    name: str
    error: float
    """Largest difference of any entry."""
    tolerance: float
    worst: str = ""
    """The tensor of the stage with the largest share of its tolerance; "": it has one tensor."""

    @property
    def passed(self) -> bool:
        """Whether rounding explains the error; a NaN fails."""
        return self.error <= self.tolerance


@dataclass(frozen=True)
class Parity:
    """Result of a comparison."""

    stages: tuple[Stage, ...]
    """In the order in which a step computes them; gradients from the last layer to the first."""
    layout: str
    dtype: str
    notes: tuple[str, ...]

    @property
    def first_difference(self) -> Stage | None:
        """The first stage that rounding does not explain."""
        return next((stage for stage in self.stages if not stage.passed), None)


def compare(config: Config, device: Device, folder: Path) -> Parity:
    """Run the step on a device and in fp64 on the CPU, and compare each stage.

    Args:
        config: `settings.BASE` with overrides.
        device: the device, prepared.
        folder: for files of the run, removed by the caller.

    Raises:
        ConfigError: the model cannot be read, or its copies in fp64 do not fit the host's memory.
    """
    tokenizer = load_tokenizer(config.model)
    parts = build_parts(config, device, tokenizer, folder)
    exact = _golden_model(config, sum(p.numel() for p in parts.model.parameters()))
    step = make_step(exact.get_input_embeddings().weight.shape[0], config.trainer.seed)
    expected = golden.golden_stages(copy.deepcopy(exact), step, config)
    dtype = parts.update.policy.compute_dtype
    rounding = golden.rounding_of(exact, step, config, golden.unit_of(dtype, parts.update.policy.hidden_size))
    # the loss is a mean of products of ratios and advantages, which cancel
    summands = expected | {"loss": expected["advantages"]}
    tolerances = {name: _tolerance(summands[name], rounding[name]) for name in expected}
    greedy = _greedy(exact, parts, step, tolerances["log-probs"])  # with the weights before the update
    errors = {
        name: float((values - expected[name]).abs().max())
        for name, values in measured_stages(parts, step, expected["log-probs"])
    }
    stages = []
    for name, kinds in _groups(exact).items():
        worst = max(kinds, key=lambda kind: _share(errors[kind], tolerances[kind]))
        stages.append(Stage(name, errors[worst], tolerances[worst], "" if worst == name else worst))
        if name == "entropy":
            stages.append(greedy)
    return Parity(tuple(stages), parts.update.layout.name, str(dtype).removeprefix("torch."), tuple(parts.notes))


def _tolerance(summands: torch.Tensor, rounding: float) -> float:
    return max(MARGIN * rounding, LEAST * torch.finfo(torch.float32).eps * float(summands.abs().max()))


def _share(error: float, tolerance: float) -> float:
    """Return the error as a share of the tolerance; NaN is worst of all."""
    return math.inf if math.isnan(error) else error / tolerance if tolerance else math.inf * error if error else 0.0


def _golden_model(config: Config, parameters: int) -> Any:
    needed = COPIES * 8 * parameters
    memory = _host_bytes()
    if needed > memory:
        raise ConfigError(
            f"model.path={config.model.path!r}: {COPIES} copies in fp64 of {parameters:,} parameters take "
            f"{needed / 2**30:.0f} GiB, and this host has {memory / 2**30:.0f} GiB; use a smaller model of the same "
            "architecture"
        )
    model = load_model(config.model, attention="eager", dtype=torch.float64).double().eval()
    if hasattr(model.config, "_experts_implementation"):
        model.config._experts_implementation = "eager"
    return model


def _groups(model: Any) -> dict[str, list[str]]:
    """Return stage -> the tensors of which it shows the worst, in the order in which a step computes them."""
    layers = golden.layers_of(model)
    numbered = [f"layer {number}" for number in range(1, len(layers) + 1)]
    owner = {id(p): name for name, layer in zip(numbered, layers, strict=True) for p in layer.parameters()}
    parameters: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters():
        parameters.setdefault(owner.get(id(parameter), OUTSIDE), []).append(name)
    groups = {name: [name] for name in ("embeddings", *numbered, "log-probs", "entropy", "advantages", "loss")}
    for of, names in sorted(parameters.items(), key=lambda item: [*numbered, OUTSIDE].index(item[0]), reverse=True):
        groups[f"gradients, {of}"] = [f"gradient of {name}" for name in names]
    return groups | {"updated weights": [f"updated {name}" for names in parameters.values() for name in names]}


def _greedy(model: Any, parts: Parts, step: FixedStep, tolerance: float) -> Stage:
    """Count the responses that leave the likeliest tokens where these lead by more than rounding."""
    ends = end_token_ids(parts.tokenizer, model.generation_config, ())
    tokens, leads = golden.greedy_tokens(model, step, ends)
    different = 0
    for exact, lead, found in zip(tokens, leads, measured_greedy(parts, step), strict=True):
        apart = next((i for i, (a, b) in enumerate(zip_longest(exact, found)) if a != b), None)
        different += apart is not None and (apart == len(lead) or lead[apart] > 2 * tolerance)
    return Stage(GREEDY, float(different), 0.0)


def _host_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
