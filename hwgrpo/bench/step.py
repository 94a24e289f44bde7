"""One training step of a recipe, stage by stage, and its update in every layout side by side."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

import torch
from hwgrpo_backends.device import Device

from hwgrpo.config import Config
from hwgrpo.errors import ConfigError
from hwgrpo.training.batch import advantages_over_ranks, assemble
from hwgrpo.training.choices import attention_of, choose_layout
from hwgrpo.training.layout_check import proven_layout
from hwgrpo.training.layouts import PADDED, Layout, TokenSignals, lay_out
from hwgrpo.training.loop import Run
from hwgrpo.training.update import PolicyUpdate
from hwgrpo.values import TrainBatch

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}
"""Largest difference of loss and gradient, relative to padded rows, that rounding explains."""


@dataclass
class LayoutResult:
    """The update in one layout."""

    name: str
    obstacle: str | None = None
    """Why the model cannot have it, or why it was not timed."""
    wrong: bool = False
    """Loss or gradient differ from those of padded rows by more than rounding explains."""
    loss_apart: float | None = None
    """Relative to the loss of padded rows, or to 1 where that is smaller."""
    gradient_apart: float | None = None
    """Norm of the difference over the norm of the gradient, of the worst parameter."""
    fed_tokens: int = 0
    """Tokens that go through the model, padding included."""
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    """Most memory on the device during an update; None where it keeps no count."""


@dataclass
class StepResult:
    """What was measured, and on what."""

    environment: dict[str, Any]
    prompts: int
    samples: int
    prompt_tokens: float
    """Mean length."""
    response_tokens: int
    """In all."""
    auto: str
    """The layout that the recipe gets."""
    notes: list[str]
    stages: dict[str, list[float]]
    """Seconds per round of everything but the update."""
    layouts: list[LayoutResult]

    @property
    def step_seconds(self) -> float | None:
        """Median of the whole step in the layout that the recipe gets; None where that was not timed."""
        chosen = next((layout for layout in self.layouts if layout.name == self.auto), None)
        if chosen is None or not chosen.seconds:
            return None
        return sum(median(seconds) for seconds in self.stages.values()) + median(chosen.seconds)

    def to_json(self) -> dict[str, Any]:
        """Return all samples as a JSON document."""
        return {"schema": "hwgrpo.bench.step/1", **asdict(self), "step_seconds": self.step_seconds}


def measure_step(run: Run, config: Config, device: Device, names: Sequence[str], repeat: int) -> StepResult:
    """Measure a step of a fresh run, which is left as it was.

    Every sequence is given an advantage other than zero, so that all of them are trained.

    Args:
        run: not trained yet, in one process.
        config: its settings.
        device: what it runs on.
        names: layouts to compare; padded is added where it is missing, as what the others are checked against.
        repeat: rounds that are timed, after one that is not.
    """
    stages, batch, prompts = _stages(run, device, repeat)
    results = [_prepare(run, config, device, name) for name in dict.fromkeys(("padded", *names))]
    possible = [(result, layout) for result, layout in results if layout is not None]
    _compare(run.update, batch, possible)
    right = [(result, layout) for result, layout in possible if not result.wrong]
    for result, layout in right:
        result.fed_tokens = _fed(run.update, batch, layout)
    _time(run.update, batch, device, right, repeat)
    policy = run.update.policy
    return StepResult(
        environment={
            "backend": device.backend.name,
            "device": device.name,
            "dtype": str(policy.compute_dtype).removeprefix("torch."),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "model": type(policy.base).__name__,
            "parameters": sum(p.numel() for p in policy.parameters()),
            "attention": attention_of(config, device),
        },
        prompts=len(prompts),
        samples=config.rollout.n,
        prompt_tokens=float(batch.prompt_offsets.diff().double().mean()),
        response_tokens=len(batch.tokens),
        auto=run.update.layout.name,
        notes=list(run.engine.notes),
        stages=stages,
        layouts=[result for result, _ in results],
    )


def _stages(run: Run, device: Device, repeat: int) -> tuple[dict[str, list[float]], TrainBatch, Any]:
    """Time everything before the update; return also the last round's batch and its prompts."""
    stages: dict[str, list[float]] = {}
    prompts = run.prompts.next()
    batch: Any = None
    for round_number in range(repeat + 1):

        def timed(name: str, work: Callable[[], Any], kept: bool = round_number > 0) -> Any:
            device.synchronize()
            began = time.perf_counter()
            value = work()
            device.synchronize()
            if kept:
                stages.setdefault(name, []).append(time.perf_counter() - began)
            return value

        completions = timed("generate", lambda: run.engine.generate(prompts, run.sampling))
        rewards = timed("reward", lambda done=completions: run.rewards.score(prompts, done, 1))
        advantages = advantages_over_ranks(run.config, completions, rewards, run.strategy)
        batch = assemble(prompts, completions, advantages, rewards.valid)
        spread = torch.randn(len(batch), generator=torch.Generator().manual_seed(0))
        batch = replace(batch, advantages=torch.where(spread >= 0, 1.0, -1.0) + spread)
        if run.update.needs_old_logprobs:
            batch = timed("old log-probs", lambda batch=batch: run.update.with_old_logprobs(batch))
        if run.reference is not None:
            batch = timed("reference", lambda batch=batch: run.update.with_ref_logprobs(batch, run.reference))
        timed("weights to rollout", lambda: run.engine.update_weights(0))
    return stages, batch, prompts


def _prepare(run: Run, config: Config, device: Device, name: str) -> tuple[LayoutResult, Layout | None]:
    """Return the layout of a name if the model can have it, else why not."""
    wanted = replace(config, model=replace(config.model, layout=name))
    model = run.update.policy.base.config
    try:
        layout, _ = proven_layout(wanted, run.update.policy, choose_layout(wanted, model, attention_of(config, device)))
    except ConfigError as error:
        return LayoutResult(name, obstacle=str(error).split("; use model.layout")[0]), None
    if layout.name != name:
        return LayoutResult(name, obstacle=f"this model has {layout.name} instead"), None
    return LayoutResult(name), layout


def _compare(update: PolicyUpdate, batch: TrainBatch, layouts: Sequence[tuple[LayoutResult, Layout]]) -> None:
    """Compare loss and gradient of each layout with those of padded rows."""
    tolerance = TOLERANCE[update.policy.compute_dtype]
    expected_loss, expected = _gradient(update, batch, PADDED)
    for result, layout in layouts:
        loss, found = _gradient(update, batch, layout)
        result.loss_apart = abs(loss - expected_loss) / max(1.0, abs(expected_loss))
        result.gradient_apart = max(
            float((found[name] - gradient).norm() / gradient.norm().clamp_min(1e-12))
            for name, gradient in expected.items()
        )
        result.wrong = not (result.loss_apart <= tolerance and result.gradient_apart <= tolerance)
        if result.wrong:
            result.obstacle = "its loss or gradient is not that of padded rows, so it was not timed"


def _gradient(update: PolicyUpdate, batch: TrainBatch, layout: Layout) -> tuple[float, dict[str, torch.Tensor]]:
    loss, _ = replace(update, layout=layout).accumulate_gradients(batch, range(len(batch)))
    gradients = {n: p.grad.clone() for n, p in update.policy.named_parameters() if p.grad is not None}
    update.optimizer.zero_grad(set_to_none=True)
    return loss, gradients


def _fed(update: PolicyUpdate, batch: TrainBatch, layout: Layout) -> int:
    parts = replace(update, layout=layout)._parts(batch, range(len(batch)))
    return sum(lay_out(batch, part, TokenSignals({}, {}), layout).input_ids.numel() for part in parts)


def _time(
    update: PolicyUpdate,
    batch: TrainBatch,
    device: Device,
    layouts: Sequence[tuple[LayoutResult, Layout]],
    repeat: int,
) -> None:
    """Time updates in turns, each from the same weights; a round begins one layout later than the one before."""
    before = [parameter.detach().clone() for parameter in update.policy.parameters()]
    for round_number in range(repeat + 1):
        for result, layout in turns(layouts, round_number):
            one = replace(update, layout=layout)
            device.reset_peak()
            device.synchronize()
            began = time.perf_counter()
            one(batch)
            device.synchronize()
            seconds = time.perf_counter() - began
            if round_number:
                result.seconds.append(seconds)
                result.peak_bytes = device.memory().peak
            with torch.no_grad():
                for parameter, start in zip(update.policy.parameters(), before, strict=True):
                    parameter.copy_(start)


def turns(items: Sequence[Any], round_number: int) -> list[Any]:
    """Return the items in the order of a round: none is always the first, or always after the same one."""
    first = round_number % max(1, len(items))
    order = [*items[first:], *items[:first]]
    return order if round_number % 2 else order[::-1]
