"""AdamW over the trainable parameters, the learning rate of each update, the clipping of gradients, and a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hwgrpo_backends.device import fuses_adamw
from torch import nn

from hwgrpo.models.meta_device import full_shape
from hwgrpo.models.vision import vision_parameters
from hwgrpo.training.strategies.held_adamw import HeldAdamW, gradient_of
from hwgrpo.training.strategies.muon import muon_adamw

SCALE = "lr_scale"
"""Key of a group whose learning rate is this times the text model's."""

PIECE = 2**14
"""Entries whose squares torch sums without loss on a CPU."""


def build_optimizer(
    module: nn.Module, optim: Any, *, separate_masters: bool = False, offload: str = "none"
) -> torch.optim.Optimizer:
    """Return the optimizer of the parameters that need gradients, AdamW by default; norms and biases do not decay.

    Args:
        module: the policy; its trainable parameters must be fp32, since a step of lr 1e-6 is below bf16's resolution.
        optim: the `optim` section of the configuration.
        separate_masters: fp32 masters exist outside the parameters, which may then have the compute dtype.
        offload: `trainer.offload`.
    """
    trainable = [p for p in module.parameters() if p.requires_grad]
    assert trainable, "no parameter is trainable"
    masters = separate_masters or all(p.dtype == torch.float32 for p in trainable)
    assert masters, "trainable parameters are fp32 masters"
    vision = _vision_parameters(module) if optim.vision_lr is not None else frozenset()
    groups: list[dict[str, Any]] = []
    for seen in (False, True) if vision else (False,):
        part = [p for p in trainable if (id(p) in vision) == seen]
        rate = {SCALE: optim.vision_lr / optim.lr} if seen else {}
        matrices = [p for p in part if len(full_shape(p)) >= 2]
        others = [p for p in part if len(full_shape(p)) < 2]
        groups += [
            {"params": matrices, "weight_decay": optim.weight_decay, **rate},
            {"params": others, "weight_decay": 0.0, **rate},
        ]
    if optim.name == "muon":
        return muon_adamw(trainable, module, optim, fused=fuses_adamw(trainable[0].device.type) or None)
    device, in_8_bits = trainable[0].device.type, optim.name == "adamw_8bit"
    held: dict[str, Any] = {}
    if in_8_bits or offload != "none":
        held = {"on_host": offload != "none", "in_8_bits": in_8_bits, "gradients_on_host": offload == "gradients"}
    return (HeldAdamW if held else torch.optim.AdamW)(
        [group for group in groups if group["params"]],
        lr=optim.lr,
        betas=(optim.betas[0], optim.betas[1]),
        eps=optim.eps,
        # counters of held states are in host memory, where a fused step on a GPU does not read them
        fused=(fuses_adamw(device) and (not held or device == "cpu")) or None,
        **held,
    )


def _vision_parameters(policy: Any) -> frozenset[int]:
    """Return the `id` of each parameter of a vision-language model's tower and projector."""
    return frozenset(id(parameter) for _, _, parameter in vision_parameters(policy.base))


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the text model's groups, and of others in proportion."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get(SCALE, 1.0)


def learning_rate(optim: Any, update: int, total_updates: int) -> float:
    """Return the learning rate of an update.

    Args:
        optim: the `optim` section of the configuration.
        update: 0 for the first update of the run.
        total_updates: updates of the full run.
    """
    warmup = optim.warmup_steps or math.ceil(optim.warmup_ratio * total_updates)
    if update < warmup:
        return optim.lr * (update + 1) / (warmup + 1)
    if optim.schedule == "constant":
        return optim.lr
    progress = min(1.0, (update - warmup) / max(1, total_updates - warmup))
    shape = {"linear": 1 - progress, "cosine": 0.5 * (1 + math.cos(math.pi * progress))}[optim.schedule]
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * shape)


class Stepping:
    """Ordinary backward and optimizer step; see `Strategy` for the methods."""

    optimizer: torch.optim.Optimizer

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self, lr: float) -> None:
        set_learning_rate(self.optimizer, lr)
        self.optimizer.step()
        self.discard_gradients()

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the gradient of this rank's elements of a parameter, on its device or the host; None: it has none."""
        return gradient_of(self.optimizer, parameter)

    def set_zero_gradient(self, parameter: torch.Tensor) -> None:
        """Give a parameter without a gradient one of zeros."""
        parameter.grad = torch.zeros_like(parameter)
        if isinstance(self.optimizer, HeldAdamW) and self.optimizer.host_gradients is not None:
            self.optimizer.host_gradients.add(parameter)

    def discard_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)


def total_norm(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the norm of all entries of tensors, 0-d, in their dtype.

    On a CPU torch (2.13) sums the squares of one fp32 tensor in a few running sums, which loses 0.5 % of the norm of
    70 million normal numbers: there it is that of pieces of at most `PIECE` entries.
    """
    pieces = [
        piece for each in tensors for piece in (each.reshape(-1).split(PIECE) if each.device.type == "cpu" else (each,))
    ]
    return torch.nn.utils.get_total_norm(pieces)


def clip_by_norm(gradients: Sequence[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Clip gradients to a total norm of `max_norm` (0: do not clip); return the norm before."""
    norm = total_norm(gradients)
    if max_norm > 0 and gradients:
        torch._foreach_mul_(list(gradients), (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def clip_shards_by_norm(
    shards: Sequence[torch.Tensor],
    max_norm: float,
    sum_over_ranks: Callable[[Sequence[float]], list[float]],
    copies: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """Clip gradients to a total norm of `max_norm` (0: do not clip); return the norm over all ranks before.

    Args:
        shards: this rank's shards of the gradients; each element is on one rank only.
        max_norm: largest norm of the full gradient.
        sum_over_ranks: sums a few numbers over the ranks.
        copies: gradients whose elements are also in another rank's shards.
    """
    squared = float(total_norm(shards)) ** 2
    norm = torch.tensor(sum_over_ranks([squared])[0], dtype=torch.float64).sqrt().float()
    if max_norm > 0:
        for shard in (*shards, *copies):
            shard.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0).to(shard.device))
    return norm
