"""The step by this project's parts on a device: layouts, kernels, losses, optimizer and engine as a run has them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from hwgrpo_backends.device import Device

from hwgrpo.config import Config
from hwgrpo.models.loading import load_model_config
from hwgrpo.parity.fixed_step import GREEDY_TOKENS, FixedStep
from hwgrpo.parity.golden import outputs_of
from hwgrpo.training.model_setup import Models, build_models
from hwgrpo.training.policy.auto_settings import attention_of, choose_layout
from hwgrpo.training.policy.micro_batch import build_micro_batch
from hwgrpo.training.setup import make_update
from hwgrpo.training.shared_setup import build_engine
from hwgrpo.training.strategies.single import Single
from hwgrpo.training.update.policy_update import PolicyUpdate
from hwgrpo.training.update.train_batch import advantages_over_ranks
from hwgrpo.values import Completions, Rewards, Sampling


@dataclass
class Measured:
    """What computes the step on a device."""

    config: Config
    device: Device
    tokenizer: Any
    models: Models
    update: PolicyUpdate
    strategy: Single

    @property
    def model(self) -> Any:
        """The transformers model."""
        return self.update.policy.base

    @property
    def notes(self) -> Sequence[str]:
        """What runs: attention and fused modules, and the reason for another layout than the settings ask for."""
        lines = (self.models.fused.attention.line, self.models.fused.line, self.models.layout_reason)
        return [line for line in lines if line]


def build_measured(config: Config, device: Device, tokenizer: Any, folder: Path) -> Measured:
    """Load the model onto the device, and check layouts and fused modules as the start of a run does.

    Rows are as short as the step; their attention is that of long rows.
    """
    strategy = Single(device.torch_device, device.comm_backend)
    attention = attention_of(config, device)
    layout = choose_layout(config, load_model_config(config.model), attention.loaded_as)
    models = build_models(config, device, strategy, tokenizer, attention, layout)
    models = replace(models, layout=replace(models.layout, dense_up_to=0))
    update = make_update(config, device, strategy, models, folder, total_steps=1)
    return Measured(config, device, tokenizer, models, update, strategy)


def measured_forward(measured: Measured, step: FixedStep) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the stages of a step before the advantages, in their order, on the host in fp64: name, tensor."""
    update = measured.update
    batch = step.train_batch(torch.zeros(len(step.rewards)))
    with outputs_of(measured.model) as outputs, torch.no_grad():
        rows = update.layout.rows(batch, range(len(batch)), 1000, update.policy.hidden_size)
        micro = build_micro_batch(batch, rows, {}, update.layout)
        update.policy.eval()
        update.policy.hidden_states(micro.to(measured.device.torch_device))
        update.policy.train()
    for name, values in outputs.items():
        by_token = torch.zeros(len(step.tokens), values.shape[-1], dtype=torch.float64)
        by_token[micro.token_index] = values.flatten(0, 1)[micro.hidden_rows.to(values.device)].cpu().double()
        yield name, by_token
    entropies = torch.zeros(len(step.tokens))
    yield "log-probs", update.score(batch, entropies=entropies).double()
    yield "entropy", entropies.double()


def measured_loss(measured: Measured, step: FixedStep, logprobs: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield advantages and loss; the gradients are in the parameters then.

    Args:
        measured: the parts.
        step: the step.
        logprobs: [R] those of the fp64 step, around which the old and reference log-probs lie.
    """
    advantages = _advantages(measured, step)
    yield "advantages", advantages.double()
    batch = step.train_batch(advantages, *step.around(logprobs))
    loss, _ = measured.update.accumulate_gradients(batch, range(len(batch)))
    yield "loss", torch.tensor([loss], dtype=torch.float64)


def measured_gradients(measured: Measured) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the gradient of each parameter that has one, on the host."""
    for name, weight in measured.model.named_parameters():
        gradient = measured.strategy.gradient(weight)
        if gradient is not None:
            yield name, gradient.cpu()


def measured_update(measured: Measured) -> tuple[torch.Tensor, Iterator[tuple[str, torch.Tensor]]]:
    """Clip the gradients and take the optimizer's step; return the norm before, [1], and each weight after it."""
    optim = measured.config.optim
    norm = torch.as_tensor(measured.strategy.clip_gradients(optim.grad_clip)).cpu().double().reshape(1)
    measured.strategy.step(optim.lr)
    weights = ((name, weight.detach().cpu()) for name, weight in measured.model.named_parameters())
    return norm, weights


def measured_greedy(measured: Measured, step: FixedStep) -> list[list[int]]:
    """Return the likeliest tokens after each prompt, by the rollout engine."""
    engine = build_engine(measured.config, measured.update.policy, measured.tokenizer, measured.device)
    try:
        engine.update_weights(0)
        done = engine.generate(step.prompt_batch, Sampling(n=1, max_response_tokens=GREEDY_TOKENS, greedy=True))
        return done.token_lists()
    finally:
        engine.close()


def _advantages(measured: Measured, step: FixedStep) -> torch.Tensor:
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
