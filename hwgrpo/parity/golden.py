"""The step in fp64 on the CPU: plain transformers, one sequence at a time, every formula written out.

Nothing here calls the code that parity judges but for reading settings: neither its kernels and layouts nor its losses,
advantages and optimizers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hwgrpo.config import Config
from hwgrpo.models.lm_head import backbone
from hwgrpo.parity.fixed_step import GREEDY_TOKENS, FixedStep

DRAWS = 4
"""Computations with other roundings, of which the largest difference counts."""


def golden_stages(
    model: Any, step: FixedStep, config: Config, around: torch.Tensor | None = None
) -> dict[str, torch.Tensor]:
    """Return the stages of a step in their order: name -> tensor.

    Args:
        model: a causal LM of transformers in fp64 on the CPU, with attention that its own code computes.
        step: the step.
        config: settings of loss, advantages, optimizer and temperature.
        around: [R] log-probs around which the old and reference ones lie; None: those of this model.
    """
    stages: dict[str, torch.Tensor] = {}
    parts = [_forward(model, ids, len(prompt), config.rollout.temperature) for _, prompt, ids in step]
    for name in parts[0][0]:
        stages[name] = torch.cat([hidden[name] for hidden, _ in parts]).detach()
    all_log_p = [log_p for _, log_p in parts]
    logprobs = torch.cat(all_log_p).gather(1, step.tokens[:, None])[:, 0]
    entropies = torch.cat([-(log_p.exp() * log_p).sum(-1) for log_p in all_log_p])
    stages |= {"log-probs": logprobs.detach(), "entropy": entropies.detach()}
    advantages = _advantages(step)
    stages["advantages"] = advantages
    around = logprobs.detach() if around is None else around
    old, ref = step.given_logprobs(around)
    token = _loss(logprobs, old.double(), ref.double(), advantages.repeat_interleave(step.offsets.diff()), config)
    loss = token.mean()
    stages["loss"] = loss.detach()[None]
    loss.backward()
    weights = dict(model.named_parameters())
    for name, weight in weights.items():
        stages[f"gradient of {name}"] = torch.zeros_like(weight) if weight.grad is None else weight.grad
    for name, weight in weights.items():
        stages[f"updated {name}"] = _adamw(weight.detach(), stages[f"gradient of {name}"], config)
    return stages


def greedy_tokens(model: Any, step: FixedStep, ends: Collection[int]) -> tuple[list[list[int]], list[list[float]]]:
    """Return the likeliest tokens after each prompt, and by how much each leads the next in its log-prob.

    Args:
        model: as for `golden_stages`.
        step: has the prompts.
        ends: token ids that end a response.
    """
    tokens, leads = [], []
    with torch.no_grad():
        for prompt in step.prompts:
            ids, of_prompt = [*prompt], []
            for _ in range(GREEDY_TOKENS):
                (first, second), places = model(input_ids=torch.tensor([ids])).logits[0, -1].topk(2)
                ids.append(int(places[0]))
                of_prompt.append(float(first - second))
                if ids[-1] in ends:
                    break
            tokens.append(ids[len(prompt) :])
            leads.append(of_prompt)
    return tokens, leads


def rounding_of(model: Any, step: FixedStep, config: Config, unit: float) -> dict[str, float]:
    """Return how far rounding moves each stage: the largest difference of any entry in `DRAWS` computations.

    In each, the outputs of embeddings, norms, products, activations and layers are changed by up to a unit, up or
    down, and with them their gradients: about as many roundings as the computation has, of the size that the dtype
    makes them. What a stage amplifies shows in it.

    Args:
        model: as for `golden_stages`; it is not changed.
        step: the step.
        config: the settings.
        unit: relative size of one rounding.
    """
    exact = golden_stages(copy.deepcopy(model), step, config)
    found = dict.fromkeys(exact, 0.0)
    for seed in range(DRAWS):
        other = copy.deepcopy(model)
        with _rounded(other, unit, seed):
            stages = golden_stages(other, step, config, exact["log-probs"])
        found = {name: max(found[name], float((stages[name] - exact[name]).abs().max())) for name in exact}
    return found


@contextmanager
def _rounded(model: nn.Module, unit: float, seed: int) -> Iterator[None]:
    generator = torch.Generator().manual_seed(seed)

    def change(module: nn.Module, inputs: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (change(module, inputs, output[0]), *output[1:])
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return output
        return output * (1 + unit * (2 * torch.rand(output.shape, generator=generator, dtype=output.dtype) - 1))

    layers = {*layers_of(model)}
    hooks = [m.register_forward_hook(change) for m in model.modules() if m in layers or not [*m.children()]]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def layers_of(model: Any) -> nn.ModuleList:
    """Return the decoder layers: the longest list of modules of the backbone."""
    return max((m for m in backbone(model).modules() if isinstance(m, nn.ModuleList)), key=len)


@contextmanager
def outputs_of(model: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Record the outputs [..., H] of embeddings and layers of the next forward, by stage."""
    found: dict[str, torch.Tensor] = {}

    def record(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            found[name] = output[0] if isinstance(output, tuple) else output

        return hook

    named = {"embeddings": model.get_input_embeddings()}
    named |= {f"layer {number}": layer for number, layer in enumerate(layers_of(model), start=1)}
    hooks = [module.register_forward_hook(record(name)) for name, module in named.items()]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _forward(
    model: Any, ids: torch.Tensor, prompt: int, temperature: float
) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
    """Return the hidden states that predict the response, by stage, and its log-probs over the vocabulary [N, V]."""
    with outputs_of(model) as found:
        output = model(input_ids=ids[None])
    hidden = {name: values[0, prompt - 1 : -1] for name, values in found.items()}
    return hidden, (output.logits[0, prompt - 1 : -1] / temperature).log_softmax(-1)


def _advantages(step: FixedStep) -> torch.Tensor:
    """(r - mean) / (std + 1e-6) of each group, with the unbiased standard deviation."""
    parts = []
    for index in range(len(step.prompts)):
        rewards = step.rewards[step.prompt_index == index]
        parts.append((rewards - rewards.mean()) / (rewards.std() + 1e-6))
    return torch.cat(parts)


def _loss(
    logprob: torch.Tensor, old: torch.Tensor, ref: torch.Tensor, advantage: torch.Tensor, config: Config
) -> torch.Tensor:
    """PPO's clipped surrogate plus the k3 estimator of the KL, per token."""
    loss, kl = config.algorithm.loss, config.algorithm.kl
    ratio = (logprob - old).exp()
    surrogate = -torch.minimum(advantage * ratio, advantage * ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high))
    gap = ref - logprob
    return surrogate + kl.coef * (gap.exp() - gap - 1)


def _adamw(weight: torch.Tensor, gradient: torch.Tensor, config: Config) -> torch.Tensor:
    """The first step of AdamW, whose bias correction leaves the gradient and its square."""
    optim = config.optim
    decay = optim.weight_decay if weight.ndim > 1 else 0.0  # norms and biases have none
    direction = gradient / (gradient.square().sqrt() + optim.eps)
    return weight * (1 - optim.lr * decay) - optim.lr * direction


def unit_of(dtype: torch.dtype, width: int) -> float:
    """Return the relative size of one rounding of a module's output.

    Sums of fp32 products round after each of their terms; products of other dtypes sum in fp32 and round operands and
    result.

    Args:
        dtype: of products.
        width: terms of the longest sum.
    """
    eps = torch.finfo(dtype).eps
    return eps / 2 * math.sqrt(width) if dtype == torch.float32 else eps
