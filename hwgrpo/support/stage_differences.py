"""The result of a comparison: error and tolerance of each stage, and the first that rounding does not explain.

A tolerance comes from computations of the same with other roundings (draws), each changed by up to one rounding.

Used by every command that compares two computations of one training step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

import torch

from hwgrpo.support.jsonlines import jsonable

COARSE = 1 / 3
DRAWS = 12
"""Computations with other roundings."""
MARGIN = 2.0
"""Tolerance in bounds of the effect of rounding: the model of rounding may be off by this factor."""
DEVIATIONS = 4.0
"""The bound is the mean of draws plus this many standard deviations: the device's rounding is another draw."""
LEAST = 4.0
"""Least tolerance, in fp32's eps times the largest summand of the stage: what is exact is stored in fp32, too."""
EPS = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Stage:
    """A stage of a training step, computed twice.

    Example:
        `Stage("gradients, layer 2", 3e-4, 1e-5, "gradient of model.layers.1.mlp.up_proj.weight", (7, 3), 0.1, 0.1003)`
    """

    name: str
    error: float
    """Largest absolute difference of any entry; of the tensor whose error takes the largest share of its tolerance."""
    tolerance: float
    tensor: str = ""
    """That tensor."""
    index: tuple[int, ...] = ()
    """Place of that entry."""
    expected: float = math.nan
    actual: float = math.nan
    is_coarse: bool = False
    """Whether a tensor of the stage has a tolerance above `COARSE` of its largest value: rounding hides mistakes."""

    @property
    def share(self) -> float:
        """The error as a share of the tolerance; infinite for NaN, without a tolerance, and of one not finite."""
        if math.isnan(self.error) or not math.isfinite(self.tolerance):
            return math.inf
        return self.error / self.tolerance if self.tolerance else math.inf if self.error else 0.0

    @property
    def passed(self) -> bool:
        """Whether rounding explains the error."""
        return self.share <= 1


def rounding_tolerance(draws: Sequence[float], summands: torch.Tensor) -> float:
    """Return the largest error of a tensor that rounding explains; not finite if a draw is not.

    Args:
        draws: the largest difference of any of its entries in each draw; none: nothing is rounded.
        summands: of its entries, as `least_tolerance` has them.
    """
    effects = torch.tensor(draws or (0.0, 0.0), dtype=torch.float64)
    bound = MARGIN * float(effects.mean() + DEVIATIONS * effects.std())
    return max(bound, least_tolerance(summands)) if math.isfinite(bound) else bound


def least_tolerance(summands: torch.Tensor) -> float:
    """Return the tolerance of what is exact: a few roundings of fp32 of the largest summand."""
    return LEAST * EPS * largest(summands[torch.isfinite(summands)])


def largest(values: torch.Tensor) -> float:
    """Return the largest absolute value, 0 of none."""
    return float(values.abs().max()) if values.numel() else 0.0


def compare_tensor(stage: str, tensor: str, actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> Stage:
    """Compare one tensor of a stage.

    Args:
        stage: its name.
        tensor: name of the tensor.
        actual, expected: of one shape, on the host.
        tolerance: largest absolute difference of an entry that rounding explains.
    """
    if actual.shape != expected.shape:
        raise ValueError(f"{tensor}: shape {tuple(actual.shape)} is compared with {tuple(expected.shape)}")
    if not actual.numel():
        return Stage(stage, 0.0, tolerance, tensor)
    gaps = (actual.double() - expected.double()).abs()
    place = int(gaps.flatten().argmax())  # of NaN, if there is one
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(place), actual.shape))
    values = [float(each.flatten()[place]) for each in (gaps, expected, actual)]
    is_coarse = tolerance > COARSE * float(expected.abs().max())
    return Stage(stage, values[0], tolerance, tensor, index, values[1], values[2], is_coarse)


def worst_of(stages: Iterable[Stage]) -> Stage:
    """Return of the tensors of a stage the one whose error takes the largest share of its tolerance."""
    stages = list(stages)
    worst = max(stages, key=lambda stage: stage.share)
    return replace(worst, is_coarse=any(stage.is_coarse for stage in stages))


def first_difference(stages: Iterable[Stage]) -> Stage | None:
    """Return the first stage whose error rounding does not explain."""
    return next((stage for stage in stages if not stage.passed), None)


def table(stages: Iterable[Stage]) -> str:
    """Return a line per stage: largest error, tolerance, and its share; then the verdict."""
    stages = list(stages)
    width = max(len(stage.name) for stage in stages)
    lines = [f"{'stage':{width}}  {'error':>8}  {'tolerance':>9}  {'share':>6}"]
    for stage in stages:
        mark = "  DIFFERS" if not stage.passed else "  coarse" if stage.is_coarse else ""
        lines.append(f"{stage.name:{width}}  {stage.error:8.2g}  {stage.tolerance:9.2g}  {stage.share:6.2f}{mark}")
    return "\n".join([*lines, verdict(stages)])


def verdict(stages: Iterable[Stage]) -> str:
    """Return whether rounding explains every difference, or the first stage that differs, its tensor and place."""
    stages = list(stages)
    first = first_difference(stages)
    if first is None:
        coarse = [stage.name for stage in stages if stage.is_coarse]
        hidden = f"; it would hide a mistake, too, in {', '.join(coarse)}" if coarse else ""
        return f"rounding explains every difference{hidden}"
    place = f"[{', '.join(map(str, first.index))}]" if first.index else ""
    values = "" if math.isnan(first.expected) else f", {first.actual:.6g} instead of {first.expected:.6g}"
    return f"first difference: {first.name}" + (f", in {first.tensor}{place}{values}" if first.tensor else "")


def as_json(stages: Iterable[Stage]) -> dict[str, object]:
    """Return the stages as values of JSON; a number that is not finite is a string."""
    stages = list(stages)
    first = first_difference(stages)
    return {
        "passed": first is None,
        "first_difference": None if first is None else first.name,
        "stages": [jsonable(asdict(stage) | {"passed": stage.passed}) for stage in stages],
    }
