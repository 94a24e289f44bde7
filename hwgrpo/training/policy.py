"""The policy as one module: backbone, LM head and loss inside a single forward that strategies can wrap."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from hwgrpo_kernels import TokenLogprob, TokenLoss, linear_logprob, linear_token_loss
from torch import nn

from hwgrpo.errors import ConfigError
from hwgrpo.models import branched_attention
from hwgrpo.models.router import router_loss
from hwgrpo.training.layouts import MicroBatch

LossFn = Callable[[Any, Mapping[str, torch.Tensor]], tuple[torch.Tensor, dict[str, torch.Tensor]]]


@dataclass(frozen=True)
class HeadOptions:
    """How logits are formed and streamed."""

    temperature: float = 1.0
    chunk_rows: int | None = None
    logits_dtype: torch.dtype | None = None


class PolicyModel(nn.Module):
    """A causal LM whose forward ends in per-token losses or log-probs instead of logits.

    Args:
        model: a transformers causal LM, or one wrapped by peft.
        compute_dtype: dtype of matrix products; parameters stay fp32 masters and autocast does the rest.
        options: temperature of the log-probs, and how logits are streamed.

    Raises:
        ConfigError: the model's logits are not what hidden states times head give (an architecture with a step between
            them that this module does not know).
    """

    def __init__(self, model: Any, *, compute_dtype: torch.dtype, options: HeadOptions) -> None:
        super().__init__()
        self.model = model
        self.compute_dtype = compute_dtype
        self.options = options
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        text_config = base.config.get_text_config()
        self.softcap: float | None = getattr(text_config, "final_logit_softcapping", None)
        self.logit_scale = float(getattr(text_config, "logit_scale", None) or 1.0) / float(
            getattr(text_config, "logits_scaling", None) or 1.0
        )
        self.hidden_size = int(text_config.hidden_size)
        self._check_head()

    @property
    def base(self) -> Any:
        """The transformers causal LM, without peft's wrapper."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    def forward(
        self, batch: MicroBatch, loss_fn: LossFn | None = None, router_weight: float = 0.0
    ) -> TokenLoss | TokenLogprob:
        """Run backbone, head and loss.

        Args:
            batch: N response tokens, on this model's device.
            loss_fn: `loss_fn(stats, rows) -> (loss_N, metrics)`; None scores only.
            router_weight: factor of the load-balancing loss, which is added to the loss; 0 leaves it out.

        Returns:
            With a loss function, its `TokenLoss`, in whose sums `router_loss` is N times the load-balancing loss;
            without, its `TokenLogprob`.
        """
        output = self._backbone(batch, output_router_logits=True) if router_weight else self._backbone(batch)
        hidden = output.last_hidden_state.to(self.compute_dtype).flatten(0, 1)[batch.hidden_rows]
        head = self.base.get_output_embeddings()
        common: dict[str, Any] = {
            "bias": getattr(head, "bias", None),
            "temperature": self.options.temperature,
            "softcap": self.softcap,
            "logit_scale": self.logit_scale,
            "chunk_rows": self.options.chunk_rows,
            "logits_dtype": self.options.logits_dtype,
        }
        if loss_fn is None:
            return linear_logprob(hidden, head.weight, batch.targets, **common)
        result = linear_token_loss(
            hidden,
            head.weight,
            batch.targets,
            loss_fn,
            rows=batch.signals,
            scope=getattr(loss_fn, "scope", "token"),
            cu_seqlens=batch.cu_seqlens,
            **common,
        )
        if not router_weight:
            return result
        balance = router_loss(
            output.router_logits, batch.is_token, self.base.config.get_text_config().num_experts_per_tok
        )
        sums = result.sums | {"router_loss": balance.detach() * len(batch.targets)}
        return replace(result, loss=result.loss + router_weight * balance, sums=sums)

    def hidden_states(self, batch: MicroBatch) -> torch.Tensor:
        """Return the last hidden states [B, L, H] in the compute dtype."""
        return self._backbone(batch).last_hidden_state.to(self.compute_dtype)

    def _backbone(self, batch: MicroBatch, **options: Any) -> Any:
        """Run the model up to the LM head; `options` go to its forward."""
        mask, branches = batch.attention_mask, batch.branches
        if mask is not None:
            # transformers adds a 4-d mask to the scores as it is: 0 where attention is allowed, else -inf-like
            dtype = self.compute_dtype
            mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
        elif branches is not None:
            branched_attention.use_in(self.base)
            options["branches"] = branches
            mask = torch.zeros(1, 1, 1, 1, device=branches.place.device)  # four dimensions: transformers builds none
        with self._autocast(batch.input_ids.device):
            return self.base.base_model(
                input_ids=batch.input_ids,
                attention_mask=mask,
                position_ids=batch.position_ids,
                use_cache=False,
                **options,
            )

    def _autocast(self, device: torch.device) -> Any:
        if self.compute_dtype == torch.float32:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.compute_dtype)

    def _check_head(self) -> None:
        """Compare our logits with the model's own on three tokens: a head we misread would train the wrong thing."""
        name = type(self.base).__name__
        head = self.base.get_output_embeddings()
        if head is None or not hasattr(head, "weight"):
            raise ConfigError(
                f"{name} has no output embeddings with a weight; a causal LM with a linear LM head is needed"
            )
        if hasattr(head, "base_layer"):
            raise ConfigError(
                f"{name}: LoRA on the LM head ({type(head).__name__}) is not supported; "
                "take the head out of model.lora.target_modules"
            )
        device = head.weight.device
        ids = torch.arange(1, 4, device=device)[None] % head.weight.shape[0]
        was_training = self.model.training
        self.model.eval()
        with torch.no_grad():
            theirs = self.base(input_ids=ids, use_cache=False).logits.float()
            hidden = self.base.base_model(input_ids=ids, use_cache=False).last_hidden_state
            ours = (
                torch.nn.functional.linear(hidden, head.weight, getattr(head, "bias", None)).float() * self.logit_scale
            )
            if self.softcap:
                ours = torch.tanh(ours / self.softcap) * self.softcap
        self.model.train(was_training)
        gap = (ours - theirs).abs().max().item()
        if not gap <= 1e-3 * max(1.0, theirs.abs().max().item()):
            raise ConfigError(
                f"{name}: its logits differ from hidden states times LM head by {gap:.3g}; "
                "this architecture does something between the two that is not supported"
            )
