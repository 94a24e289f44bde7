"""Floating-point operations that a training pass needs, for model FLOPs utilisation.

Only necessary operations count, not recomputation under gradient checkpointing, padding or masked scores. A token that
a layout computes once for several sequences counts once.

Formula (Chowdhery et al. 2022, PaLM, appendix B; Kaplan et al. 2020, section 2.1): a token costs 2 FLOPs per activated
matrix weight in the forward, 2 more for the gradient of the activations and 2 more where the weight is trained: 6 per
parameter, or 4 for one that is frozen under adapters. A pair of a query and a visible key costs 4 x heads x head size
per layer in the forward (score and weighted value) and twice that in the backward; a causal token at position p sees
p + 1 keys, at most a window. The LM head counts for response tokens only. Norms, activations, embeddings and the
recurrences of state-space layers are ignored, as is usual. The tower of a vision-language model counts where a part of
it is trained: each pass encodes the images of its prompts then, once each (`hwgrpo.models.tower_work`). A frozen one
counts nothing: its features are remembered, in most settings since sampling.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hwgrpo.models.layer_values import head_sizes, largest_value, layer_values
from hwgrpo.models.lora import has_adapters
from hwgrpo.models.meta_device import full_shape
from hwgrpo.models.quantization import quantized_weights
from hwgrpo.models.router import EXPERTS
from hwgrpo.models.tower_work import BACKWARD, FORWARD, WEIGHT, TowerWork, tower_work
from hwgrpo.models.vision import vision_parameters
from hwgrpo.training.policy.micro_batch import MicroBatch
from hwgrpo.training.policy.policy_model import PolicyModel

ACTIVATED_EXPERTS = ("num_experts_per_tok", "top_k_experts", "moe_topk")
"""Names in model configurations for the number of experts, and of activated experts per token."""


@dataclass(frozen=True)
class TrainingWork:
    """FLOPs of a forward and a backward pass through a policy."""

    per_token: float
    """FLOPs per token in the layers' matrices."""
    per_response_token: float
    """FLOPs per response token in the LM head."""
    per_pair: tuple[tuple[int | None, float], ...]
    """(window, FLOPs per pair of a query and a visible key, over the layers with that window); None: no window."""

    tower: TowerWork | None = None
    """Of a tower or projector that is trained; None: each pass encodes no images."""

    def of(self, batch: MicroBatch) -> float:
        """Return the FLOPs of a micro-batch in host memory."""
        seen = batch.positions[batch.is_token] + 1
        pairs = sum(
            flops * int((seen if window is None else seen.clamp_max(window)).sum()) for window, flops in self.per_pair
        )
        encoded = {part.digest: part.tokens for images in batch.images for part in images.parts}
        of_images = sum(map(self.tower.of, encoded.values())) if self.tower else 0.0
        return self.per_token * len(seen) + self.per_response_token * len(batch.targets) + pairs + of_images


def training_work(policy: PolicyModel, *, with_reference: bool = False) -> TrainingWork | None:
    """Count a policy's FLOPs from its parameters, which may be sharded; see `model_work`.

    Args:
        policy: the policy.
        with_reference: each pass is also one forward of the reference, which is as large, without adapters in training.
    """
    work = model_work(policy.base, policy, policy.head.vocab)
    if work is not None and policy.images is not None and policy.images.trains:
        work = replace(work, tower=tower_work(policy.model, backward=True))
    if work is None or not with_reference:
        return work
    adapted = has_adapters(policy.model)

    def per_weight(parameter: torch.Tensor) -> int:
        return 0 if adapted and parameter.requires_grad else FORWARD

    forward = model_work(policy.base, policy, policy.head.vocab, per_weight)
    assert forward is not None, "counted before"
    return replace(
        work,
        per_token=work.per_token + forward.per_token,
        per_response_token=work.per_response_token + forward.per_response_token,
        per_pair=tuple((window, flops * 4 / 3) for window, flops in work.per_pair),
    )


def model_work(
    base: Any,
    module: nn.Module,
    vocab: int | None = None,
    per_weight: Callable[[torch.Tensor], int] | None = None,
) -> TrainingWork | None:
    """Count the FLOPs of a model, whose parameters may be sharded or on the meta device.

    Args:
        base: the transformers causal LM.
        module: module with its parameters, adapters included.
        vocab: rows of the LM head that have logits; None: all.
        per_weight: FLOPs per token and weight of a parameter; None: those of a forward and a backward pass.

    Returns:
        The FLOPs; None if a mixture of experts does not state its numbers of experts and of activated experts.
    """
    head = base.get_output_embeddings()
    text = base.config.get_text_config()
    skipped = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)} | {id(head.weight)}
    skipped |= {id(parameter) for _, _, parameter in vision_parameters(base)}
    # their parameter is the codes and scales, as bytes
    quantized = {id(parameter): codes.size for parameter, codes in quantized_weights(module).items()}
    per_weight = per_weight or _per_weight
    per_token = 0.0
    for name, parameter in module.named_parameters():
        shape = quantized.get(id(parameter), full_shape(parameter))
        if len(shape) < 2 or id(parameter) in skipped:
            continue
        share = 1.0
        if ".experts." in name:
            experts, activated = first_of(text, EXPERTS), first_of(text, ACTIVATED_EXPERTS)
            if experts is None or activated is None:
                return None
            share = activated / experts
        per_token += share * math.prod(shape) * per_weight(parameter)
    rows, hidden = full_shape(head.weight)
    return TrainingWork(per_token, min(rows, vocab or rows) * hidden * per_weight(head.weight), _attention(text))


def _per_weight(parameter: torch.Tensor) -> int:
    return FORWARD + BACKWARD + (WEIGHT if parameter.requires_grad else 0)


def first_of(text: Any, names: tuple[str, ...]) -> int | None:
    """Return the value of the first of these settings that a model has, the largest of its layers; None without one."""
    return next((int(value) for name in names if (value := largest_value(text, name))), None)


def _attention(text: Any) -> tuple[tuple[int | None, float], ...]:
    kinds = getattr(text, "layer_types", None)
    of_layers = zip(
        layer_values(text, "num_attention_heads"),
        head_sizes(text),
        layer_values(text, "qk_head_dim"),
        layer_values(text, "v_head_dim"),
        layer_values(text, "sliding_window"),
        strict=True,
    )
    slides = getattr(text, "use_sliding_window", True)
    per_pair: dict[int | None, float] = {}
    for layer, (heads, size, key, value, window) in enumerate(of_layers):
        kind = kinds[layer] if kinds else "sliding_attention" if slides else "full_attention"
        if not heads or kind not in ("full_attention", "sliding_attention"):
            continue
        seen = window if kind == "sliding_attention" else None
        flops = 3.0 * 2 * heads * ((key or size) + (value or size))  # forward, and twice that backward
        per_pair[seen] = per_pair.get(seen, 0.0) + flops
    return tuple(per_pair.items())
