"""The hidden states that enter each decoder layer of a large model in fp64, with one layer in memory at a time."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from hwgrpo_backends.device import Device
from torch import nn
from transformers import AutoModelForCausalLM

from hwgrpo.errors import ConfigError, error_text
from hwgrpo.models.layers import decoder_layers, set_parameter
from hwgrpo.models.lm_head import backbone
from hwgrpo.models.loading import turn_dropout_off
from hwgrpo.models.meta_device import META, parameter_slots
from hwgrpo.models.time_steps import lift_time_step_limits
from hwgrpo.models.tiny import character_tokenizer
from hwgrpo.parity.fixed_step import FixedStep
from hwgrpo.parity.golden import as_golden, load_golden_model
from hwgrpo.parity.one_layer_models import LargeModel
from hwgrpo.parity.rounded_operations import in_fp64, in_own_dtypes

SAME = 1e-9
"""Largest difference of two computations in fp64, in shares of the largest value."""


@dataclass(frozen=True)
class PrefixStep:
    """A step whose token ids are numbers of prefixes: a hidden state belongs to one of them, in every layout.

    Example:
        Two responses to one prompt of tokens (7, 9), which are (7, 5) and (7, 4), have the prefixes 0 = (7,),
        1 = (7, 9), 2 = (7, 9, 7), 3 = (7, 9, 7, 5), 4 = (7, 9, 7, 4): the prompt is (0, 1), responses (2, 3) and
        (2, 4).
    """

    step: FixedStep
    """Its ids are below P."""
    tokens: torch.Tensor
    """[P] int64: the last token of each prefix."""
    rows: torch.Tensor
    """[S, L] int64: prefixes of each sequence, with 0 after its end; under causal attention that changes nothing."""
    first: torch.Tensor
    """[P] int64: index of each prefix in the flattened rows."""
    is_input: torch.Tensor
    """[P] bool: whether a model reads its last token; that of a response is only predicted."""
    predicting: torch.Tensor
    """[R] int64: the prefix that predicts each response token."""


def number_prefixes(step: FixedStep) -> PrefixStep:
    """Return a step with prefixes in place of its tokens."""
    numbers: dict[tuple[int, ...], int] = {}
    prompts, responses, predicting, inputs = list(step.prompts), [], [], set()
    members: list[list[int]] = []
    for index, part in zip(step.prompt_index.tolist(), step.tokens.split(step.offsets.diff().tolist()), strict=True):
        tokens = (*step.prompts[index], *part.tolist())
        own = [numbers.setdefault(tokens[: end + 1], len(numbers)) for end in range(len(tokens))]
        size = len(step.prompts[index])
        prompts[index] = tuple(own[:size])
        responses += own[size:]
        predicting += own[size - 1 : -1]
        inputs |= {*own[:-1]}
        members.append(own)
    width = max(map(len, members))
    rows = torch.tensor([own + [0] * (width - len(own)) for own in members])
    places = {number: s * width + column for s, own in enumerate(members) for column, number in enumerate(own)}
    return PrefixStep(
        step=replace(step, prompts=tuple(prompts), tokens=torch.tensor(responses)),
        tokens=torch.tensor([tokens[-1] for tokens in numbers]),
        rows=rows,
        first=torch.tensor([places[number] for number in range(len(numbers))]),
        is_input=torch.tensor([number in inputs for number in range(len(numbers))]),
        predicting=torch.tensor(predicting),
    )


@dataclass
class LayerStates:
    """Hidden states of the P prefixes in fp64, [P, H] each."""

    embeddings: torch.Tensor
    """Output of the embeddings."""
    scale: float
    """Factor from a row of the embeddings' table to what enters the first layer."""
    entering: dict[int, torch.Tensor] = field(default_factory=dict)
    """Layer, from 0 on -> what enters it; of the chosen ones."""
    leaving: dict[int, torch.Tensor] = field(default_factory=dict)
    """Layer -> its output; of the chosen ones, and of the last."""
    tuple_length: int = 0
    """Values that a layer returns as a tuple; 0: it returns a tensor."""


def compute_states(
    large: LargeModel, prefixes: PrefixStep, chosen: Collection[int], device: Device, report: Callable[[str], None]
) -> LayerStates:
    """Run the large model's own forward in fp64 on the CPU, with each layer's weights in memory for its call only.

    Args:
        large: the model.
        prefixes: the step.
        chosen: layers whose states are returned.
        device: knows the errors of full memory, which propagate unchanged.
        report: receives a line of progress.

    Raises:
        ConfigError: the model needs weights that a model with one of its layers does not have.
    """
    path, number_of_layers = large.settings.path, len(large.layers)
    model = _without_weights(large)
    rows = large.weights.selected_rows(large.embeddings, prefixes.tokens.tolist()).double()
    table: Any = model.get_input_embeddings()
    table.weight, table.padding_idx = nn.Parameter(rows, requires_grad=False), None
    outside = [name for name, p in model.named_parameters() if p.device.type == "meta" and not _is_within(name, large)]
    with _loaded(large, 0, device) as one:
        parameters = dict(one.named_parameters())
        for name in outside:
            if name in parameters and name not in large.parameters:
                _replace(model, name, parameters[name])
    found = LayerStates(embeddings=torch.empty(0), scale=1.0)

    def enter(number: int, layer: Any, inputs: Any) -> None:
        report(f"hidden states, layer {number + 1} of {number_of_layers}")
        if number in chosen or number == 0:
            found.entering[number] = inputs.detach().flatten(0, 1)[prefixes.first]
        with _loaded(large, number, device) as one:
            _fill(path, layer, decoder_layers(one)[0], number)

    def leave(number: int, layer: Any, output: Any) -> None:
        found.tuple_length = len(output) if isinstance(output, tuple) else 0
        values: Any = output[0] if found.tuple_length else output
        if number in chosen or number == number_of_layers - 1:
            found.leaving[number] = values.detach().flatten(0, 1)[prefixes.first]
        for slots in parameter_slots(layer).values():
            set_parameter(slots, nn.Parameter(torch.empty(0), requires_grad=False))

    def embedded(module: Any, inputs: Any, output: torch.Tensor) -> None:
        found.embeddings = output.detach().flatten(0, 1)[prefixes.first]

    table.register_forward_hook(embedded)
    for number, name in enumerate(large.layers):
        layer: Any = model.get_submodule(name)
        layer.register_forward_pre_hook(
            lambda layer, args, kwargs, number=number: enter(
                number, layer, args[0] if args else kwargs["hidden_states"]
            ),
            with_kwargs=True,
        )
        layer.register_forward_hook(lambda layer, inputs, output, number=number: leave(number, layer, output))
    try:
        with torch.no_grad(), in_fp64():
            backbone(model)(input_ids=prefixes.rows, use_cache=False)
    except RuntimeError as error:
        if device.is_oom(error):
            raise
        raise ConfigError(
            f"model.path={path!r} with --layers: its forward failed, one layer after the other: {error_text(error)}; "
            "compare a small model of the same architecture without --layers"
        ) from error
    found.scale = _scale(path, rows, found.entering[0])
    return found


def check_alone(path: str, number: int, alone: torch.Tensor, within: torch.Tensor) -> None:
    """Check that a layer alone computes what it does within its model.

    Args:
        path: value of `model.path`, for the message.
        number: of the layer, from 0 on.
        alone, within: [P, H] its output in fp64, of the same input.

    Raises:
        ConfigError: it does not, as one does that reads outputs of other layers.
    """
    gap = float((alone - within).abs().max() / within.abs().max())
    if not gap <= SAME:
        raise ConfigError(
            f"model.path={path!r} with --layers: layer {number + 1} alone differs from itself within the model by "
            f"{gap:.2g} of the largest value in fp64, so it needs other layers; compare a small model of the same "
            "architecture without --layers"
        )


def _scale(path: str, rows: torch.Tensor, entering: torch.Tensor) -> float:
    place = int(rows.abs().argmax())
    scale = float(entering.flatten()[place] / rows.flatten()[place])
    if not (entering - rows * scale).abs().max() <= SAME * entering.abs().max():
        raise ConfigError(
            f"model.path={path!r} with --layers: what enters its first layer is no multiple of its embeddings, which "
            "is unsupported; compare a small model of the same architecture without --layers"
        )
    return scale


def _without_weights(large: LargeModel) -> Any:
    """Return the large model in fp64 with parameters on the meta device, but with its buffers."""
    config = deepcopy(large.config)
    turn_dropout_off(config)
    with _parameters_on_meta():
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    lift_time_step_limits(model)
    return as_golden(model)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Put the parameters of modules made within the block on the meta device; buffers keep their values."""
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(self, name, param)
        if param is not None:
            self._parameters[name] = nn.Parameter(param.to(META), requires_grad=False)

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


@contextmanager
def _loaded(large: LargeModel, number: int, device: Device) -> Iterator[Any]:
    """Load a model with one layer of the large one, in fp64."""
    with in_own_dtypes(), tempfile.TemporaryDirectory() as folder:
        vocabulary = len(character_tokenizer(""))
        settings = large.save_layer(number, Path(folder), torch.zeros(vocabulary, large.hidden_size))
        try:
            model = load_golden_model(settings)
        except Exception as error:  # a class of configurations refuses values in its own way
            if device.is_oom(error):
                raise
            raise ConfigError(
                f"model.path={large.settings.path!r} with --layers: layer {number + 1} alone is no model: "
                f"{error_text(error)}; compare a small model of the same architecture without --layers"
            ) from error
        yield model


def _is_within(parameter: str, large: LargeModel) -> bool:
    return any(parameter.startswith(f"{layer}.") for layer in large.layers)


def _replace(model: Any, name: str, parameter: nn.Parameter) -> None:
    owner, _, attribute = name.rpartition(".")
    model.get_submodule(owner)._parameters[attribute] = nn.Parameter(parameter.detach(), requires_grad=False)


def _fill(path: str, layer: Any, source: Any, number: int) -> None:
    """Give a layer the weights of another, and its buffers that are saved."""
    own, other = dict(layer.named_parameters()), dict(source.named_parameters())
    if own.keys() != other.keys():
        raise ConfigError(
            f"model.path={path!r} with --layers: layer {number + 1} alone has other weights than within the model, "
            f"{sorted(own.keys() ^ other.keys())[:3]}: its configuration has an unknown form"
        )
    for name, parameter in other.items():
        _replace(layer, name, parameter)
    saved = source.state_dict().keys()
    for name, buffer in source.named_buffers():
        if name in saved:
            owner, _, attribute = name.rpartition(".")
            layer.get_submodule(owner)._buffers[attribute] = buffer
