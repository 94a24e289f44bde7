"""From hidden states to logits: detect how a causal LM's head scales them, checked against its own logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hwgrpo.errors import ConfigError
from hwgrpo.models.placeholders import ban, placeholder_ids
from hwgrpo.models.rounding import check_ids

MULTIPLIERS = ("logit_scale", "lm_head_multiplier")
"""Config fields that logits are multiplied by (Cohere; Falcon-H1)."""
DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
"""Config fields that logits are divided by (Granite; Inkling)."""
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Bounds c in c tanh(logits / c) (Gemma, NanoChat; RecurrentGemma; xLSTM)."""


@dataclass(frozen=True)
class HeadSpec:
    """The map from `weight @ hidden + bias` to a model's logits: a factor, then a soft-cap."""

    scale: float = 1.0
    softcap: float | None = None
    vocab: int | None = None
    """Rows of the weight with logits; further rows are padding of the vocabulary. None: all."""
    banned: tuple[int, ...] = ()
    """Tokens that no response has (`placeholders`)."""

    def weight(self, head: Any) -> torch.Tensor:
        """Return the rows [V, H] of a head's weight that have logits."""
        return head.weight if self.vocab is None else head.weight[: self.vocab]

    def bias(self, head: Any) -> torch.Tensor | None:
        """Return the bias [V] of a head, with that of banned tokens; or None."""
        bias = getattr(head, "bias", None)
        bias = bias if bias is None or self.vocab is None else bias[: self.vocab]
        if not self.banned:
            return bias
        weight = self.weight(head)
        none = ban(torch.zeros(len(weight), device=weight.device), [*self.banned])
        return none if bias is None else bias + none

    def logits(self, hidden: torch.Tensor, head: Any) -> torch.Tensor:
        """Return logits [..., V] fp32 of hidden states [..., H]."""
        logits = _linear_in_fp32(hidden, self.weight(head), self.bias(head)) * self.scale
        return torch.tanh(logits / self.softcap) * self.softcap if self.softcap else logits


def causal_lm(model: Any) -> Any:
    """Return the transformers causal LM, without peft's wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def backbone(base: Any) -> nn.Module:
    """Return a causal LM's backbone, without head; Llama 4's attribute differs from its `base_model_prefix`."""
    return base.model if base.base_model is base else base.base_model


def detect_head(model: Any, compute_dtype: torch.dtype = torch.float32) -> HeadSpec:
    """Detect how a model forms its logits, from its config and its own logits of a few tokens.

    A config field's name does not determine its use (`logits_scaling` divides in Granite, multiplies in HyperCLOVA X,
    and some models ignore theirs), so the first candidate that reproduces the model's logits is returned.

    Args:
        model: a transformers causal LM, or one wrapped by peft; its training mode is restored.
        compute_dtype: dtype of its matrix products, but for the head's, which are computed in fp32 here.

    Raises:
        ConfigError: no candidate reproduces the logits, the head is unsupported, or the model draws noise in
            training.
    """
    base = causal_lm(model)
    name = type(base).__name__
    head = base.get_output_embeddings()
    if head is None or not hasattr(head, "weight"):
        raise ConfigError(f"{name} has no output embeddings with a weight; a causal LM with a linear LM head is needed")
    if hasattr(head, "base_layer"):
        raise ConfigError(
            f"{name}: LoRA on the LM head ({type(head).__name__}) is not supported; "
            "remove the head from model.lora.target_modules"
        )
    without = placeholder_ids(base.config)
    ids = check_ids(base.get_input_embeddings().weight.shape[0], 8, without).to(head.weight.device)[None]
    was_training = model.training
    model.eval()
    casts = compute_dtype != torch.float32 and any(p.dtype != torch.float32 for p in base.parameters())
    exact = replaced_forward(head, lambda hidden: _linear_in_fp32(hidden, head.weight, head.bias))
    exact_head = exact if casts and type(head) is nn.Linear else nullcontext()
    with torch.no_grad(), torch.autocast(ids.device.type, compute_dtype, enabled=casts), exact_head:
        expected = base(input_ids=ids, use_cache=False).logits.float()
        hidden = backbone(base)(input_ids=ids, use_cache=False).last_hidden_state
        if hidden.shape[-1] != head.weight.shape[1]:
            raise ConfigError(
                f"{name}: its LM head has input size {head.weight.shape[1]}, its hidden states have size "
                f"{hidden.shape[-1]}; an architecture with a layer between them is not supported"
            )
        tolerance = 1e-2 if isinstance(exact_head, nullcontext) and head.weight.dtype != torch.float32 else 1e-4
        spec, gap = None, float("inf")
        for candidate in _candidates(base.config.get_text_config(), head.weight.shape[0], expected.shape[-1]):
            difference = _relative_difference(candidate.logits(hidden, head), expected)
            gap = min(gap, difference)
            if difference <= tolerance:
                spec = candidate
                break
        model.train()
        noise = (
            0.0
            if _drops_out(model)
            else _relative_difference(backbone(base)(input_ids=ids, use_cache=False)[0], hidden)
        )
    model.train(was_training)
    if spec is None:
        raise ConfigError(
            f"{name}: its logits differ from hidden states times LM head by {gap:.3g} of the largest; "
            "this architecture has an unsupported operation between them"
        )
    if without and spec.softcap is not None:
        raise ConfigError(
            f"{name} bounds its logits (final_logit_softcapping), so that tokens which stand for images could be "
            "sampled: a model that reads images and does so is not supported"
        )
    if noise > tolerance:
        raise ConfigError(
            f"{name}: its hidden states in training differ from those in sampling by {noise:.3g} of the largest, since "
            "it draws noise outside dropout layers (dropout within its code, or a router's jitter); "
            "set that to 0 in its config.json"
        )
    return replace(spec, banned=tuple(without))


@contextmanager
def replaced_forward(module: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """Make `function` a module's forward within the block."""
    own = vars(module).get("forward")
    module.forward = function
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def _linear_in_fp32(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        return nn.functional.linear(hidden.float(), weight.float(), None if bias is None else bias.float())


def _candidates(config: Any, rows: int, vocab: int) -> Iterator[HeadSpec]:
    """Yield the possible meanings of a config, the likeliest first."""
    scale = 1.0
    for name in MULTIPLIERS:
        scale *= _number(config, name) or 1.0
    for name in DIVISORS:
        scale /= _number(config, name) or 1.0
    softcap = next(filter(None, (_number(config, name) for name in SOFTCAPS)), None)
    for cap in dict.fromkeys((softcap, None)):
        for factor in dict.fromkeys((scale, 1 / scale, 1.0)):
            yield HeadSpec(factor, cap, vocab if vocab < rows else None)


def _number(config: Any, name: str) -> float | None:
    value = getattr(config, name, None)
    return float(value) if isinstance(value, (int, float)) else None


def _drops_out(model: nn.Module) -> bool:
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())


def _relative_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference relative to the largest entry; infinite for NaN or another shape."""
    if actual.shape != expected.shape:
        return float("inf")
    gap = float((actual.float() - expected.float()).abs().max() / expected.float().abs().max().clamp_min(1e-12))
    return gap if gap == gap else float("inf")
