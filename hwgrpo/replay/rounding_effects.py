"""How far rounding moves the results of a captured step on this machine: the passes, run again with other roundings.

They are first run again as they are: what a device changes from run to run is no effect of rounding.
In each draw the outputs of embeddings, layers and their innermost modules are changed at random by up to one rounding
of the compute dtype, up or down, and with them their gradients. So is each row of the LM head, and by that each logit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hwgrpo.models.layers import decoder_layers
from hwgrpo.replay.results import NORM, Passes, gradient_of, norm_of
from hwgrpo.support.stage_differences import DRAWS, Stage, largest, least_tolerance, rounding_tolerance, worst_of
from hwgrpo.training.policy.policy_model import PolicyModel
from hwgrpo.training.strategies.optimizer import total_norm

REPEATABILITY = "repeatability"
REPEATS = 2
"""Further runs of the same passes: in one alone, little may differ by chance."""
NOISE = 1_000_003
"""Random numbers of a draw, used again and again from random places: a prime, so that rows get different ones."""


@dataclass(frozen=True)
class Effects:
    """What rounding explains."""

    tolerances: Mapping[str, float]
    """Tensor -> largest error that rounding explains."""
    repeatability: Stage | None
    """What changes when the same passes are run again; None: there are no passes."""


def measure(
    passes: Passes,
    exact: Mapping[str, torch.Tensor],
    gradients: Mapping[str, torch.Tensor],
    unit: float,
    summands: Mapping[str, torch.Tensor],
) -> Effects:
    """Run the passes again, as they are and with other roundings.

    What changes from run to run is subtracted from the effects of rounding, which contain it. Where it exceeds what is
    left of them in any tensor, these are no effects of rounding, and all tensors have the least tolerance.

    Args:
        passes: the passes; weights and generators are afterwards as before.
        exact: what `Passes.run` returned.
        gradients: those of that run, by parameter.
        unit: relative size of one rounding.
        summands: of each tensor that is compared, for its least tolerance.
    """
    update, reference = passes.model.update, passes.model.reference
    policies = [update.policy, *([reference.policy] if reference is not None and reference.kind == "copy" else [])]
    again = [_changes(passes, exact, gradients) for _ in range(REPEATS)]
    draws = []
    for seed in range(DRAWS):
        with rounded(policies, unit, seed):
            draws.append(_changes(passes, exact, gradients))
    tolerances, stages = {}, []
    for name in again[0]:
        repeat, least = max(changes[name] for changes in again), least_tolerance(summands[name])
        effects = torch.tensor([draw[name] for draw in draws], dtype=torch.float64)
        tolerances[name] = explained = rounding_tolerance((effects - repeat).clamp_min(0).tolist(), summands[name])
        stages.append(Stage(REPEATABILITY, repeat, explained if math.isfinite(explained) else least, name))
    if not stages:
        return Effects({}, None)
    repeatability = worst_of(stages)
    if not repeatability.passed:
        tolerances = {name: least_tolerance(summands[name]) for name in tolerances}
    return Effects(tolerances, repeatability)


def _changes(
    passes: Passes, exact: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """Run the passes; return the largest difference from another run, and the norm of that of each gradient.

    A gradient's norm moves by at most the norm of its change.
    """
    changes = {name: _gap(values, exact[name]) for name, values in passes.run().items()}
    norms = []
    for name, gradient in passes.gradients() if gradients else ():
        changes[gradient_of(name)] = _gap(gradient, gradients[name])
        norms.append(float(total_norm([gradient - gradients[name]])))
        changes[norm_of(name)] = norms[-1]
    if gradients:
        changes[NORM] = math.hypot(*norms)
    passes.model.strategy.discard_gradients()
    return changes


def _gap(actual: torch.Tensor, expected: torch.Tensor) -> float:
    same = (actual == expected) | (actual.isnan() & expected.isnan())  # infinities, too
    return largest((actual - expected).masked_fill(same, 0))


@contextmanager
def rounded(policies: Sequence[PolicyModel], unit: float, seed: int) -> Iterator[None]:
    """Change the outputs of models' modules by up to `unit` within the block.

    Args:
        policies: models, each changed in its own way.
        unit: relative size of one rounding.
        seed: of the changes.
    """
    with ExitStack() as stack:
        for number, policy in enumerate(policies):
            stack.enter_context(_rounded(policy.base, unit, seed + DRAWS * number))
        yield


@contextmanager
def _rounded(base: Any, unit: float, seed: int) -> Iterator[None]:
    generator = torch.Generator().manual_seed(seed)
    head = base.get_output_embeddings()
    device = head.weight.device
    noise = (2 * torch.rand(NOISE, generator=generator) - 1).to(device)

    def change(module: nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (change(module, inputs, output[0]), *output[1:]) if output else output
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return output
        start = int(torch.randint(NOISE, (), generator=generator))
        draws = noise.repeat(-(-(start + output.numel()) // NOISE))[start : start + output.numel()]
        return (output.float() * (1 + unit * draws.view(output.shape))).to(output.dtype)

    layers = {*decoder_layers(base)}
    places = [m for m in base.modules() if m is not head and (m in layers or not [*m.children()])]
    hooks = [module.register_forward_hook(change) for module in places]
    weight = head.weight if head.weight.is_floating_point() else None
    kept = None if weight is None else weight.detach().clone()
    try:
        if weight is not None:
            rows = (2 * torch.rand(len(weight), 1, generator=generator) - 1).to(weight)
            with torch.no_grad():
                weight.mul_(1 + unit * rows)
        yield
    finally:
        for hook in hooks:
            hook.remove()
        if weight is not None and kept is not None:
            with torch.no_grad():
                weight.copy_(kept)
