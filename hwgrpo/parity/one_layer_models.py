"""Folders of models with one decoder layer of a large model, read from its safetensors files by name."""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers.utils import SAFE_WEIGHTS_NAME

from hwgrpo.config.schema import ModelConfig
from hwgrpo.errors import ConfigError
from hwgrpo.models.loading import load_model, load_model_config, resolve_model_path
from hwgrpo.models.stored_dtype import cached_folder, read_header
from hwgrpo.models.tiny import character_tokenizer
from hwgrpo.models.weight_files import check_weight_files, indexed_files
from hwgrpo.parity.golden import layer_names

FLOATS = {"F64", "F32", "BF16", "F16"}
INDICES = ("attn_layer_indices", "mlp_only_layers", "moe_layers")
"""Settings that list the layers of a kind."""
OF_ALL_LAYERS = ("architectures", "time_step_limit", "mlp_multipliers", "ssm_multipliers")
"""Lists of which every layer reads the whole, however many layers there are."""


class StoredWeights:
    """The weights of a model's folder.

    Args:
        path: value of `model.path`, for messages.
        folder: the model's folder.

    Raises:
        ConfigError: it has no safetensors files, incomplete ones, or quantized weights.
    """

    def __init__(self, path: str, folder: Path) -> None:
        # as transformers chooses: other files beside them may have the weights once more, by other names
        whole = folder / SAFE_WEIGHTS_NAME
        files = [whole] if whole.is_file() else sorted(indexed_files(folder) or folder.glob("*.safetensors"))
        if not files:
            raise ConfigError(
                f"model.path={path!r} with --layers: its folder has no *.safetensors files, from which single layers "
                "are read; save it as safetensors, AutoModelForCausalLM.from_pretrained(MODEL).save_pretrained(FOLDER)"
            )
        check_weight_files(path, folder)
        headers = {file: read_header(file) for file in files}
        self.files = {name: file for file, header in headers.items() for name in header}
        self.shapes = {name: tuple(entry["shape"]) for header in headers.values() for name, entry in header.items()}
        if others := sorted({entry["dtype"] for header in headers.values() for entry in header.values()} - FLOATS):
            raise ConfigError(
                f"model.path={path!r} with --layers: its weights are stored as {', '.join(others)}; use a copy with "
                "weights in bf16, fp16 or fp32"
            )

    def tensor(self, name: str) -> torch.Tensor:
        """Return a weight in the dtype in which it is stored."""
        with safe_open(self.files[name], framework="pt") as file:
            return file.get_tensor(name)

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return the rows [start, stop) of a matrix."""
        with safe_open(self.files[name], framework="pt") as file:
            return file.get_slice(name)[start:stop]

    def selected_rows(self, name: str, rows: Sequence[int]) -> torch.Tensor:
        """Return some rows of a matrix."""
        with safe_open(self.files[name], framework="pt") as file:
            stored = file.get_slice(name)
            return torch.cat([stored[row : row + 1] for row in rows])


@dataclass(frozen=True)
class LargeModel:
    """A model whose layers are loaded one at a time."""

    settings: ModelConfig
    """The run's `model` settings."""
    config: Any
    """The model's configuration."""
    weights: StoredWeights
    layers: Sequence[str]
    """Names of the decoder layers' modules."""
    prefix: str
    """What the names of stored layers begin with, up to their number."""
    outside: Sequence[str]
    """Stored weights outside the layers, tables excepted."""
    embeddings: str
    """Stored name of the embeddings."""
    head: str
    """Stored name of the LM head's weight: that of the embeddings where they are tied."""
    parameters: tuple[str, str]
    """Names of the two in the model."""
    layer_sizes: Sequence[int]
    """Parameters of each layer."""

    @property
    def vocabulary(self) -> int:
        """Rows of the head."""
        return self.weights.shapes[self.head][0]

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return self.weights.shapes[self.head][1]

    def save_layer(
        self, number: int, folder: Path, table: torch.Tensor, head: torch.Tensor | None = None
    ) -> ModelConfig:
        """Save a model with one decoder layer, and return the settings that load it.

        Args:
            number: of the layer, from 0 on.
            folder: receives the files.
            table: [V, H] its embeddings.
            head: [V, H] its LM head; None: its embeddings.
        """
        folder.mkdir(exist_ok=True)
        tokenizer = character_tokenizer("")
        config = one_layer_config(self.settings.path, self.config, number)
        for each in (config, config.get_text_config()):
            each.tie_word_embeddings = head is None
            each.vocab_size = len(table)
            each.dtype = torch.float32
            each.bos_token_id, each.eos_token_id, each.pad_token_id = None, tokenizer.eos_token_id, None
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        own = f"{self.prefix}{number}."
        tensors = {name: self.weights.tensor(name) for name in self.outside}
        for name in self.weights.files:
            if name.startswith(own):
                tensors[f"{self.prefix}0.{name.removeprefix(own)}"] = self.weights.tensor(name)
        tensors[self.embeddings] = table
        if head is not None:
            tensors[self.parameters[1]] = head
        save_file(
            {name: each.contiguous() for name, each in tensors.items()}, folder / SAFE_WEIGHTS_NAME, {"format": "pt"}
        )
        settings = deepcopy(self.settings)
        settings.path, settings.revision, settings.tokenizer, settings.chat_template = str(folder), None, None, None
        return settings


def open_large_model(settings: ModelConfig) -> LargeModel:
    """Find the layers of a model and their stored weights; none is read.

    Raises:
        ConfigError: the model cannot be found or read, its weights are not in safetensors files, or its layers, tables
            or code are of a kind that cannot be compared one by one.
    """
    path, source = settings.path, resolve_model_path(settings.path, weights=True)
    config = load_model_config(settings)
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(f"model.path={path!r} with --layers: its weights are quantized; use a copy that is not")
    if settings.trust_remote_code and getattr(config, "auto_map", None):
        raise ConfigError(
            f"model.path={path!r} with --layers: it has code of its own; leave model.trust_remote_code out where "
            "transformers has the architecture, else use a model of transformers"
        )
    empty = load_model(settings, attention="eager", on_meta_device=True)
    folder = cached_folder(source, settings.revision)
    if folder is None:
        raise ConfigError(f"model.path={path!r} with --layers: download it, and set model.path to its folder")
    weights = StoredWeights(path, folder)
    layers = layer_names(empty)
    container = layers[0].rpartition(".")[0]
    if layers != [f"{container}.{number}" for number in range(len(layers))]:
        raise ConfigError(f"model.path={path!r} with --layers: its decoder layers are not one list, but {layers}")
    prefix = _prefix(path, weights, container, len(layers))
    names = {id(module): name for name, module in empty.named_modules()}
    tables: list[Any] = [empty.get_input_embeddings(), empty.get_output_embeddings()]
    if getattr(tables[1], "bias", None) is not None:
        raise ConfigError(f"model.path={path!r} with --layers: its LM head has a bias, which is not compared")
    parameters = (f"{names[id(tables[0])]}.weight", f"{names[id(tables[1])]}.weight")
    embeddings, head = (_stored(weights, name) for name in parameters)
    if embeddings is None:
        raise ConfigError(f"model.path={path!r} with --layers: its files have no {parameters[0]}")
    inside = re.compile(rf"(^|\.){re.escape(container.rpartition('.')[2])}\.\d+\.")
    outside = [name for name in weights.files if not inside.search(name) and name not in (embeddings, head)]
    return LargeModel(
        settings=settings,
        config=config,
        weights=weights,
        layers=layers,
        prefix=prefix,
        outside=outside,
        embeddings=embeddings,
        head=head or embeddings,
        parameters=parameters,
        layer_sizes=[sum(p.numel() for p in empty.get_submodule(layer).parameters()) for layer in layers],
    )


def one_layer_config(path: str, config: Any, number: int) -> Any:
    """Return the configuration of a model whose only layer is of the kind of layer `number`, from 0 on.

    Raises:
        ConfigError: a setting that differs between layers has an unknown form.
    """
    config = deepcopy(config)
    text = config.get_text_config()
    if getattr(text, "per_layer_attributes", None):
        raise ConfigError(
            f"model.path={path!r} with --layers: its layers have settings of their own, which is unsupported"
        )
    layers = text.num_hidden_layers
    for name, value in [*vars(text).items()]:
        if name in INDICES and value is not None:
            setattr(text, name, [0] if number in value else [])
        elif isinstance(value, (list, tuple)) and len(value) == layers and not _is_of_all_layers(name):
            setattr(text, name, [value[number]])
    step = getattr(text, "decoder_sparse_step", None) or 1
    if step > 1:
        text.decoder_sparse_step = 1
        if (number + 1) % step:
            text.mlp_only_layers = [0]
    if getattr(text, "first_k_dense_replace", None) is not None:
        text.first_k_dense_replace = int(number < text.first_k_dense_replace)
    text.num_hidden_layers = 1
    return config


def _is_of_all_layers(name: str) -> bool:
    return name in OF_ALL_LAYERS or name.endswith("_token_id")


def _prefix(path: str, weights: StoredWeights, container: str, layers: int) -> str:
    """Return what the stored names of the layers begin with; a file may have another name of the backbone."""
    last = re.escape(container.rpartition(".")[2])
    numbers: dict[str, set[int]] = {}
    for name in weights.files:
        if match := re.match(rf"((?:.*\.)?{last}\.)(\d+)\.", name):
            numbers.setdefault(match[1], set()).add(int(match[2]))
    if f"{container}." in numbers:
        numbers = {f"{container}.": numbers[f"{container}."]}
    fitting = [prefix for prefix, found in numbers.items() if found == {*range(layers)}]
    if len(fitting) != 1:
        raise ConfigError(
            f"model.path={path!r} with --layers: its files do not have the weights of {layers} layers as "
            f"{container}.0 to {container}.{layers - 1}; use a complete copy, as transformers saves it"
        )
    return fitting[0]


def _stored(weights: StoredWeights, parameter: str) -> str | None:
    """Return the stored name of a parameter outside the layers."""
    if parameter in weights.files:
        return parameter
    ending = ".".join(parameter.split(".")[-2:])
    found = [name for name in weights.files if name == ending or name.endswith(f".{ending}")]
    return found[0] if len(found) == 1 else None
