"""What follows the last layer in fp64: products by rows of the vocabulary, written out, and the rest by transformers.

A matrix [V, H] and its gradient are never in memory as a whole; logits and their gradients [R, V] are, once per draw.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from hwgrpo.config import Config
from hwgrpo.models.lm_head import backbone, replaced_forward
from hwgrpo.models.rounding import unit_of_sum
from hwgrpo.parity.fixed_step import FixedStep
from hwgrpo.parity.golden import DRAWS, loss_of_logits
from hwgrpo.parity.one_layer_models import LargeModel
from hwgrpo.parity.rounded_operations import Precision, Rounded, in_fp64

ROWS = 2**21
"""Numbers of the head's weight in memory at once."""
PARTS = 5
"""Computations besides those by rows, whose roundings have seeds of their own."""


@dataclass
class HeadPass:
    """What follows the last layer, computed once: exactly (draw None), or with other roundings."""

    draw: int | None
    states: torch.Tensor
    """[Q, H]: the leaf."""
    normed: torch.Tensor
    """[R, H] input of the head for each response token, with the graph from `states`."""
    stages: Mapping[str, torch.Tensor]
    products: torch.Tensor
    """[R, V]: input @ weight, and later the loss's gradient of it."""
    outside: Mapping[str, torch.Tensor]
    """Parameter outside of layers and tables -> gradient."""
    states_gradient: torch.Tensor

    def gradient_norm(self) -> torch.Tensor:
        """Return the norm of all gradients, [1], that of the head's weight [V, H] by products [R, R]."""
        normed = self.normed.detach()
        head = ((normed @ normed.T) * (self.products @ self.products.T)).sum()
        return torch.stack([head, *(g.square().sum() for g in self.outside.values())]).sum().sqrt()[None]


class GoldenHead:
    """What follows the last layer, in fp64 on the CPU.

    Args:
        model: a one-layer model of transformers in fp64, whose layer and tables are not used.
        layer: name of its layer's module.
        large: has the head's weight.
        states: [Q, H] outputs of the last layer that predict response tokens.
        predicting: [R] int64: which of them predicts each response token.
        tuple_length: values that a layer returns as a tuple; 0: it returns a tensor.
    """

    def __init__(
        self,
        model: Any,
        layer: str,
        large: LargeModel,
        states: torch.Tensor,
        predicting: torch.Tensor,
        *,
        tuple_length: int,
    ) -> None:
        self._model, self._layer, self._large = model, model.get_submodule(layer), large
        self._states, self._predicting, self._tuple_length = states, predicting, tuple_length
        tables = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
        self._outside = [
            name for name, p in model.named_parameters() if id(p) not in tables and not name.startswith(f"{layer}.")
        ]

    def parameter(self, name: str) -> torch.Tensor:
        """Return a parameter outside of layers and tables."""
        return self._model.get_parameter(name).detach()

    def weight_rows(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the first row, and rows of the head's weight in fp64."""
        large, count = self._large, max(1, ROWS // self._large.hidden_size)
        for start in range(0, large.vocabulary, count):
            rows = large.weights.rows(large.head, start, min(start + count, large.vocabulary))
            yield start, rows.double()

    def compute(self, step: FixedStep, config: Config, precision: Precision) -> list[HeadPass]:
        """Return the exact pass, and `DRAWS` with other roundings."""
        passes = [self._input(draw, precision) for draw in (None, *range(DRAWS))]
        for start, weight in self.weight_rows():
            for each in passes:
                with _rounding(each.draw, precision, PARTS + start):
                    each.products[:, start : start + len(weight)] = each.normed.detach() @ weight.T
        around = None
        for each in passes:
            self._loss(each, step, config, precision, around)
            around = passes[0].stages["log-probs"]
        sums = [torch.zeros_like(each.normed) for each in passes]
        for start, weight in self.weight_rows():
            for each, total in zip(passes, sums, strict=True):
                total += each.products[:, start : start + len(weight)] @ weight
        for each, total in zip(passes, sums, strict=True):
            self._input_backward(each, total, precision)
        return passes

    def weight_gradient(self, each: HeadPass, start: int, stop: int, precision: Precision) -> torch.Tensor:
        """Return rows of the gradient of the head's weight."""
        with _rounding(each.draw, precision, PARTS + self._large.vocabulary + start):
            return each.products[:, start:stop].T @ each.normed.detach()

    def _input(self, draw: int | None, precision: Precision) -> HeadPass:
        leaf = self._states.clone().requires_grad_()
        with in_fp64(), self._states_in_place(leaf), _rounding(draw, precision, 0):
            normed = self._run(backbone(self._model), len(leaf)).last_hidden_state[0][self._predicting]
        products = torch.empty(len(normed), self._large.vocabulary, dtype=torch.float64)
        return HeadPass(draw, leaf, normed, {}, products, {}, torch.empty(0))

    def _loss(
        self, each: HeadPass, step: FixedStep, config: Config, precision: Precision, around: torch.Tensor | None
    ) -> None:
        """Compute log-probs, entropy, advantages and loss, and the gradient of the products in their place."""
        products = each.products.requires_grad_()
        head: Any = self._model.get_output_embeddings()
        with in_fp64():
            with (
                self._states_in_place(self._states),
                replaced_forward(head, lambda hidden: products[None]),
                _rounding(each.draw, precision, 1),
            ):
                logits = self._run(self._model, len(self._states)).logits[0]
            with _rounding(each.draw, Precision(torch.float32), 2):
                loss, each.stages = loss_of_logits(logits, step, config, around)
            with _rounding(each.draw, precision, 3):
                (each.products,) = torch.autograd.grad(loss, products)

    def _input_backward(self, each: HeadPass, total: torch.Tensor, precision: Precision) -> None:
        """Compute the gradients of norm and hidden states, by that of the head's input [R, H]."""
        if each.draw is not None:
            generator = torch.Generator().manual_seed(each.draw)
            unit = unit_of_sum(precision.dtype, self._large.vocabulary)
            total = total * (1 + unit * (2 * torch.rand(total.shape, generator=generator, dtype=total.dtype) - 1))
        parameters = [each.states, *(self._model.get_parameter(name) for name in self._outside)]
        with in_fp64(), _rounding(each.draw, precision, 4):
            states, *found = torch.autograd.grad(each.normed, parameters, total, allow_unused=True)
        each.states_gradient = states
        pairs = zip(self._outside, found, strict=True)
        each.outside = {name: gradient for name, gradient in pairs if gradient is not None}

    def _run(self, module: Any, length: int) -> Any:
        return module(input_ids=torch.zeros(1, length, dtype=torch.int64), use_cache=False)

    @contextmanager
    def _states_in_place(self, states: torch.Tensor) -> Iterator[None]:
        output = (states[None], *[None] * (self._tuple_length - 1)) if self._tuple_length else states[None]
        with replaced_forward(self._layer, lambda *args, **options: output):
            yield


def _rounding(draw: int | None, precision: Precision, part: int) -> AbstractContextManager[Any]:
    return nullcontext() if draw is None else Rounded(precision, seed=part * DRAWS + draw)
