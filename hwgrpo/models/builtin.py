"""`builtin://tiny?option=value&...`: the address of a model that is made on this machine."""

from __future__ import annotations

import hashlib
import inspect
import json
import sys
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

import numpy as np
import tokenizers
import torch
import transformers
from safetensors.torch import save_file
from transformers import PreTrainedModel

from hwgrpo.catalog import TASKS
from hwgrpo.data import agent_tasks, picture_tasks, tasks
from hwgrpo.data.picture_tasks import PictureTask
from hwgrpo.errors import ConfigError, choice_error
from hwgrpo.models import tiny, tiny_vision
from hwgrpo.models.model_cache import cache_root, prepare_root, publish, unfinished_folder

PREFIX = "builtin://"
NAMES = ("tiny",)


@dataclass(frozen=True)
class TinySpec:
    """Options of `builtin://tiny?option=value&...`. Further options are the task's.

    Raises:
        ConfigError: a value is out of range, or the task does not know an option.
    """

    task: str = "sort"
    """Task whose demonstrations warm-start the model."""
    seed: int = 0
    """Seed of the initial weights and of the demonstrations."""
    hidden: int = 64
    """Hidden size; a multiple of twice the head size (two heads per key-value head)."""
    head: int = 16
    """Size of an attention head; vLLM on a CPU takes multiples of 32."""
    layers: int = 2
    """Decoder layers."""
    steps: int = 300
    """Warm-start steps; 0 leaves the initial weights."""
    batch: int = 128
    """Demonstrations per step."""
    lr: float = 5e-3
    """Peak learning rate of the warm start."""
    task_options: tuple[tuple[str, str], ...] = ()
    """Options handed to the task, e.g. (("digits", "5"),)."""

    def __post_init__(self) -> None:
        width = 2 * max(self.head, 1)
        rules = (
            ("seed", 0 <= self.seed < 2**32, "at least 0 and at most 4294967295"),
            ("head", self.head >= 8 and self.head % 8 == 0, "a positive multiple of 8"),
            ("hidden", self.hidden > 0 and self.hidden % width == 0, f"a positive multiple of {width}"),
            ("layers", self.layers >= 1, "at least 1"),
            ("steps", self.steps >= 0, "at least 0"),
            ("batch", self.batch >= 1, "at least 1"),
            ("lr", 0 < self.lr < 1, "above 0 and below 1"),
        )
        for key, fulfilled, allowed in rules:
            if not fulfilled:
                raise ConfigError(f"{PREFIX}tiny: {key}={getattr(self, key)} is out of range: it must be {allowed}")

    @property
    def task_address(self) -> str:
        """The `task://` address of the demonstrations."""
        query = f"?{urlencode(self.task_options)}" if self.task_options else ""
        return f"{tasks.PREFIX}{self.task}{query}"


def parse(address: str) -> TinySpec:
    """Read a `builtin://` address.

    Raises:
        ConfigError: the model, the task or an option is unknown, or a value is not a number or out of range.
    """
    assert address.startswith(PREFIX), address
    name, _, query = address.removeprefix(PREFIX).partition("?")
    if name not in NAMES:
        raise choice_error(f"model.path={address!r}: built-in model", name, NAMES)
    parameters = dict(parse_qsl(query, keep_blank_values=True))
    task = parameters.get("task", TinySpec.task)
    if task not in TASKS:
        raise choice_error(f"model.path={address!r}: task", task, TASKS.names())
    own = {field.name for field in fields(TinySpec)} - {"task_options"}
    of_task = inspect.signature(TASKS.load(task)).parameters
    values: dict[str, object] = {"task": task}
    options = []
    for key, value in parameters.items():
        if key in own:
            values[key] = _convert(address, key, value)
        elif key in of_task:
            options.append((key, value))
        else:
            raise choice_error(f"model.path={address!r}: option", key, {*own, *of_task})
    return TinySpec(**values, task_options=tuple(sorted(options)))  # pyright: ignore[reportArgumentType]


def _convert(address: str, key: str, value: str) -> object:
    kind = type(getattr(TinySpec, key))
    try:
        return kind(value)
    except ValueError:
        wanted = "a number" if kind is float else "an integer"
        raise ConfigError(
            f"model.path={address!r}: {key}={value!r} is not {wanted}; e.g. {key}={getattr(TinySpec, key)}"
        ) from None


def resolve(address: str) -> Path:
    """Return the folder of a built-in model in Hugging Face format, making it first where it is not in the cache.

    The cache is `$HWGRPO_CACHE`, else `~/.cache/hwgrpo`. Processes that make the same model at once make it each,
    bitwise the same; one of them gets to keep its folder.

    Args:
        address: `builtin://tiny?task=sort&seed=0&...`; see `TinySpec`.

    Raises:
        ConfigError: see `parse`.
    """
    spec = parse(address)
    root = cache_root("builtin")
    folder = root / _fingerprint(spec)
    prepare_root(root, "built-in models")
    if not folder.is_dir():
        print(f"hwgrpo: making {address}, once; it takes some seconds", file=sys.stderr, flush=True)
        with unfinished_folder(root) as unfinished:
            task = tasks.parse_task(spec.task_address)
            module: Any = tiny_vision if isinstance(task, PictureTask) else tiny
            model, *processors = module.make(
                seed=spec.seed,
                hidden=spec.hidden,
                layers=spec.layers,
                steps=spec.steps,
                batch=spec.batch,
                lr=spec.lr,
                head=spec.head,
                task=task,
            )
            with redirect_stdout(sys.stderr):  # packages that it imports may print
                _save(model, unfinished)
                for processor in processors:  # of text, and of images
                    processor.save_pretrained(unfinished)
            (unfinished / "builtin.json").write_text(json.dumps(asdict(spec), indent=2) + "\n")
            publish(unfinished, folder)
    return folder


def _save(model: PreTrainedModel, folder: Path) -> None:
    """Write config and weights on any rank; within a process group `save_pretrained` writes on rank 0 alone."""
    model.config.architectures = [type(model).__name__]
    model.config.dtype = "float32"
    model.config.save_pretrained(folder)
    assert model.generation_config is not None
    model.generation_config.save_pretrained(folder)
    tied = "lm_head.weight"  # the embeddings, under another name
    weights = {name: tensor for name, tensor in model.state_dict().items() if name != tied}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _fingerprint(spec: TinySpec) -> str:
    """Hash everything that decides the weights: options, the code of model and tasks, library versions."""
    parts = [
        json.dumps(asdict(spec), sort_keys=True),
        *(Path(str(module.__file__)).read_text() for module in (tiny, tiny_vision, tasks, agent_tasks, picture_tasks)),
        *(module.__version__ for module in (torch, transformers, tokenizers, np)),
    ]
    return f"tiny-{spec.task}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}"
