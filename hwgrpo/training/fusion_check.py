"""Startup check of fused modules on the whole model: hidden states, and gradients through all layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hwgrpo.models.layers import decoder_layers
from hwgrpo.models.lm_head import backbone
from hwgrpo.models.meta_device import full_shape
from hwgrpo.models.placeholders import placeholder_ids
from hwgrpo.models.rounding import DRAWS, check_ids, embeddings_rounded_once, find_excess, relative_differences
from hwgrpo.training.policy.layout_check import TOLERANCE
from hwgrpo.training.policy.policy_model import PolicyModel

ROWS, TOKENS = 2, 8


@dataclass(frozen=True)
class Passes:
    """One forward and backward pass over a few tokens, on the host."""

    hidden: Tensor
    """[16, H], the last hidden states."""
    gradients: dict[str, Tensor]
    """[n, H] each: of the embeddings, a row per token, and of every trained norm and bias, one row."""

    def outputs(self) -> dict[str, Tensor]:
        """Return all tensors by a readable name."""
        return {
            "its hidden states": self.hidden,
            **{f"its gradient of {name}": g for name, g in self.gradients.items()},
        }


def run_passes(policy: PolicyModel, device: torch.device) -> Passes:
    """Run a model forward and backward on a few tokens, one layer at a time backward.

    Only vectors have their gradients made, and the activations of one layer are stored at a time: so large models fit,
    and those whose layers go to the device one by one.

    Args:
        policy: on its device, or its layers come there when they are called.
        device: device that computes.
    """
    embeddings: Any = policy.base.get_input_embeddings()
    ids = (
        check_ids(full_shape(embeddings.weight)[0], ROWS * TOKENS, placeholder_ids(policy.base.config))
        .view(ROWS, TOKENS)
        .to(device)
    )
    layers = decoder_layers(policy.base)
    gradients: dict[str, Tensor] = {}
    with _evaluated(policy), policy.autocast(device):
        with torch.no_grad(), _recorded(layers) as calls:
            hidden = backbone(policy.base)(input_ids=ids, use_cache=False).last_hidden_state
        signal = None
        names = {id(layer): name for name, layer in policy.base.named_modules()}
        for layer, args, options in reversed(calls):
            with torch.enable_grad():
                leaf = args[0].detach().requires_grad_()
                output = layer(leaf, *args[1:], **options)
                output = output if isinstance(output, Tensor) else output[0]
                signal = _wave(output) if signal is None else signal
                vectors = {name: p for name, p in layer.named_parameters() if p.ndim == 1 and p.requires_grad}
                signal, *found = torch.autograd.grad(output, [leaf, *vectors.values()], signal, materialize_grads=True)
            for name, gradient in zip(vectors, found, strict=True):
                gradients[f"{names[id(layer)]}.{name}"] = gradient[None].cpu().float()
        if signal is not None:
            gradients["the embeddings"] = signal.flatten(0, 1).cpu().float()
    return Passes(hidden.flatten(0, 1).cpu().float(), gradients)


def reason_against(policy: PolicyModel, device: torch.device, plain: Passes, fused: Passes) -> str | None:
    """Return how a model with fused modules differs from the plain one by more than rounding, or None.

    Args:
        policy: without fused modules; computes again where the effect of rounding has to be measured.
        device: device that computes.
        plain, fused: passes of the model without and with fused modules.
    """
    floor = TOLERANCE[policy.compute_dtype]
    draws: list[Passes] = []

    def rounding(name: str) -> Tensor:
        while len(draws) < DRAWS:
            with embeddings_rounded_once(policy.base.get_input_embeddings(), policy.compute_dtype, len(draws)):
                draws.append(run_passes(policy, device))
        return torch.stack([relative_differences(each.outputs()[name], expected[name]) for each in draws]).amax(0)

    found, expected = fused.outputs(), plain.outputs()
    for name in expected:
        excess = find_excess(found[name], expected[name], floor, lambda name=name: rounding(name))
        if excess is not None:
            return f"of the whole model {name} would differ by {excess}"
    return None


def _wave(like: Tensor) -> Tensor:
    return torch.sin(torch.arange(like.numel(), device=like.device).float() * 1.7).view(like.shape).to(like.dtype)


@contextmanager
def _evaluated(policy: PolicyModel) -> Iterator[None]:
    modes = [(module, module.training) for module in policy.modules()]
    policy.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def _recorded(layers: Sequence[nn.Module]) -> Iterator[list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]]]:
    """Record the calls of layers, in order."""
    calls: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = []

    def record(module: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if not args:  # the hidden states by name
            options = dict(options)
            args = (options.pop("hidden_states"),)
        calls.append((module, args, options))

    hooks = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in layers]
    try:
        yield calls
    finally:
        for hook in hooks:
            hook.remove()
