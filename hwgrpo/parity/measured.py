"""The step by this project's parts on a device: layouts, kernels, losses, optimizer and engine as a run has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from hwgrpo_backends.device import Device
from torch.distributed.tensor import DTensor

from hwgrpo.config import Config
from hwgrpo.parity.fixed_step import GREEDY_TOKENS, FixedStep
from hwgrpo.parity.golden import SECOND, outputs_of
from hwgrpo.rollout.engine import Engine
from hwgrpo.rollout.policy_weights import ShardedWeights
from hwgrpo.training.model_setup import Models, build_models
from hwgrpo.training.policy.auto_settings import attention_of, layout_of
from hwgrpo.training.policy.micro_batch import build_micro_batch
from hwgrpo.training.setup import make_update, start_strategy
from hwgrpo.training.shared_setup import build_engine
from hwgrpo.training.strategies.optimizer import Stepping
from hwgrpo.training.strategies.strategy import Strategy
from hwgrpo.training.update.policy_update import PolicyUpdate
from hwgrpo.training.update.train_batch import advantages_over_ranks
from hwgrpo.values import Completions, Rewards, Sampling

WRAPPER = "base_model.model."
"""Prefix of parameters' names where peft wraps the model."""


@dataclass
class Measured:
    """What computes the step on a device."""

    config: Config
    device: Device
    tokenizer: Any
    models: Models
    layers: Sequence[str]
    """Names of the decoder layers' modules."""
    update: PolicyUpdate
    strategy: Strategy

    @property
    def model(self) -> Any:
        """The transformers model."""
        return self.update.policy.base

    @property
    def notes(self) -> Sequence[str]:
        """What runs: attention and fused modules, and the reason for another layout than the settings ask for."""
        models = self.models
        lines = (models.fused.attention.line, models.fused.line, models.layout_reason, models.attention_note)
        return [line for line in lines if line]


def build_measured(
    config: Config, device: Device, tokenizer: Any, layers: Sequence[str], folder: Path, *, samples: bool = True
) -> Measured:
    """Load the model onto the device, and check layouts and fused modules as the start of a run does.

    Rows are as short as the step; their attention is that of long rows. Log-probs are computed with that of short ones,
    too.

    Args:
        config: the settings.
        device: the device, prepared.
        tokenizer: the model's.
        layers: names of the decoder layers' modules.
        folder: for files of the run.
        samples: whether the rollout engine is compared, too.
    """
    strategy = start_strategy(config, device)
    attention = attention_of(config, device)
    models = build_models(config, device, strategy, tokenizer, attention, layout_of(config, device), samples=samples)
    update = make_update(config, device, strategy, models, folder, total_steps=1)
    update.layout = replace(models.layout, dense_up_to=0)
    return Measured(config, device, tokenizer, models, layers, update, strategy)


@dataclass(frozen=True)
class MeasuredStep:
    """What the device computed; tensors are on the host."""

    stages: Sequence[Mapping[str, torch.Tensor]]
    """Of each rank: hidden states, log-probs, entropy, advantages, loss."""
    dense: torch.Tensor | None
    """[R] log-probs with the mask that the layout uses in short rows; None: it has the same attention in all rows."""
    greedy: Sequence[Sequence[Sequence[int]]]
    """Of each rank: the likeliest tokens after each prompt, by the rollout engine, before the update."""
    sampled: Sequence[Completions | None]
    """Of each rank: responses sampled by the rollout engine after the update, with its log-probs; None: the weights are
    not finite."""
    engine_notes: Sequence[str]
    """How the engine decodes, and its fallbacks."""
    gradients: Mapping[str, torch.Tensor] | None
    """Parameter -> gradient, of those that have one; None: the strategy does not show them."""
    norm: torch.Tensor
    """[1]: of all gradients, before clipping."""
    updated: Mapping[str, torch.Tensor]
    """Parameter -> weight after the update."""
    after: torch.Tensor
    """[R] log-probs after the update."""
    second: Mapping[str, torch.Tensor] | None
    """Parameter -> weight after a second update, by `SECOND` times the clipped gradients; None: as `gradients`."""


def measured_step(measured: Measured, step: FixedStep, logprobs: torch.Tensor) -> MeasuredStep:
    """Compute the step; every rank calls it, and each gets all of the result.

    Args:
        measured: the parts; their weights are updated.
        step: the step.
        logprobs: [R] those of the fp64 step, around which the old and reference log-probs lie.
    """
    update, strategy, optim = measured.update, measured.strategy, measured.config.optim
    stages = _hidden_states(measured, step)
    entropies = torch.zeros(len(step.tokens))
    stages["log-probs"] = update.score(step.train_batch(torch.zeros(len(step.rewards))), entropies=entropies)
    stages["entropy"] = entropies
    dense = None
    if measured.models.layout != update.layout:
        branched, update.layout = update.layout, measured.models.layout
        dense = update.score(step.train_batch(torch.zeros(len(step.rewards))))
        update.layout = branched
    with closing(_engine(measured)) as engine:
        greedy = _generate(engine, measured, step, n=1, greedy=True)
        mine = step.of_rank(strategy.rank, strategy.world_size)
        advantages = advantages_of(measured, mine.step)
        stages["advantages"] = torch.zeros(len(step.rewards))
        for sequences, values in strategy.gather_objects((mine.sequences, advantages)):
            stages["advantages"][sequences] = values
        batch = mine.step.train_batch(advantages, *mine.step.around(logprobs[mine.tokens]))
        loss, _ = update.accumulate_gradients(batch, range(len(batch)))
        stages["loss"] = torch.tensor([loss], dtype=torch.float64)
        gradients = gradients_of(measured)
        norm = torch.as_tensor(strategy.clip_gradients(optim.grad_clip)).cpu().reshape(1)
        clipped = [(p, p.grad.clone()) for p in measured.model.parameters() if p.grad is not None]
        strategy.step(optim.lr)
        updated = _weights(strategy)
        after = update.score(step.train_batch(torch.zeros(len(step.rewards))))
        is_finite = all(bool(weight.isfinite().all()) for weight in updated.values())
        sampled = _generate(engine, measured, step, n=2, greedy=False) if is_finite else None
        engine_notes = _notes(engine)
    second = None
    if isinstance(strategy, Stepping):
        for parameter, gradient in clipped:
            parameter.grad = gradient.mul_(SECOND)
        strategy.step(optim.lr)
        second = _weights(strategy)
    of_ranks = zip(*strategy.gather_objects((stages, greedy.token_lists(), sampled)), strict=True)
    all_stages, all_greedy, all_sampled = map(list, of_ranks)
    return MeasuredStep(
        all_stages, dense, all_greedy, all_sampled, engine_notes, gradients, norm, updated, after, second
    )


def _weights(strategy: Strategy) -> dict[str, torch.Tensor]:
    """Return the trained parameters by name, as copies: on the host one is the weight itself."""
    return {
        name.removeprefix(WRAPPER): weight.detach().cpu().clone()
        for name, weight in strategy.gather_full_parameters(trainable_only=True)
    }


def _hidden_states(measured: Measured, step: FixedStep) -> dict[str, torch.Tensor]:
    """Return the outputs of embeddings and layers that predict response tokens, [R, H]."""
    update = measured.update
    batch = step.train_batch(torch.zeros(len(step.rewards)))
    update.policy.eval()
    with outputs_of(measured.model, measured.layers) as outputs, torch.no_grad():
        rows = update.layout.rows(batch, range(len(batch)), 1000, update.policy.hidden_size)
        micro = build_micro_batch(batch, rows, {}, update.layout)
        update.policy(micro.to(measured.device.torch_device))
    hidden = {}
    for name, values in outputs.items():
        hidden[name] = torch.zeros(len(step.tokens), values.shape[-1])
        hidden[name][micro.token_index] = values.flatten(0, 1)[micro.hidden_rows.to(values.device)].float().cpu()
    return hidden


def gradients_of(measured: Measured) -> dict[str, torch.Tensor] | None:
    """Return parameter -> gradient on the host, of those that have one; None: the strategy does not show them."""
    strategy = measured.strategy
    if not isinstance(strategy, Stepping):
        return None
    gradients = {}
    for name, weight in measured.model.named_parameters():
        gradient = weight.grad.full_tensor() if isinstance(weight.grad, DTensor) else strategy.gradient(weight)
        if gradient is not None:
            gradients[name] = gradient.detach().cpu().clone()  # clipping scales it in place
    return gradients


def _engine(measured: Measured) -> Engine:
    strategy, models = measured.strategy, measured.models
    weights = ShardedWeights(models.policy.model, strategy.gather_full_parameters) if strategy.shards else None
    return build_engine(
        measured.config, models.policy, measured.tokenizer, measured.device, models.replica, weights=weights
    )


def _generate(engine: Engine, measured: Measured, step: FixedStep, *, n: int, greedy: bool) -> Completions:
    """Return responses to the prompts by the present weights."""
    engine.update_weights(0 if greedy else 1)
    sampling = Sampling(
        n=n,
        max_response_tokens=GREEDY_TOKENS,
        greedy=greedy,
        temperature=measured.config.rollout.temperature,
        seed=measured.config.trainer.seed,
    )
    return engine.generate(step.prompt_batch, sampling)


def _notes(engine: Engine) -> list[str]:
    """Return how the engine decodes, and its fallbacks."""
    path = getattr(engine, "decode_path", None)
    return [*([f"decoding: {path}"] if path else []), *engine.notes]


def advantages_of(measured: Measured, step: FixedStep) -> torch.Tensor:
    """Return the advantages [S] of a step's rewards."""
    valid = torch.ones(len(step.rewards), dtype=torch.bool)
    rewards = Rewards(step.rewards, valid, {"exact_match": step.rewards})
    completions = Completions(
        prompt_index=step.prompt_index,
        tokens=step.tokens,
        offsets=step.offsets,
        logprobs=torch.zeros(len(step.tokens)),
        finished=valid,
        texts=("",) * len(valid),
        weight_version=0,
    )
    config = measured.config
    estimator = config.algorithm.advantage
    return advantages_over_ranks(estimator, config.reward.functions, completions, rewards, measured.strategy)[0]
