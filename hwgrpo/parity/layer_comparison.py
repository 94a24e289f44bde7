"""The comparison of a large model layer by layer: embeddings, chosen layers, and what follows the last one."""

from __future__ import annotations

import gc
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from hwgrpo_backends.device import Device
from hwgrpo_kernels import default_registry
from torch import nn

from hwgrpo.config import Config
from hwgrpo.errors import ConfigError
from hwgrpo.models.loading import load_model_config
from hwgrpo.models.lora import uses_lora
from hwgrpo.models.placeholders import reads_images
from hwgrpo.models.tiny import character_tokenizer
from hwgrpo.parity.comparison import DENSE, Parity, check_features, host_bytes, missing
from hwgrpo.parity.fixed_step import FixedStep, make_step
from hwgrpo.parity.golden import (
    adamw,
    clip_coefficient,
    gradient_name,
    gradient_norm,
    load_golden_model,
    updated_name,
)
from hwgrpo.parity.golden_head import GoldenHead, HeadPass
from hwgrpo.parity.golden_layer import OUTPUT, blocks, effects, layer_step, parameters_of, rounding_of_layer
from hwgrpo.parity.layer_states import LayerStates, PrefixStep, check_alone, compute_states, number_prefixes
from hwgrpo.parity.measured_layer import (
    MeasuredHead,
    build_layer,
    measured_embeddings,
    measured_head,
    measured_layer,
)
from hwgrpo.parity.one_layer_models import LargeModel, open_large_model
from hwgrpo.parity.rounded_operations import Precision
from hwgrpo.support.stage_differences import (
    COARSE,
    Stage,
    compare_tensor,
    largest,
    least_tolerance,
    rounding_tolerance,
    worst_of,
)
from hwgrpo.training.policy.auto_settings import choose_dtype, choose_strategy

NOTE = "each layer alone on fp64 hidden states: errors that accumulate over layers are not compared"
BYTES_PER_LAYER_PARAMETER, BYTES_PER_HEAD_PARAMETER, OTHER_BYTES = 36, 27, 3 * 2**30
"""Host memory. A layer in fp64 has its weights, its gradients without and with rounding and their copies; the fp32
gradients and updated weights of the device are held beside. The head in fp32 has weights, gradients, two optimizer
states and a copy of the gradients. Then logits in fp64, and the libraries."""


def compare_layers(
    config: Config, device: Device, folder: Path, layers: str, report: Callable[[str], None] = lambda line: None
) -> Parity:
    """Compare a model's embeddings, some of its layers, each alone, and what follows the last one with fp64.

    Args:
        config: `settings.BASE` with overrides.
        device: the device, prepared.
        folder: for files of the run, removed by the caller.
        layers: a number, or `all`.
        report: receives lines of progress.

    Raises:
        ConfigError: the model cannot be read or split into layers, or its largest part does not fit the host's memory.
    """
    check_features(config.model)
    settings = load_model_config(config.model)
    if reads_images(settings):
        raise ConfigError(
            f"--layers {layers}: model.path={config.model.path!r} reads images ({settings.model_type}), and layers are "
            "compared on text alone; leave --layers out, or use the text model that it was made of"
        )
    if uses_lora(config.model.lora):
        raise ConfigError("--layers with model.lora: layers are compared without adapters; leave one of them out")
    if choose_strategy(config.trainer.strategy) != "single":
        raise ConfigError(
            f"--layers with trainer.strategy={choose_strategy(config.trainer.strategy)}: layers are compared in one "
            "process; start it without a launcher, with trainer.strategy=auto"
        )
    large = open_large_model(config.model)
    chosen = select_layers(layers, len(large.layers))
    check_layer_memory(large)
    dtype = choose_dtype(config.model.dtype, device)
    comparison = _Comparison(config, device, folder, large, Precision(dtype), report)
    stages = [*comparison.run(chosen)]
    return Parity(
        stages=stages,
        layout=comparison.layout,
        dtype=str(dtype).removeprefix("torch."),
        notes=(NOTE, *dict.fromkeys(comparison.notes), *default_registry.explain()),
        tensors={},
        model="",
        is_main=True,
    )


def select_layers(layers: str, total: int) -> list[int]:
    """Return the numbers, from 0 on, of layers that are spread evenly from the first to the last.

    Args:
        layers: how many, or `all`.
        total: layers of the model.

    Raises:
        ConfigError: it is neither.
    """
    if layers == "all":
        return [*range(total)]
    if not layers.isdecimal() or not 1 <= int(layers) <= total:
        raise ConfigError(f"--layers {layers}: the model has {total} layers; use 1 to {total}, or all")
    count = int(layers)
    return [round(i * (total - 1) / max(1, count - 1)) for i in range(count)]


def check_layer_memory(large: LargeModel) -> None:
    """Check that the largest part fits the host's memory, before any is loaded.

    Raises:
        ConfigError: it does not.
    """
    layer, head = max(large.layer_sizes), large.vocabulary * large.hidden_size
    needed = OTHER_BYTES + max(
        BYTES_PER_LAYER_PARAMETER * layer, BYTES_PER_HEAD_PARAMETER * head + 4 * max(large.layer_sizes)
    )
    memory = host_bytes()
    if needed > memory:
        raise ConfigError(
            f"model.path={large.settings.path!r} with --layers: its largest layer has {layer:,} parameters and its "
            f"LM head {head:,}; comparing them with fp64 takes {needed / 2**30:.1f} GiB of host memory, and this host "
            f"has {memory / 2**30:.1f} GiB; use a host with more memory, or a smaller model of the same architecture"
        )


@dataclass
class _Comparison:
    config: Config
    device: Device
    folder: Path
    large: LargeModel
    precision: Precision
    report: Callable[[str], None]
    layout: str = ""
    notes: tuple[str, ...] = ()

    def run(self, chosen: Sequence[int]) -> Iterator[Stage]:
        """Yield the stages."""
        large = self.large
        step = make_step(large.weights.shapes[large.embeddings][0], self.config.trainer.seed)
        prefixes = number_prefixes(step)
        states = compute_states(large, prefixes, chosen, self.device, self.report)
        self.report("embeddings")
        yield self._embeddings(step, prefixes, states)
        for number in chosen:
            gc.collect()
            self.report(f"layer {number + 1}")
            yield from self._layer(number, prefixes, states)
        gc.collect()
        self.report("head")
        yield from self._head(step, prefixes, states)

    @contextmanager
    def _saved(self, part: str, number: int, table: torch.Tensor, head: torch.Tensor | None = None) -> Iterator[Config]:
        """Save a model with one layer within the block; yield the settings that load it.

        Args:
            part: name of its folder.
            number, table, head: as for `LargeModel.save_layer`.
        """
        config = deepcopy(self.config)
        config.model = self.large.save_layer(number, self.folder / part, table, head)
        try:
            yield config
        finally:
            shutil.rmtree(self.folder / part, ignore_errors=True)

    def _embeddings(self, step: FixedStep, prefixes: PrefixStep, states: LayerStates) -> Stage:
        large = self.large
        with self._saved("embeddings", 0, large.weights.tensor(large.embeddings)) as config:
            measured = build_layer(config, self.device, large.layers[0], self.folder)
        ids, actual = measured_embeddings(measured, step)
        of_token = {token: prefix for prefix, token in enumerate(prefixes.tokens.tolist())}
        right = states.embeddings[[of_token[token] for token in ids.tolist()]]
        return compare_tensor("embeddings", "embeddings", actual, right, least_tolerance(right))

    def _layer(self, number: int, prefixes: PrefixStep, states: LayerStates) -> Iterator[Stage]:
        large, first = self.large, self.large.layers[0]
        stage = f"layer {number + 1}"
        generator = torch.Generator().manual_seed(self.config.trainer.seed)
        shape = states.entering[number].shape
        table = (states.entering[number] / states.scale).float()
        # the startup checks run on ids of the middle of the vocabulary: every row is a hidden state of the model
        table = table[torch.arange(max(len(table), len(character_tokenizer("")))) % len(table)]
        head = 0.02 * torch.randn(table.shape, generator=generator)
        upstream = torch.randn(shape, generator=generator) * prefixes.is_input[:, None]
        with self._saved(stage.replace(" ", "-"), number, table, head) as config:
            # clips gradients to the size of AdamW's eps: the step shows them, and neither fp32 nor signs hide it
            config.optim.grad_clip = config.optim.eps * math.sqrt(large.layer_sizes[number])
            measured = measured_layer(build_layer(config, self.device, first, self.folder), prefixes, upstream)
            self.layout, self.notes = measured.layout, (*self.notes, *measured.notes)
            gc.collect()  # frees the device's model before the one in fp64
            model = load_golden_model(config.model)
        embeddings: Any = model.get_input_embeddings()
        stored = embeddings.weight
        embeddings.weight = nn.Parameter(states.entering[number] / states.scale)
        with torch.no_grad():
            alone, _ = layer_step(model, first, prefixes, None)
        check_alone(large.settings.path, number, alone, states.leaving[number])
        embeddings.weight = stored
        output, gradients = layer_step(model, first, prefixes, upstream)
        moved = rounding_of_layer(model, first, prefixes, upstream, config, self.precision, output, gradients)

        def shown(parameter: str) -> str:
            if parameter.startswith(f"{first}."):
                return large.layers[number] + parameter.removeprefix(first)
            return f"the input of {large.layers[number]}"

        for layout, (prefix, actual) in measured.outputs.items():
            right = output[prefix]
            tolerance = rounding_tolerance(moved[OUTPUT], right)
            name = stage if layout == "rows" else f"{stage}, {layout}"
            yield compare_tensor(name, f"output of {large.layers[number]}", actual, right, tolerance)
        of_gradients, of_weights = [], []
        scale = clip_coefficient(gradient_norm(gradients), config)
        for name in parameters_of(model, first):
            before, exact = model.get_parameter(name).detach(), gradients[name]
            right = torch.zeros_like(before) if exact is None else exact
            is_missing = exact is not None and name not in measured.gradients
            gradient = _Blocks(f"{stage}, gradients", gradient_name(shown(name)), is_missing=is_missing)
            updated = _Blocks(f"{stage}, updated weights", updated_name(shown(name)))
            actual = measured.gradients.get(name, torch.zeros_like(right))
            for start, (found, slope, weight, new) in blocks(actual, right, before, measured.updated[name]):
                gradient.add(found, slope, start)
                after = weight if exact is None else adamw(weight, slope * scale, config)
                updated.add(new.double() - weight, after - weight, start, largest(weight))
            of_gradients.append(gradient.stage(moved.get(gradient_name(name), ())))
            if name.startswith(f"{first}."):
                of_weights.append(updated.stage(moved.get(updated_name(name), ())))
        yield worst_of(of_gradients)
        yield worst_of(of_weights)

    def _head(self, step: FixedStep, prefixes: PrefixStep, states: LayerStates) -> Iterator[Stage]:
        large, last = self.large, len(self.large.layers) - 1
        vocabulary = torch.zeros(len(character_tokenizer("")), large.hidden_size)
        with self._saved("norm", last, vocabulary) as config:
            model = load_golden_model(config.model)
        model.get_submodule(large.layers[0]).to("meta")
        used, predicting = prefixes.predicting.unique(return_inverse=True)
        leaving = states.leaving[last][used].float().double()
        head = GoldenHead(model, large.layers[0], large, leaving, predicting, tuple_length=states.tuple_length)
        exact, *draws = head.compute(step, self.config, self.precision)

        with self._saved("head", last, large.weights.tensor(large.head)) as config:
            measured = build_layer(config, self.device, large.layers[0], self.folder)
        actual = measured_head(
            measured, step, leaving, predicting, exact.stages["log-probs"], tuple_length=states.tuple_length
        )
        del measured
        gc.collect()
        yield from self._head_stages(exact, draws, actual)
        yield from self._head_gradients(head, exact, draws, actual, large.parameters[0])

    def _head_stages(self, exact: HeadPass, draws: Sequence[HeadPass], measured: MeasuredHead) -> Iterator[Stage]:
        for name, right in exact.stages.items():
            # the loss is a mean of products of ratios and advantages, which cancel
            summands = exact.stages["advantages"] if name == "loss" else right
            moved = [float((draw.stages[name] - right).abs().max()) for draw in draws]
            tolerance = rounding_tolerance(moved, summands)
            yield compare_tensor(name, name, measured.stages[name], right, tolerance)
            if name == "log-probs" and measured.dense is not None:
                yield compare_tensor(DENSE, DENSE, measured.dense, right, tolerance)

    def _head_gradients(
        self,
        head: GoldenHead,
        exact: HeadPass,
        draws: Sequence[HeadPass],
        measured: MeasuredHead,
        table: str,
    ) -> Iterator[Stage]:
        """Yield the stages of gradients and updated weights; the LM head's are compared by rows of the vocabulary.

        Args:
            head: the fp64 side.
            exact, draws: its passes.
            measured: the device's.
            table: the device's name of the LM head's weight.
        """
        config, shown = self.config, self.large.parameters[1]
        scales = {each.draw: clip_coefficient(each.gradient_norm(), config) for each in (exact, *draws)}
        is_missing = table not in measured.gradients
        gradient = _Blocks("head, gradients", gradient_name(shown), is_missing=is_missing)
        updated = _Blocks("head, updated weights", updated_name(shown), is_missing=is_missing)
        moved: list[Mapping[str, float]] = [dict.fromkeys(("gradient", "updated"), 0.0) for _ in draws]
        for start, weight in head.weight_rows():
            stop = start + len(weight)
            right = head.weight_gradient(exact, start, stop, self.precision)
            for index, each in enumerate(draws):
                other = head.weight_gradient(each, start, stop, self.precision)
                found = effects(other, right, scales[each.draw], scales[None], config)
                moved[index] = {name: max(value, found[name]) for name, value in moved[index].items()}
            if is_missing:
                continue
            gradient.add(measured.gradients[table][start:stop], right, start)
            after = adamw(weight, right * scales[None], config)
            updated.add(measured.updated[table][start:stop].double() - weight, after - weight, start, largest(weight))
        gradients = [gradient.stage([each["gradient"] for each in moved])]
        weights = [updated.stage([each["updated"] for each in moved])]

        given = _Blocks("head, gradients", "gradient of the last hidden states")
        given.add(measured.states_gradient, exact.states_gradient, 0)
        distances = [largest(each.states_gradient - exact.states_gradient) for each in draws]
        gradients.append(given.stage(distances))
        for name, right in exact.outside.items():
            before = head.parameter(name)
            found = [effects(each.outside[name], right, scales[each.draw], scales[None], config) for each in draws]
            is_missing = name not in measured.gradients
            gradient = _Blocks("head, gradients", gradient_name(name), is_missing=is_missing)
            gradient.add(measured.gradients.get(name, right), right, 0)
            gradients.append(gradient.stage([each["gradient"] for each in found]))
            after = adamw(before, right * scales[None], config)
            updated = _Blocks("head, updated weights", updated_name(name), is_missing=is_missing)
            updated.add(measured.updated.get(name, before).double() - before, after - before, 0, largest(before))
            weights.append(updated.stage([each["updated"] for each in found]))
        yield worst_of(gradients)
        yield worst_of(weights)


class _Blocks:
    """A tensor that is compared by rows, before its tolerance is known.

    Args:
        stage: its stage.
        tensor: its name.
        is_missing: the device did not compute it, which fails.
    """

    def __init__(self, stage: str, tensor: str, *, is_missing: bool = False) -> None:
        self._worst, self._is_missing = Stage(stage, 0.0, 0.0, tensor), is_missing
        self._largest = self._summand = 0.0

    def add(self, actual: torch.Tensor, expected: torch.Tensor, start: int, summand: float | None = None) -> None:
        """Compare some rows.

        Args:
            actual, expected: of one shape, on the host; one without dimensions is a row.
            start: index of the first row.
            summand: their largest summand; None: the largest entry.
        """
        if not expected.ndim:
            actual, expected = actual.reshape(1), expected.reshape(1)
        stage = compare_tensor(self._worst.name, self._worst.tensor, actual, expected, 0.0)
        most = largest(expected)
        self._largest = max(self._largest, most)
        self._summand = max(self._summand, most if summand is None else summand)
        if stage.index and not stage.error <= self._worst.error and not math.isnan(self._worst.error):
            self._worst = replace(stage, index=(stage.index[0] + start, *stage.index[1:]))

    def stage(self, draws: Sequence[float]) -> Stage:
        """Return the stage, by how far rounding moves the tensor in each draw."""
        if self._is_missing:
            return missing(self._worst.name, self._worst.tensor)
        tolerance = rounding_tolerance(draws, torch.tensor([self._summand]))
        return replace(self._worst, tolerance=tolerance, is_coarse=tolerance > COARSE * self._largest)
