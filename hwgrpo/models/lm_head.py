"""From hidden states to logits: a causal LM's head as it is read here, checked against the model's own logits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hwgrpo.errors import ConfigError

MULTIPLIERS = ("logit_scale", "lm_head_multiplier")
"""Settings that logits are multiplied by (Cohere; Falcon-H1)."""
DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
"""Settings that logits are divided by (Granite; Inkling)."""
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Bounds c in c tanh(logits / c) (Gemma, NanoChat; RecurrentGemma; xLSTM)."""


@dataclass(frozen=True)
class HeadReading:
    """What stands between `weight @ hidden + bias` and a model's logits: a factor, then a soft-cap."""

    scale: float = 1.0
    softcap: float | None = None
    vocab: int | None = None
    """Rows of the weight that have logits; the rest pads the vocabulary. None: all."""

    def weight(self, head: Any) -> torch.Tensor:
        """Return the rows [V, H] of a head's weight that have logits."""
        return head.weight if self.vocab is None else head.weight[: self.vocab]

    def bias(self, head: Any) -> torch.Tensor | None:
        """Return the bias [V] of a head, if it has one."""
        bias = getattr(head, "bias", None)
        return bias if bias is None or self.vocab is None else bias[: self.vocab]

    def logits(self, hidden: torch.Tensor, head: Any) -> torch.Tensor:
        """Return logits [..., V] fp32 of hidden states [..., H]."""
        logits = nn.functional.linear(hidden, self.weight(head), self.bias(head)).float() * self.scale
        return torch.tanh(logits / self.softcap) * self.softcap if self.softcap else logits


def causal_lm(model: Any) -> Any:
    """Return the transformers causal LM, without peft's wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def backbone(base: Any) -> nn.Module:
    """Return the part of a causal LM that ends in hidden states; Llama 4 names it otherwise than its class says."""
    return base.model if base.base_model is base else base.base_model


def read_head(model: Any) -> HeadReading:
    """Find how a model forms its logits, by its settings and by its own logits of a few tokens.

    A setting's name does not settle what is done with it (`logits_scaling` divides in Granite, multiplies in
    HyperCLOVA X, and some carry a setting they never use), so the first reading that gives the model's logits is it.

    Args:
        model: a transformers causal LM, or one wrapped by peft; its mode (training or not) is left as it is.

    Raises:
        ConfigError: no reading does, the head is none that can be read, or training would draw noise that sampling
            has not.
    """
    base = causal_lm(model)
    name = type(base).__name__
    head = base.get_output_embeddings()
    if head is None or not hasattr(head, "weight"):
        raise ConfigError(f"{name} has no output embeddings with a weight; a causal LM with a linear LM head is needed")
    if hasattr(head, "base_layer"):
        raise ConfigError(
            f"{name}: LoRA on the LM head ({type(head).__name__}) is not supported; "
            "take the head out of model.lora.target_modules"
        )
    ids = torch.arange(1, 9, device=head.weight.device)[None] % head.weight.shape[0]
    was_training = model.training
    model.eval()
    with torch.no_grad():
        expected = base(input_ids=ids, use_cache=False).logits.float()
        hidden = backbone(base)(input_ids=ids, use_cache=False).last_hidden_state
        if hidden.shape[-1] != head.weight.shape[1]:
            raise ConfigError(
                f"{name}: its LM head takes {head.weight.shape[1]} numbers per token, its hidden states have "
                f"{hidden.shape[-1]}; an architecture with a layer between the two is not supported"
            )
        tolerance = 1e-4 if head.weight.dtype == torch.float32 else 1e-2
        reading, gap = None, float("inf")
        for candidate in _readings(base.config.get_text_config(), head.weight.shape[0], expected.shape[-1]):
            apart = _apart(candidate.logits(hidden, head), expected)
            gap = min(gap, apart)
            if apart <= tolerance:
                reading = candidate
                break
        model.train()
        noise = 0.0 if _drops_out(model) else _apart(backbone(base)(input_ids=ids, use_cache=False)[0], hidden)
    model.train(was_training)
    if reading is None:
        raise ConfigError(
            f"{name}: its logits differ from hidden states times LM head by {gap:.3g} of the largest; "
            "this architecture does something between the two that is not supported"
        )
    if noise > tolerance:
        raise ConfigError(
            f"{name}: in training its hidden states differ from those in sampling by {noise:.3g} of the largest, since "
            "it draws noise that is no dropout layer (dropout within its code, or a router's jitter); "
            "set that to 0 in its config.json"
        )
    return reading


def _readings(config: Any, rows: int, vocab: int) -> Iterator[HeadReading]:
    """Yield what a configuration may mean, the likeliest first."""
    scale = 1.0
    for name in MULTIPLIERS:
        scale *= _number(config, name) or 1.0
    for name in DIVISORS:
        scale /= _number(config, name) or 1.0
    softcap = next(filter(None, (_number(config, name) for name in SOFTCAPS)), None)
    for cap in dict.fromkeys((softcap, None)):
        for factor in dict.fromkeys((scale, 1 / scale, 1.0)):
            yield HeadReading(factor, cap, vocab if vocab < rows else None)


def _number(config: Any, name: str) -> float | None:
    value = getattr(config, name, None)
    return float(value) if isinstance(value, (int, float)) else None


def _drops_out(model: nn.Module) -> bool:
    return any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())


def _apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest entry; infinite where there are numbers that are none."""
    if found.shape != expected.shape:
        return float("inf")
    gap = float((found.float() - expected.float()).abs().max() / expected.float().abs().max().clamp_min(1e-12))
    return gap if gap == gap else float("inf")
