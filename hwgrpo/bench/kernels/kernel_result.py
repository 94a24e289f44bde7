"""What `hwgrpo bench kernels` measured, and its JSON document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from hwgrpo_kernels import Shape

from hwgrpo.bench.kernels.ceiling import Ceiling
from hwgrpo.bench.kernels.clock import Samples
from hwgrpo.bench.kernels.sides import Group

SCHEMA = "hwgrpo.bench.kernels/1"
State = Literal["timed", "wrong", "impossible"]
"""wrong: its result is not fp64's, so it was not timed."""


@dataclass
class SideBench:
    """One implementation of a case, with its times."""

    name: str
    group: Group
    state: State
    samples: Samples
    reason: str = ""
    """Why it was not timed."""
    implementations: Mapping[str, str] = field(default_factory=dict)
    """op -> the implementation that ran."""
    errors: dict[str, float] = field(default_factory=dict)
    """Output -> its error against fp64 on the same inputs."""
    peak_bytes: int | None = None
    """Most memory beyond inputs and results; None where it was not measured."""
    ratio: float | None = None
    """How many times as fast as the baseline it is, median over rounds."""

    @property
    def worst(self) -> tuple[float | None, float | None]:
        """Largest error of outputs, and of gradients."""
        forward = [error for name, error in self.errors.items() if not name.endswith(".grad")]
        backward = [error for name, error in self.errors.items() if name.endswith(".grad")]
        return max(forward, default=None), max(backward, default=None)


@dataclass
class CaseBench:
    """A case at one shape."""

    name: str
    summary: str
    flops: int | None
    bytes: int | None
    sides: list[SideBench]
    baseline: str
    """The side that ratios are against."""

    def rate(self, side: SideBench) -> float | None:
        """Return floating-point operations per second, or bytes where the case has no matrix products."""
        work = self.flops if self.flops is not None else self.bytes
        return work / side.samples.median if work is not None and side.samples.median else None

    def share(self, side: SideBench, ceiling: Ceiling) -> float | None:
        """Return the share of the ceiling that the rate is."""
        best = ceiling.flops_per_s if self.flops is not None else ceiling.bytes_per_s
        rate = self.rate(side)
        return rate / best if rate and best else None

    def to_json(self, ceiling: Ceiling) -> dict[str, Any]:
        """Return it as a JSON object."""
        unit = "flops_per_s" if self.flops is not None else "bytes_per_s"
        return {
            "name": self.name,
            "flops": self.flops,
            "bytes": self.bytes,
            "baseline": self.baseline,
            "sides": [
                {
                    "name": side.name,
                    "group": side.group,
                    "state": side.state,
                    "reason": side.reason,
                    "implementations": dict(side.implementations),
                    "errors": side.errors,
                    "peak_bytes": side.peak_bytes,
                    "ratio": side.ratio,
                    "flops_per_s": None,
                    "bytes_per_s": None,
                    unit: self.rate(side),
                    "share_of_ceiling": self.share(side, ceiling),
                    **side.samples.to_json(),
                }
                for side in self.sides
            ],
        }


@dataclass
class ShapeBench:
    """All cases at one shape."""

    name: str
    shape: Shape
    gemm: Samples
    gemm_flops: int
    cases: list[CaseBench]

    @property
    def gemm_rate(self) -> float | None:
        """Floating-point operations per second of the logits' own GEMM."""
        return self.gemm_flops / self.gemm.median if self.gemm.median else None


@dataclass
class KernelBench:
    """What was measured, and on what."""

    machine: Mapping[str, Any]
    peers: Mapping[str, str | None]
    """Distribution -> installed version."""
    dtype: str
    clock: str
    repeat: int
    ceiling: Ceiling
    shapes: list[ShapeBench]
    peak: str
    """How memory was measured, or why not."""
    not_here: list[str]
    """Implementations of ours that cannot run here, and why."""

    @property
    def wrong(self) -> list[str]:
        """`shape case side` of each side whose result is not fp64's."""
        return [
            f"{shape.name} {case.name} {side.name}"
            for shape in self.shapes
            for case in shape.cases
            for side in case.sides
            if side.state == "wrong"
        ]

    def to_json(self) -> dict[str, Any]:
        """Return all samples as a JSON document; keys of a schema version do not change."""
        return {
            "schema": SCHEMA,
            "machine": dict(self.machine),
            "peers": dict(self.peers),
            "dtype": self.dtype,
            "clock": self.clock,
            "repeat": self.repeat,
            "ceiling": self.ceiling.to_json(),
            "peak": self.peak,
            "not_here": self.not_here,
            "shapes": [
                {
                    "name": each.name,
                    **each.shape._asdict(),
                    "gemm": {"flops_per_s": each.gemm_rate, **each.gemm.to_json()},
                    "cases": [case.to_json(self.ceiling) for case in each.cases],
                }
                for each in self.shapes
            ],
        }
