"""The step in fp64 on the CPU: plain transformers, unpadded sequences, every formula written out.

Of the code that parity judges, it shares the reading of settings and weights, and where a model's decoder layers are:
no kernel, layout, loss, advantage or optimizer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from hwgrpo.config import Config
from hwgrpo.config.schema import ModelConfig
from hwgrpo.errors import ConfigError
from hwgrpo.models.layers import decoder_layers
from hwgrpo.models.loading import load_model
from hwgrpo.models.lora import TRAINED_ADAPTER
from hwgrpo.models.placeholders import ban, placeholder_ids, reads_images
from hwgrpo.models.vision import freeze_vision, is_vision_name, own_inputs
from hwgrpo.parity.fixed_step import GREEDY_TOKENS, FixedStep
from hwgrpo.parity.rounded_operations import Precision, Rounded, in_fp64
from hwgrpo.support.stage_differences import DRAWS
from hwgrpo.values import Completions, PromptImages

FORWARD = ("log-probs", "entropy", "advantages", "loss")
"""Stages after the hidden states, in the order in which a step computes them."""

Gradients = Mapping[str, torch.Tensor | None]
"""Parameter -> gradient; None: no use of it reaches the loss."""


def load_golden_model(config: ModelConfig) -> Any:
    """Load the model of `model.path` in fp64 on the CPU, with transformers' own attention and loops over experts.

    Adapters are peft's own, on the model's layers; then they alone need gradients.
    """
    model = load_model(config, attention="eager")
    if config.lora.adapter is not None:
        from peft import PeftModel

        PeftModel.from_pretrained(model, config.lora.adapter, adapter_name=TRAINED_ADAPTER, is_trainable=True)
    if reads_images(model.config):
        freeze_vision(model, config.train_vision)
    return as_golden(model)


def as_golden(model: Any) -> Any:
    """Return a model in fp64, with transformers' own loops over experts."""
    model = model.double().eval()
    if hasattr(model.config, "_experts_implementation"):
        model.config._experts_implementation = "eager"
    return model


def golden_step(
    model: Any,
    step: FixedStep,
    config: Config,
    around: torch.Tensor | None = None,
    rounded: tuple[Precision, int] | None = None,
) -> tuple[dict[str, torch.Tensor], Gradients]:
    """Return the stages up to the loss, name -> tensor in their order, and the gradients.

    Args:
        model: a causal LM of transformers in fp64 on the CPU, with attention that its own code computes.
        step: the step.
        config: settings of loss, advantages, optimizer and temperature.
        around: [R] log-probs around which the old and reference ones lie; None: those of this model.
        rounded: (precision, draw): change the results of operations by up to one rounding, and those of loss and
            statistics by one of fp32.
    """

    def passes(part: int, precision: Precision | None = None) -> AbstractContextManager[Any]:
        if rounded is None:
            return nullcontext()
        return Rounded(precision or rounded[0], seed=3 * rounded[1] + part)

    parameters = trained_parameters(model)
    with in_fp64():
        with passes(0):
            hidden, logits = _forward(model, step)
        with passes(1, Precision(torch.float32)):
            loss, values = loss_of_logits(logits, step, config, around)
        stages = {name: value.detach() for name, value in hidden.items()} | values
        with passes(2):
            gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return stages, dict(zip(parameters, gradients, strict=True))


def loss_of_logits(
    logits: torch.Tensor, step: FixedStep, config: Config, around: torch.Tensor | None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss with its graph, and the stages of `FORWARD`, name -> tensor.

    Args:
        logits: [R, V] for each response token.
        step, config, around: as for `golden_step`.
    """
    log_p = (logits / config.rollout.temperature).log_softmax(-1)
    logprobs = log_p.gather(1, step.tokens[:, None])[:, 0]
    entropies = -(log_p.exp() * log_p).sum(-1)
    advantages = golden_advantages(step)
    old, ref = step.around(logprobs.detach() if around is None else around)
    lengths = step.offsets.diff()
    token = golden_loss(logprobs, old.double(), ref.double(), advantages.repeat_interleave(lengths), config)
    loss = (token - config.algorithm.entropy_coef * entropies).mean()
    values = (logprobs, entropies, advantages, loss[None])
    return loss, {name: value.detach() for name, value in zip(FORWARD, values, strict=True)}


def rounding_of(
    model: Any,
    step: FixedStep,
    config: Config,
    precision: Precision,
    expected: Mapping[str, torch.Tensor],
    exact: Gradients,
) -> dict[str, tuple[float, ...]]:
    """Return how far rounding moves each tensor: the largest difference of any entry, in each of `DRAWS` draws.

    What a model amplifies shows in it: each operation's result, in forward and backward passes, is changed at random by
    as much as the device rounds it.

    Args:
        model, step, config: as for `golden_step`.
        precision: of the device.
        expected, exact: what `golden_step` returns without rounding.
    """
    moved: dict[str, tuple[float, ...]] = {}
    weights = trained_parameters(model)

    def note(name: str, value: torch.Tensor, right: torch.Tensor) -> None:
        moved[name] = (*moved.get(name, ()), float((value - right).abs().max()))

    right_after = logprobs_after(model, step, config, exact)
    for draw in range(DRAWS):
        stages, gradients = golden_step(model, step, config, expected["log-probs"], (precision, draw))
        for name, value in stages.items():
            note(name, value, expected[name])
        note(AFTER, logprobs_after(model, step, config, gradients, (precision, draw)), right_after)
        norm, right_norm = gradient_norm(gradients), gradient_norm(exact)
        note(NORM, norm, right_norm)
        scale, right_scale = clip_coefficient(norm, config), clip_coefficient(right_norm, config)
        for name, weight in weights.items():
            gradient, right = gradients[name], exact[name]
            if gradient is None or right is None:
                continue
            note(gradient_name(name), gradient, right)
            for steps, named in ((1, updated_name), (2, second_name)):
                updated, right_updated = (
                    adamw(weight.detach(), g * s, config, steps) for g, s in ((gradient, scale), (right, right_scale))
                )
                note(named(name), updated, right_updated)
    return moved


NORM = "gradient norm"
AFTER = "log-probs after the update"
SECOND = -0.5
"""The second update's gradient as a factor of the first one's: momentum and variance then depend on AdamW's betas."""


def trained_parameters(model: Any) -> dict[str, nn.Parameter]:
    """Return the parameters that the step updates, by name: all, or those of adapters."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def gradient_name(parameter: str) -> str:
    """Return the tensor's name in a comparison."""
    return f"gradient of {parameter}"


def updated_name(parameter: str) -> str:
    """Return the tensor's name in a comparison."""
    return f"updated {parameter}"


def second_name(parameter: str) -> str:
    """Return the tensor's name in a comparison."""
    return f"{parameter} after a second update"


def gradient_norm(gradients: Gradients) -> torch.Tensor:
    """Return the norm of all gradients, [1]."""
    return torch.stack([g.square().sum() for g in gradients.values() if g is not None]).sum().sqrt()[None]


def clip_coefficient(norm: torch.Tensor, config: Config) -> float:
    """Return the factor that `optim.grad_clip` applies to gradients of a norm, [1]."""
    return min(1.0, config.optim.grad_clip / (float(norm) + 1e-6))


def greedy_tokens(model: Any, step: FixedStep, ends: Collection[int]) -> tuple[list[list[int]], list[list[float]]]:
    """Return the likeliest tokens after each prompt, and by how much each leads the next in its log-prob.

    Args:
        model: as for `golden_step`.
        step: has the prompts.
        ends: token ids that end a response.
    """
    tokens, leads = [], []
    with torch.no_grad(), in_fp64():
        for prompt, images in zip(step.prompts, step.images, strict=True):
            ids, of_prompt = [*prompt], []
            for _ in range(GREEDY_TOKENS):
                logits = _logits(model, torch.tensor([ids]), images)[0, -1]
                (first, second), places = logits.topk(2)
                ids.append(int(places[0]))
                of_prompt.append(float(first - second))
                if ids[-1] in ends:
                    break
            tokens.append(ids[len(prompt) :])
            leads.append(of_prompt)
    return tokens, leads


def logprobs_of(model: Any, step: FixedStep, responses: Completions, temperature: float) -> torch.Tensor:
    """Return the log-probs of responses to the step's prompts, [R].

    Args:
        model: as for `golden_step`.
        step: has the prompts.
        responses: what was sampled.
        temperature: divisor of the logits.
    """
    parts = []
    with torch.no_grad(), in_fp64():
        for index, tokens in zip(responses.prompt_index.tolist(), responses.token_lists(), strict=True):
            ids = torch.tensor([[*step.prompts[index], *tokens]])
            logits = _logits(model, ids, step.images[index])[0, -len(tokens) - 1 : -1]
            parts.append((logits / temperature).log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0])
    return torch.cat(parts)


def layer_names(model: Any) -> list[str]:
    """Return the names of the decoder layers' modules; a strategy that wraps them changes their classes.

    Args:
        model: not wrapped; it may be on the meta device.

    Raises:
        ConfigError: the model does not say which they are.
    """
    layers = decoder_layers(model)
    named = ((name, module) for name, module in model.named_modules() if not is_vision_name(name))
    names = [name for name, module in named if any(module is layer for layer in layers)]
    if not names:
        raise ConfigError(f"{type(model).__name__} declares no decoder layers (`_no_split_modules`): parity needs them")
    return names


@contextmanager
def outputs_of(model: Any, layers: Sequence[str]) -> Iterator[dict[str, torch.Tensor]]:
    """Record the outputs [..., H] of embeddings and layers of the next forward, by stage.

    Args:
        model: the causal LM.
        layers: names of its decoder layers.
    """
    recorded: dict[str, torch.Tensor] = {}

    def record(name: str) -> Any:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            recorded[name] = output[0] if isinstance(output, tuple) else output

        return hook

    named = {"embeddings": model.get_input_embeddings()}
    named |= {f"layer {number}": layer for number, layer in enumerate(map(model.get_submodule, layers), start=1)}
    hooks = [module.register_forward_hook(record(name)) for name, module in named.items()]
    try:
        yield recorded
    finally:
        for hook in hooks:
            hook.remove()


def parameters_by_part(model: Any) -> dict[str, list[str]]:
    """Return part -> its parameters, in the order in which a backward pass reaches the last of a part's gradients.

    Parts are `head` (what follows the last layer), the layers from the last to the first, and `embeddings`: what is
    used before the first layer or within several, tied embeddings and what sees images among it.
    """
    layers = layer_names(model)
    owner: dict[int, str] = {}
    for number, layer in enumerate(layers, start=1):
        for parameter in model.get_submodule(layer).parameters():
            owner.setdefault(id(parameter), f"layer {number}")
    trained = trained_parameters(model)
    owner |= {id(parameter): "embeddings" for name, parameter in trained.items() if is_vision_name(name)}
    outside = {name: p for name, p in trained.items() if id(p) not in owner}
    early = _used_before_the_end(model, list(outside.values()))
    names = ["head", *(f"layer {number}" for number in range(len(layers), 0, -1)), "embeddings"]
    parts: dict[str, list[str]] = {name: [] for name in names}
    for name, parameter in trained.items():
        rest = "embeddings" if id(parameter) in early else "head"
        parts[owner.get(id(parameter), rest)].append(name)
    return {name: members for name, members in parts.items() if members}


def _used_before_the_end(model: Any, parameters: Sequence[torch.Tensor]) -> set[int]:
    """Return the ids of those parameters on which the last layer's output depends."""
    if not parameters:
        return set()
    ids = torch.zeros(1, 2, dtype=torch.int64)
    layers = layer_names(model)
    with in_fp64(), outputs_of(model, layers) as outputs:
        _logits(model, ids, None)
    last = outputs[f"layer {len(layers)}"]
    gradients = torch.autograd.grad(last.sum(), parameters, allow_unused=True)
    return {id(p) for p, gradient in zip(parameters, gradients, strict=True) if gradient is not None}


def _forward(model: Any, step: FixedStep) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
    """Return the hidden states that predict response tokens, by stage [R, H], and their logits [R, V]."""
    parts: dict[str, list[torch.Tensor]] = {}
    places = []
    layers = layer_names(model)
    for ids, place, rows, images in step.batches():
        with outputs_of(model, layers) as outputs:
            logits = _logits(model, ids, images)
        for name, values in (*outputs.items(), ("logits", logits)):
            parts.setdefault(name, []).append(values.flatten(0, 1)[rows])
        places.append(place)
    order = torch.cat(places).argsort()
    hidden = {name: torch.cat(each)[order] for name, each in parts.items()}
    logits = hidden.pop("logits")
    return hidden, logits


def _logits(model: Any, ids: torch.Tensor, images: PromptImages | None) -> torch.Tensor:
    """Return the logits [B, L, V] of sequences; tokens that stand for parts of images are never sampled."""
    with own_inputs(model, ids, images) as options:
        return ban(model(input_ids=ids, use_cache=False, **options).logits, placeholder_ids(model.config))


def golden_advantages(step: FixedStep) -> torch.Tensor:
    """(r - mean) / (std + 1e-6) of each group, with the unbiased standard deviation."""
    parts = []
    for index in range(len(step.prompts)):
        rewards = step.rewards[step.prompt_index == index]
        parts.append((rewards - rewards.mean()) / (rewards.std() + 1e-6))
    return torch.cat(parts)


def golden_loss(
    logprob: torch.Tensor, old: torch.Tensor, ref: torch.Tensor, advantage: torch.Tensor, config: Config
) -> torch.Tensor:
    """PPO's clipped surrogate plus the k3 estimator of the KL, per token."""
    loss, kl = config.algorithm.loss, config.algorithm.kl
    ratio = (logprob - old).exp()
    surrogate = -torch.minimum(advantage * ratio, advantage * ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high))
    gap = ref - logprob
    return surrogate + kl.coef * (gap.exp() - gap - 1)


def adamw(weight: torch.Tensor, gradient: torch.Tensor, config: Config, steps: int = 1) -> torch.Tensor:
    """Return a weight after AdamW's first steps.

    Args:
        weight: before.
        gradient: of the first step; that of the second is `SECOND` times as large.
        config: settings of the optimizer.
        steps: 1 or 2.
    """
    optim = config.optim
    decay = optim.weight_decay if weight.ndim > 1 else 0.0  # norms and biases have none
    momentum = variance = torch.zeros_like(weight)
    for count, factor in zip(range(1, steps + 1), (1.0, SECOND), strict=False):
        momentum, variance = (
            beta * state + (1 - beta) * value
            for beta, state, value in zip(
                optim.betas, (momentum, variance), (factor * gradient, (factor * gradient).square()), strict=True
            )
        )
        mean, square = (
            state / (1 - beta**count) for beta, state in zip(optim.betas, (momentum, variance), strict=True)
        )
        weight = weight * (1 - optim.lr * decay) - optim.lr * mean / (square.sqrt() + optim.eps)
    return weight


@contextmanager
def updated(model: Any, gradients: Gradients, config: Config) -> Iterator[None]:
    """Give the model the weights after the update within the block."""
    scale, before = clip_coefficient(gradient_norm(gradients), config), {}
    parameters = trained_parameters(model)
    with torch.no_grad():
        for name, gradient in gradients.items():
            if gradient is not None:
                before[name] = parameters[name].detach().clone()
                parameters[name].copy_(adamw(before[name], gradient * scale, config))
    try:
        yield
    finally:
        with torch.no_grad():
            for name, weight in before.items():
                parameters[name].copy_(weight)


def logprobs_after(
    model: Any, step: FixedStep, config: Config, gradients: Gradients, rounded: tuple[Precision, int] | None = None
) -> torch.Tensor:
    """Return the log-probs after the update, [R].

    Args:
        model, step, config, rounded: as for `golden_step`.
        gradients: of the update, before clipping.
    """
    around = nullcontext() if rounded is None else Rounded(rounded[0], seed=-1 - rounded[1])
    with updated(model, gradients, config), torch.no_grad(), in_fp64(), around:
        _, logits = _forward(model, step)
        return (logits / config.rollout.temperature).log_softmax(-1).gather(1, step.tokens[:, None])[:, 0]
