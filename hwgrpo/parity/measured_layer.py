"""One decoder layer, or a large model's tables, by this project's parts on a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hwgrpo_backends.device import Device

from hwgrpo.config import Config
from hwgrpo.models.lm_head import replaced_forward
from hwgrpo.models.loading import load_tokenizer
from hwgrpo.parity.fixed_step import FixedStep
from hwgrpo.parity.golden import outputs_of
from hwgrpo.parity.layer_states import PrefixStep
from hwgrpo.parity.measured import Measured, advantages_of, build_measured, gradients_of
from hwgrpo.training.policy.auto_settings import micro_batch_tokens
from hwgrpo.training.policy.layouts import Layout
from hwgrpo.training.policy.micro_batch import MicroBatch, build_micro_batch, split_micro_batches


def build_layer(config: Config, device: Device, layer: str, folder: Path) -> Measured:
    """Load a model with one layer onto the device, as a run loads the whole.

    Args:
        config: the settings, of the saved one-layer model.
        device: the device, prepared.
        layer: name of the layer's module.
        folder: for files of the run.
    """
    return build_measured(config, device, load_tokenizer(config.model), [layer], folder, samples=False)


@dataclass(frozen=True)
class MeasuredLayer:
    """What the device computed; tensors are on the host."""

    outputs: Mapping[str, tuple[torch.Tensor, torch.Tensor]]
    """Layout, `rows` or `dense mask` -> prefixes [M] int64 of all tokens of all rows, and the layer's outputs [M, H]
    for them."""
    gradients: Mapping[str, torch.Tensor]
    """Parameter -> gradient, of those that have one."""
    updated: Mapping[str, torch.Tensor]
    """Parameter -> weight after the update."""
    layout: str
    notes: Sequence[str]


def measured_layer(measured: Measured, prefixes: PrefixStep, upstream: torch.Tensor) -> MeasuredLayer:
    """Run a layer forward and backward, and update its weights.

    Args:
        measured: the parts; their weights are updated.
        prefixes: the step.
        upstream: [P, H] gradient of each prefix's output, of all of its occurrences together.
    """
    update, strategy, optim = measured.update, measured.strategy, measured.config.optim
    outputs = {"rows": _passes(measured, update.layout, prefixes, upstream)}
    if measured.models.layout != update.layout:
        outputs["dense mask"] = _passes(measured, measured.models.layout, prefixes, None)
    strategy.reduce_gradients()
    gradients = gradients_of(measured)
    assert gradients is not None, "a single process shows them"
    strategy.clip_gradients(optim.grad_clip)
    strategy.step(optim.lr)
    updated = {name: weight.detach().cpu().clone() for name, weight in strategy.gather_full_parameters()}
    return MeasuredLayer(outputs, gradients, updated, update.layout.name, tuple(measured.notes))


def _passes(
    measured: Measured, layout: Layout, prefixes: PrefixStep, upstream: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return prefixes and outputs of all tokens, in several micro-batches; with `upstream`, run backward, too."""
    update, device = measured.update, measured.device.torch_device
    batch = prefixes.step.train_batch(torch.zeros(len(prefixes.step.rewards)))
    budget = micro_batch_tokens(measured.config, device)
    parts = split_micro_batches(batch, range(len(batch)), budget, layout, update.policy.hidden_size)
    micros = [build_micro_batch(batch, rows, {}, layout) for rows in parts]
    prefix = torch.cat([micro.input_ids[micro.is_token] for micro in micros])
    occurrences = prefix.bincount(minlength=len(prefixes.tokens)).clamp_min(1)
    values = []
    update.policy.train(upstream is not None)
    for number, micro in enumerate(micros):
        with outputs_of(measured.model, measured.layers) as recorded, torch.set_grad_enabled(upstream is not None):
            update.policy.hidden_states(micro.to(device))
        output = recorded["layer 1"]
        values.append(output.detach()[micro.is_token.to(device)].float().cpu())
        if upstream is not None:
            share = upstream / occurrences[:, None]
            gradient = share[micro.input_ids] * micro.is_token[..., None]
            with measured.strategy.accumulate(last=number == len(micros) - 1):
                output.backward(gradient.to(output))
    return prefix, torch.cat(values)


@dataclass(frozen=True)
class MeasuredHead:
    """What the device computed; tensors are on the host."""

    stages: Mapping[str, torch.Tensor]
    """Log-probs, entropy, advantages and loss."""
    dense: torch.Tensor | None
    """[R] log-probs with the mask that the layout uses in short rows."""
    states_gradient: torch.Tensor
    """[Q, H] gradient of the last hidden states."""
    gradients: Mapping[str, torch.Tensor]
    """Parameter -> gradient, of those that have one."""
    updated: Mapping[str, torch.Tensor]
    """Parameter -> weight after the update."""


def measured_head(
    measured: Measured,
    step: FixedStep,
    states: torch.Tensor,
    predicting: torch.Tensor,
    logprobs: torch.Tensor,
    *,
    tuple_length: int,
) -> MeasuredHead:
    """Run what follows the last layer, with given outputs of that layer.

    Args:
        measured: the parts; their weights are updated.
        step: the step, in the model's vocabulary.
        states: [Q, H] outputs of the last layer that predict response tokens.
        predicting: [R] int64: which of them predicts each response token.
        logprobs: [R] those of the fp64 step, around which the old and reference log-probs lie.
        tuple_length: values that a layer returns as a tuple; 0: it returns a tensor.
    """
    update, strategy, optim = measured.update, measured.strategy, measured.config.optim
    leaf = states.float().to(measured.device.torch_device).requires_grad_()
    with _states_in_place(measured, leaf, predicting, tuple_length=tuple_length):
        entropies = torch.zeros(len(step.tokens))
        batch = step.train_batch(torch.zeros(len(step.rewards)))
        stages = {"log-probs": update.score(batch, entropies=entropies), "entropy": entropies}
        dense = None
        if measured.models.layout != update.layout:
            branched, update.layout = update.layout, measured.models.layout
            dense = update.score(batch)
            update.layout = branched
        stages["advantages"] = advantages_of(measured, step)
        batch = step.train_batch(stages["advantages"], *step.around(logprobs))
        loss, _ = update.accumulate_gradients(batch, range(len(batch)))
    stages["loss"] = torch.tensor([loss], dtype=torch.float64)
    gradients = gradients_of(measured)
    assert gradients is not None, "a single process shows them"
    states_gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    strategy.clip_gradients(optim.grad_clip)
    strategy.step(optim.lr)
    # the weights themselves where they are on the host: copies of a large vocabulary's take as much memory
    updated = {name: weight.detach().cpu() for name, weight in strategy.gather_full_parameters() if name in gradients}
    return MeasuredHead(stages, dense, states_gradient.float().cpu(), gradients, updated)


def measured_embeddings(measured: Measured, step: FixedStep) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token ids [M] of all rows, and the outputs [M, H] of the embeddings for them."""
    update, device = measured.update, measured.device.torch_device
    batch = step.train_batch(torch.zeros(len(step.rewards)))
    rows = update.layout.rows(batch, range(len(batch)), 1000, update.policy.hidden_size)
    micro = build_micro_batch(batch, rows, {}, update.layout).to(device)
    update.policy.eval()
    with outputs_of(measured.model, measured.layers) as recorded, torch.no_grad():
        update.policy(micro)
    return micro.input_ids[micro.is_token].cpu(), recorded["embeddings"][micro.is_token].float().cpu()


@contextmanager
def _states_in_place(
    measured: Measured, leaf: torch.Tensor, predicting: torch.Tensor, *, tuple_length: int
) -> Iterator[None]:
    """Replace the layer's output by given hidden states in the rows that predict response tokens, by 0 elsewhere."""
    layer: Any = measured.model.get_submodule(measured.layers[0])
    current: list[MicroBatch] = []

    def remember(policy: Any, inputs: Any) -> None:
        current[:] = [inputs[0]]

    def forward(hidden_states: torch.Tensor, *rest: Any, **options: Any) -> Any:
        (micro,) = current
        rows = micro.hidden_rows.cpu()
        of_row = torch.zeros(hidden_states.shape[:-1].numel(), dtype=torch.int64)
        of_row[rows] = predicting[micro.token_index]
        rows = rows.unique()
        output = torch.zeros_like(hidden_states, dtype=leaf.dtype).flatten(0, 1)
        output = output.index_copy(0, rows.to(leaf.device), leaf[of_row[rows].to(leaf.device)])
        output = output.view_as(hidden_states)
        return (output, *[None] * (tuple_length - 1)) if tuple_length else output

    hook = measured.update.policy.register_forward_pre_hook(remember)
    try:
        with replaced_forward(layer, forward):
            yield
    finally:
        hook.remove()
