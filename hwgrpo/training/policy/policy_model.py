"""The policy as one module: backbone, LM head and loss inside a single forward that strategies can wrap."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from hwgrpo_kernels import ReferenceHead, TokenLogprob, TokenLoss, linear_logprob, linear_token_loss, weight_operand
from torch import Tensor, nn

from hwgrpo.models import shared_prefix_masks, ulysses_attention
from hwgrpo.models.lm_head import HeadSpec, backbone, causal_lm, detect_head, replaced_forward
from hwgrpo.models.router import experts_per_token, router_loss
from hwgrpo.models.ulysses_attention import Exchange
from hwgrpo.models.vision import ImageEncoder, image_encoder
from hwgrpo.training.policy.micro_batch import MicroBatch
from hwgrpo.training.policy.sharding_checks import refuse_rounded, refuse_sharded, refuse_sharded_inside

LossFn = Callable[[Any, Mapping[str, torch.Tensor]], tuple[torch.Tensor, dict[str, torch.Tensor]]]

T = TypeVar("T")


@dataclass(frozen=True)
class HeadOptions:
    """Options of the LM head: temperature, and chunks of rows."""

    temperature: float = 1.0
    chunk_rows: int | None = None
    logits_dtype: torch.dtype | None = None


class PolicyModel(nn.Module):
    """A causal LM whose forward ends in per-token losses or log-probs instead of logits.

    DDP, FSDP2 and DeepSpeed wrap this module. FSDP2 may gather its layers and its LM head (with tied embeddings, both
    as one) separately, but no module between this one and those, because their forward is not called.

    Args:
        model: a transformers causal LM, or one wrapped by peft.
        compute_dtype: dtype of matrix products; parameters stay fp32 masters and autocast does the rest.
        options: temperature of the log-probs of batches without their own, and how logits are streamed.
        head: how the model forms its logits, if known; None: it is detected, and the model must have weights.

    Raises:
        ConfigError: the logits do not follow from hidden states and head in a known way, or the weights are sharded.
    """

    def __init__(
        self, model: Any, *, compute_dtype: torch.dtype, options: HeadOptions, head: HeadSpec | None = None
    ) -> None:
        super().__init__()
        refuse_sharded(model)
        self.model = model
        self.compute_dtype = compute_dtype
        self.options = options
        self.head = detect_head(model, compute_dtype) if head is None else head
        self.hidden_size = int(self.base.config.get_text_config().hidden_size)
        self.set_passes()

    @property
    def base(self) -> Any:
        """The transformers causal LM, without peft's wrapper."""
        return causal_lm(self.model)

    @property
    def images(self) -> ImageEncoder | None:
        """What encodes the images of prompts; None: the model reads text alone."""
        return image_encoder(self.model)

    def set_passes(self, *, head_operand: HeadOperand | None = None, final_gradients: bool = False) -> None:
        """Set how the strategy that wraps this module runs its passes.

        Args:
            head_operand: casts the head once per update, where weights are unsharded; None: in every pass.
            final_gradients: whether its backward does not multiply the loss.
        """
        self.head_operand, self.has_final_gradients = head_operand, final_gradients

    def forward(
        self,
        batch: MicroBatch,
        loss_fn: LossFn | None = None,
        router_weight: float = 0.0,
        *,
        reference: ReferenceHead | Tensor | None = None,
        visit: Callable[[ReferenceHead], None] | None = None,
        **statistics: bool,
    ) -> TokenLoss | TokenLogprob | Tensor:
        """Run backbone, head and loss.

        Args:
            batch: N response tokens, on this model's device.
            loss_fn: `loss_fn(stats, rows) -> (loss_N, metrics)`; None scores only.
            router_weight: factor of the load-balancing loss, which is added to the loss; 0 skips it.
            reference: the reference model's hidden states [N, H'] and head, for the loss's full KL; hidden states
                alone are for this policy's own head.
            visit: called in place of the head, with hidden states and head, whose weights are valid in the call only.
            statistics: `with_entropy` and `with_square_sum` of `linear_logprob`, when it scores only.

        Returns:
            With a loss function, its `TokenLoss`, in whose sums `router_loss` is N times the load-balancing loss;
            without, its `TokenLogprob`, or with `visit` the last hidden states [N, H] that predict the response tokens,
            in the compute dtype. Of a shard it is the rank's share: losses and sums add up over the group.

        Raises:
            ConfigError: a wrong way of sharding leaves weights sharded, or rounds the inputs of losses.
        """
        refuse_sharded_inside(self.model, self.base)
        refuse_rounded(batch.signals)
        output = self._backbone(batch, output_router_logits=True) if router_weight else self._backbone(batch)
        hidden = self._predicting(output, batch)
        head = self.base.get_output_embeddings()
        if visit is not None:
            return in_place_of_forward(head, lambda hidden: self._visit(hidden, head, visit), hidden)
        if loss_fn is None:
            return in_place_of_forward(head, lambda hidden: self._logprob(hidden, head, batch, **statistics), hidden)
        parts = in_place_of_forward(head, lambda hidden: self._loss(hidden, head, batch, loss_fn, reference), hidden)
        result = TokenLoss(*parts)
        if not router_weight:
            return result
        group, tokens = (batch.shard.group, batch.shard.total) if batch.shard else (None, len(batch.targets))
        balance = router_loss(output.router_logits, batch.is_token, experts_per_token(self.base), group)
        sums = result.sums | {"router_loss": balance.detach() * tokens}
        return replace(result, loss=result.loss + router_weight * balance, sums=sums)

    def _logprob(self, hidden: torch.Tensor, head: Any, batch: MicroBatch, **statistics: bool) -> TokenLogprob:
        weight = self.head.weight(head)
        operand = None if torch.is_grad_enabled() else self._operand(weight)
        if operand is not None and operand.dtype == self.compute_dtype:
            weight = operand
        return linear_logprob(hidden, weight, batch.targets, **statistics, **self._head_options(head, batch))

    def _visit(self, hidden: Tensor, head: Any, visit: Callable[[ReferenceHead], None]) -> Tensor:
        visit(ReferenceHead(hidden, self.head.weight(head), self.head.bias(head)))
        return hidden

    def _loss(
        self, hidden: Tensor, head: Any, batch: MicroBatch, loss_fn: LossFn, reference: ReferenceHead | Tensor | None
    ) -> tuple[Any, ...]:
        """Return the fields of a TokenLoss."""
        weight = self.head.weight(head)
        if isinstance(reference, Tensor):
            reference = ReferenceHead(reference, weight, self.head.bias(head))
        result = linear_token_loss(
            hidden,
            weight,
            batch.targets,
            loss_fn,
            rows=batch.signals,
            scope=getattr(loss_fn, "scope", "token"),
            cu_seqlens=batch.cu_seqlens,
            reference=reference,
            weight_operand_VH=self._operand(weight),
            final_gradients=self.has_final_gradients,
            **self._head_options(head, batch),
        )
        return tuple(vars(result).values())

    def _operand(self, weight: torch.Tensor) -> torch.Tensor | None:
        if self.head_operand is None:
            return None
        return self.head_operand.of(weight, self.compute_dtype, self.options.logits_dtype or self.compute_dtype)

    def _head_options(self, head: Any, batch: MicroBatch) -> dict[str, Any]:
        floor = batch.signals.get("logprob_floor") if self.head.softcap is None else None
        return {
            "logprob_floor": floor,
            "bias": self.head.bias(head),
            "temperature": self.options.temperature if batch.temperature is None else batch.temperature,
            "softcap": self.head.softcap,
            "logit_scale": self.head.scale,
            "chunk_rows": self.options.chunk_rows,
            "logits_dtype": self.options.logits_dtype,
        }

    def hidden_states(self, batch: MicroBatch) -> torch.Tensor:
        """Return the last hidden states [N, H] that predict the response tokens, in the compute dtype."""
        return self._predicting(self._backbone(batch), batch)

    def _predicting(self, output: Any, batch: MicroBatch) -> torch.Tensor:
        hidden = output.last_hidden_state.to(self.compute_dtype).flatten(0, 1)
        return batch.shard.own(hidden) if batch.shard else hidden[batch.hidden_rows]

    def _backbone(self, batch: MicroBatch, **options: Any) -> Any:
        """Run the model up to the LM head; `options` go to its forward."""
        mask, branches = batch.attention_mask, batch.branches
        if mask is not None:
            # transformers adds a 4-d mask to the scores as it is: 0 where attention is allowed, else -inf-like
            dtype = self.compute_dtype
            mask = torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)
        elif branches is not None:
            shared_prefix_masks.enable(self.base)
            options["branches"] = branches
        if batch.shard is not None:
            ulysses_attention.enable(self.base)
            exchanged = (None, 1) if batch.shard.tensor else (batch.shard.group, batch.shard.size)
            options["exchange"] = Exchange(*exchanged, mask)
        if branches is not None or batch.shard is not None:
            # a 4-d mask keeps transformers from building one
            mask = torch.zeros(1, 1, 1, 1, device=batch.input_ids.device)
        with self.autocast(batch.input_ids.device), self._tower_used(batch):
            if self.images is not None:
                options |= self.images.inputs(batch.input_ids, batch.images)
            return backbone(self.base)(
                input_ids=batch.input_ids,
                attention_mask=mask,
                position_ids=batch.position_ids,
                use_cache=False,
                **options,
            )

    @contextmanager
    def _tower_used(self, batch: MicroBatch) -> Iterator[None]:
        """Add 0 as a function of the tower to the embeddings of a micro-batch of text, where it is trained.

        Other ranks may have features there. Without it an update of text alone would leave the tower as it is on one
        rank, and move it by AdamW's momentum on several. FSDP2 sums gradients in the order in which backward reaches
        the layers: if embeddings are frozen, as with adapters, it passes the first layer only where a tower is before
        it.
        """
        if self.images is None or batch.images or not (torch.is_grad_enabled() and self.images.trains):
            yield
            return
        unused = self.images.unused(batch.input_ids.device)
        embeddings: nn.Module = self.base.get_input_embeddings()

        def add(module: nn.Module, inputs: Any, output: Any) -> Tensor:
            return output + unused.to(output.dtype)

        with embeddings.register_forward_hook(add):
            yield

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context in which the model's products are computed."""
        if self.compute_dtype == torch.float32:
            return nullcontext()
        return torch.autocast(device.type, dtype=self.compute_dtype)


def in_place_of_forward(module: nn.Module, function: Callable[[Tensor], T], hidden: Tensor) -> T:
    """Call a module with `function` as its forward, so that the module's hooks run.

    Args:
        module: module whose weights `function` reads.
        function: replaces the forward; returns tensors, or tuples and dicts of them, as hooks of backward need.
        hidden: the module's input.
    """
    with replaced_forward(module, function):
        return module(hidden)


class HeadOperand:
    """The LM head's weight in the dtype of its products, cast once for all passes of an update.

    It is held from the first pass after an update to the end of the next update's last pass.

    A weight that has that dtype already is returned itself and costs no memory. Whoever writes into the weight calls
    `release`: torch's fused optimizers do not count their writes as a new version of it (2.13).
    """

    def __init__(self) -> None:
        self._operand: torch.Tensor | None = None
        self._source: tuple[object, ...] = ()

    def of(self, weight: torch.Tensor, compute_dtype: torch.dtype, logits_dtype: torch.dtype) -> torch.Tensor:
        """Return `weight` [V, H] as the head's products read it, cast again after `release` and for another weight.

        Args:
            weight: the head's weight.
            compute_dtype: dtype of the products.
            logits_dtype: dtype of the logits.
        """
        source = (weight.data_ptr(), weight._version, weight.shape, weight.dtype, compute_dtype, logits_dtype)
        if self._operand is None or self._source != source:
            self._operand = None  # frees its memory for the next
            self._operand, self._source = weight_operand(weight, compute_dtype, logits_dtype), source
        return self._operand

    def release(self) -> None:
        """Free the cast weight, which the next pass casts anew."""
        self._operand = None
