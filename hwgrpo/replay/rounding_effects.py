"""How far rounding moves the results of a captured step on this machine: the passes, run again with other roundings.

In each draw the outputs of embeddings, layers and their innermost modules are changed at random by up to one rounding
of the compute dtype, up or down, and with them their gradients. So is each row of the LM head, and by that each logit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from hwgrpo.models.layers import decoder_layers
from hwgrpo.replay.results import Passes
from hwgrpo.training.policy.policy_model import PolicyModel

DRAWS = 4
"""Draws of which the largest effect counts."""
NOISE = 1_000_003
"""Random numbers of a draw, used again and again from random places: a prime, so that rows get different ones."""


@dataclass
class Effects:
    """The largest effects of rounding, in absolute differences."""

    results: dict[str, float] = field(default_factory=dict)
    """Of any entry of a result of `Passes.run`, by its name."""
    gradients: dict[str, float] = field(default_factory=dict)
    """Of any entry of a parameter's gradient."""
    norms: dict[str, float] = field(default_factory=dict)
    """Norm of the difference of a parameter's gradient, by which its norm moves at most."""
    norm: float = 0.0
    """The same of the full gradient."""


def measure(
    passes: Passes, exact: Mapping[str, torch.Tensor], gradients: Mapping[str, torch.Tensor], unit: float
) -> Effects:
    """Run the passes with other roundings.

    Args:
        passes: the passes; weights and generators are afterwards as before.
        exact: what `Passes.run` returned.
        gradients: those of that run, by parameter.
        unit: relative size of one rounding.
    """
    effects = Effects(dict.fromkeys(exact, 0.0), dict.fromkeys(gradients, 0.0), dict.fromkeys(gradients, 0.0))
    update, reference = passes.model.update, passes.model.reference
    policies = [update.policy, *([reference.policy] if reference is not None and reference.kind == "copy" else [])]
    for seed in range(DRAWS):
        with rounded(policies, unit, seed):
            results = passes.run()
        for name, values in results.items():
            effects.results[name] = max(effects.results[name], largest(values - exact[name]))
        squares = 0.0
        for name, gradient in passes.gradients() if gradients else ():
            gap = gradient - gradients[name]
            norm = float(torch.linalg.vector_norm(gap))
            effects.gradients[name] = max(effects.gradients[name], largest(gap))
            effects.norms[name] = max(effects.norms[name], norm)
            squares += norm**2
        effects.norm = max(effects.norm, math.sqrt(squares))
        passes.model.strategy.discard_gradients()
    return effects


def largest(values: torch.Tensor) -> float:
    """Return the largest absolute value, 0 of none."""
    return float(values.abs().max()) if values.numel() else 0.0


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
