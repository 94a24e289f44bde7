"""What `hwgrpo bench step` measured, and on what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from hwgrpo_backends.device import Device

from hwgrpo.bench.times import Times
from hwgrpo.config import Config
from hwgrpo.training.policy.auto_settings import attention_of
from hwgrpo.training.policy.policy_model import PolicyModel

SCHEMA = "hwgrpo.bench.step/1"


@dataclass(frozen=True)
class LayoutDifference:
    """Differences of an update from that with padded rows, or the allowed ones."""

    loss: float
    """Difference of the losses, relative to padded's, or to 1 where that is smaller."""
    gradient_norm: float
    """Relative difference of the norms of the full gradient."""
    gradient: float
    """Norm of the difference of the gradients, over the norm of padded's."""


@dataclass
class LayoutBench:
    """The update in one layout."""

    name: str
    state: Literal["timed", "wrong", "impossible"]
    """wrong: its result differs from padded rows', so it was not timed."""
    reason: str = ""
    """Reason why it was not timed."""
    apart: LayoutDifference | None = None
    """Difference of its first update from that with padded rows."""
    fed_tokens: int = 0
    """Tokens of all forward passes of a step's updates, prompts and padding included."""
    trained_tokens: int = 0
    """Response tokens that pass the LM head in all updates of a step."""
    flops: int | None = None
    """Floating-point operations of all updates of a step, see `work.update_flops`."""
    peak_bytes: int | None = None
    """Most memory on the device during an update; None where the device keeps no count."""
    ratio: float | None = None
    """Padded's median over this layout's: how many times as fast."""
    times: Times = field(default_factory=Times)

    def per_second(self, count: int | None) -> float | None:
        """Return a count per update as a count per second."""
        return count / self.times.median if count is not None and self.times.median else None

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        values = asdict(self)
        del values["times"]
        return {
            **values,
            **self.times.to_json(),
            "trained_tokens_per_s": self.per_second(self.trained_tokens),
            "fed_tokens_per_s": self.per_second(self.fed_tokens),
            "flops_per_s": self.per_second(self.flops),
        }


@dataclass(frozen=True)
class BatchShape:
    """The step that was measured."""

    prompts: int
    samples: int
    """Per prompt."""
    prompt_tokens: float
    """Of a prompt, on average."""
    response_tokens: int
    """Of all responses."""
    trained_tokens: int
    """Those of responses that the gradient depends on."""
    micro_batch_tokens: int
    """Budget of one forward and backward pass."""


@dataclass
class StepBench:
    """What was measured, and on what."""

    machine: Mapping[str, Any]
    model: Mapping[str, Any]
    batch: BatchShape
    chosen: str
    """The layout that the recipe has here."""
    tolerance: LayoutDifference
    notes: list[str]
    stages: dict[str, Times]
    """All but the update, under the names that training reports them by (timing_s/...)."""
    layouts: list[LayoutBench]
    step: Times | None
    """Stages and the update in the chosen layout, round by round; None where that layout is wrong."""

    @property
    def share_of_core(self) -> float | None:
        """Processor time over wall time, where only other work can make it less than 1: on one thread of a CPU."""
        if self.machine["backend"] != "cpu" or self.machine["threads"] != 1:
            return None
        times = [*self.stages.values(), *(layout.times for layout in self.layouts)]
        return sum(sum(t.cpu_s) for t in times) / sum(sum(t.wall_s) for t in times)

    @property
    def wrong(self) -> list[str]:
        """Names of the layouts that do not compute what padded rows do."""
        return [layout.name for layout in self.layouts if layout.state == "wrong"]

    def to_json(self) -> dict[str, Any]:
        """Return all samples as a JSON document; keys of a schema version do not change."""
        return {
            "schema": SCHEMA,
            "machine": dict(self.machine),
            "model": dict(self.model),
            "batch": asdict(self.batch),
            "chosen": self.chosen,
            "tolerance": asdict(self.tolerance),
            "notes": self.notes,
            "stages": {name: times.to_json() for name, times in self.stages.items()},
            "layouts": [layout.to_json() for layout in self.layouts],
            "step": self.step.to_json() if self.step else None,
        }


def model_facts(config: Config, policy: PolicyModel, device: Device) -> dict[str, Any]:
    """Return facts about the trained model."""
    return {
        "path": config.model.path,
        "architecture": type(policy.base).__name__,
        "parameters": sum(p.numel() for p in policy.parameters()),
        "trainable": sum(p.numel() for p in policy.parameters() if p.requires_grad),
        "dtype": str(policy.compute_dtype).removeprefix("torch."),
        "attention": attention_of(config, device).name,
    }
