"""One update's gradient: ours, and an independent fp64 computation on full logits."""

from __future__ import annotations

import copy
import itertools

import torch

from hwgrpo.config import Config
from hwgrpo.training.policy.layouts import PADDED, Layout
from hwgrpo.training.policy.policy_model import HeadOptions, PolicyModel
from hwgrpo.training.strategies.single import Single
from hwgrpo.training.update.policy_update import PolicyUpdate
from hwgrpo.values import TrainBatch
from tests.support.models.tiny import settings

CPU = torch.device("cpu")


def updater(model, *overrides: str, layout: Layout = PADDED, dtype: torch.dtype = torch.float32) -> PolicyUpdate:
    config = settings(*overrides)
    policy = PolicyModel(
        model,
        compute_dtype=dtype,
        options=HeadOptions(temperature=config.rollout.temperature, chunk_rows=config.kernels.chunk_rows),
    )
    return update_of(policy, config, layout)


def update_of(policy: PolicyModel, config: Config, layout: Layout = PADDED) -> PolicyUpdate:
    """Return the update of a policy by one process."""
    strategy = Single(CPU, "gloo")
    strategy.wrap(policy, config)
    return PolicyUpdate(config, strategy, policy, CPU, layout, total_updates=10)


def gradients(update: PolicyUpdate, batch: TrainBatch) -> tuple[float, dict[str, torch.Tensor], dict[str, float]]:
    loss, sums = update.accumulate_gradients(batch, range(len(batch)))
    named = {name: p.grad.clone() for name, p in update.policy.model.named_parameters() if p.grad is not None}
    update.strategy.discard_gradients()
    return loss, named, sums


def reference_gradients(model, config, batch: TrainBatch, other=None) -> tuple[float, dict[str, torch.Tensor]]:
    """One sequence at a time, all logits, fp64, ordinary autograd, formulas written out from the papers.

    With `other`, a model, the KL is the one to it over the full vocabulary.
    """
    model = copy.deepcopy(model).double()
    other = None if other is None else copy.deepcopy(other).double().eval()
    a = config.algorithm
    mask = torch.ones(len(batch.tokens), dtype=torch.bool) if batch.loss_mask is None else batch.loss_mask
    places = [slice(*bounds) for bounds in itertools.pairwise(batch.offsets.tolist())]
    lengths = [int(mask[here].sum()) for here in places]
    total_tokens, total_sequences = sum(lengths), sum(length > 0 for length in lengths)
    loss = torch.zeros((), dtype=torch.float64)
    for s, (here, length) in enumerate(zip(places, lengths, strict=True)):
        if length == 0:
            continue
        p = int(batch.prompt_index[s])
        prompt = batch.prompt_tokens[batch.prompt_offsets[p] : batch.prompt_offsets[p + 1]]
        ids = torch.cat([prompt, batch.tokens[here]])[None]
        logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / config.rollout.temperature
        log_p = logits.log_softmax(-1)
        lp = log_p.gather(1, batch.tokens[here, None])[:, 0]
        entropy = -(log_p.exp() * log_p).sum(-1)
        old = lp.detach() if batch.old_logprobs is None else batch.old_logprobs[here].double()
        advantage = batch.advantages_R[here].double()
        gap = lp - old
        if a.loss.name == "gspo":  # the mean over its tokens; the same gradient for a mean over tokens of each sequence
            assert a.aggregation.name == "seq-mean-token-mean"
            gap = gap[mask[here]].mean().expand_as(gap)
        ratio = gap.exp()
        clipped = ratio.clamp(1 - a.loss.clip_low, 1 + a.loss.clip_high)
        token = torch.maximum(-advantage * ratio, -advantage * clipped)
        if a.loss.dual_clip is not None and a.loss.name != "gspo":
            token = torch.where(advantage < 0, torch.minimum(token, -a.loss.dual_clip * advantage), token)
        if a.kl.coef and other is not None:
            with torch.no_grad():
                others = other(input_ids=ids).logits[0, len(prompt) - 1 : -1] / config.rollout.temperature
            token = token + a.kl.coef * (log_p.exp() * (log_p - others.log_softmax(-1))).sum(-1)
        elif a.kl.coef:
            x = batch.ref_logprobs[here].double() - lp
            token = token + a.kl.coef * (x.exp() - x - 1)
        token = (token - a.entropy_coef * entropy)[mask[here]]
        if a.aggregation.name == "token-mean":
            loss = loss + token.sum() / total_tokens
        elif a.aggregation.name == "seq-mean-token-mean":
            loss = loss + token.mean() / total_sequences
        else:
            loss = loss + token.sum() / total_sequences / a.aggregation.norm_length
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters()}
