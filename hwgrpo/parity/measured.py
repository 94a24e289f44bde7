"""The step by this project's parts on a device: layouts, kernels, losses, optimizer and engine as a run has them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hwgrpo_backends.device import Device

from hwgrpo.config import Config
from hwgrpo.models.loading import load_model_config
from hwgrpo.parity.fixed_step import GREEDY_TOKENS, FixedStep
from hwgrpo.parity.golden import outputs_of
from hwgrpo.training.model_setup import build_models
from hwgrpo.training.policy.auto_settings import attention_of, choose_layout
from hwgrpo.training.policy.micro_batch import build_micro_batch
from hwgrpo.training.setup import make_update
from hwgrpo.training.shared_setup import build_engine
from hwgrpo.training.strategies.single import Single
from hwgrpo.training.update.policy_update import PolicyUpdate
from hwgrpo.training.update.train_batch import advantages_over_ranks
from hwgrpo.values import Completions, Rewards, Sampling, TrainBatch


@dataclass
class Parts:
    """What computes the step on a device."""

    config: Config
    device: Device
    tokenizer: Any
    update: PolicyUpdate
    strategy: Single
    notes: list[str]

    @property
    def model(self) -> Any:
        """The transformers model."""
        return self.update.policy.base


def build_parts(config: Config, device: Device, tokenizer: Any, folder: Path) -> Parts:
    """Load the model onto the device, and check layouts and fused modules as the start of a run does."""
    strategy = Single(device.torch_device, device.comm_backend)
    attention = attention_of(config, device)
    layout = choose_layout(config, load_model_config(config.model), attention.loaded_as)
    models = build_models(config, device, strategy, tokenizer, attention, layout)
    update = make_update(config, device, strategy, models, folder, total_steps=1)
    notes = [note for note in (models.layout_reason,) if note]
    return Parts(config, device, tokenizer, update, strategy, notes)


def measured_stages(parts: Parts, step: FixedStep, logprobs: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the stages of a step in their order, on the host in fp64: name, tensor.

    Args:
        parts: the parts; their weights are updated at the end.
        step: the step.
        logprobs: [R] those of the golden step, around which the old and reference log-probs lie.
    """
    update, config = parts.update, parts.config
    batch = _batch(step, torch.zeros(len(step.rewards)))
    with outputs_of(parts.model) as found, torch.no_grad():
        rows = update.layout.rows(batch, range(len(batch)), 1000, update.policy.hidden_size)
        micro = build_micro_batch(batch, rows, {}, update.layout)
        update.policy.eval()
        update.policy.hidden_states(micro.to(parts.device.torch_device))
        update.policy.train()
    for name, values in found.items():
        by_token = torch.zeros(len(step.tokens), values.shape[-1], dtype=torch.float64)
        by_token[micro.token_index] = values.flatten(0, 1)[micro.hidden_rows].cpu().double()
        yield name, by_token
    entropies = torch.zeros(len(step.tokens))
    yield "log-probs", update.score(batch, entropies=entropies).double()
    yield "entropy", entropies.double()
    advantages = _advantages(parts, step)
    yield "advantages", advantages.double()
    old, ref = step.given_logprobs(logprobs)
    loss, _ = update.accumulate_gradients(_batch(step, advantages, old, ref), range(len(batch)))
    yield "loss", torch.tensor([loss], dtype=torch.float64)
    named = dict(parts.model.named_parameters())
    for name, weight in named.items():
        gradient = parts.strategy.gradient(weight)
        yield f"gradient of {name}", torch.zeros(weight.shape).double() if gradient is None else gradient.cpu().double()
    parts.strategy.step(config.optim.lr)
    for name, weight in named.items():
        yield f"updated {name}", weight.detach().cpu().double()


def measured_greedy(parts: Parts, step: FixedStep) -> list[list[int]]:
    """Return the likeliest tokens after each prompt, by the rollout engine."""
    engine = build_engine(parts.config, parts.update.policy, parts.tokenizer, parts.device)
    try:
        engine.update_weights(0)
        done = engine.generate(step.batch, Sampling(n=1, max_response_tokens=GREEDY_TOKENS, greedy=True))
        return done.token_lists()
    finally:
        engine.close()


def _batch(
    step: FixedStep, advantages: torch.Tensor, old: torch.Tensor | None = None, ref: torch.Tensor | None = None
) -> TrainBatch:
    lengths = torch.tensor([len(prompt) for prompt in step.prompts])
    return TrainBatch(
        prompt_tokens=torch.tensor([token for prompt in step.prompts for token in prompt]),
        prompt_offsets=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        prompt_index=step.prompt_index,
        tokens=step.tokens,
        offsets=step.offsets,
        advantages=advantages,
        logprobs=torch.zeros(len(step.tokens)) if old is None else old,
        old_logprobs=old,
        ref_logprobs=ref,
    )


def _advantages(parts: Parts, step: FixedStep) -> torch.Tensor:
    valid = torch.ones(len(step.rewards), dtype=torch.bool)
    rewards = Rewards(step.rewards, valid, {"exact_match": step.rewards})
    tokens = len(step.tokens)
    completions = Completions(
        prompt_index=step.prompt_index,
        tokens=step.tokens,
        offsets=step.offsets,
        logprobs=torch.zeros(tokens),
        finished=valid,
        texts=("",) * len(valid),
        weight_version=0,
    )
    a = parts.config.algorithm.advantage
    return advantages_over_ranks(a, parts.config.reward.functions, completions, rewards, parts.strategy)[0]
