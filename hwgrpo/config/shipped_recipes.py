"""The recipes that ship, each in a line: model, method, data, and the devices it is planned for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from hwgrpo.config.load import load_config
from hwgrpo.config.schema import Settings
from hwgrpo.config.shipped_files import recipe_files

_DEVICES = re.compile(r"\bon (\d+) devices")
_MEMORY = re.compile(r"^About (\d+) GiB on each device", re.MULTILINE)


@dataclass(frozen=True)
class ShippedRecipe:
    """A recipe, for display.

    Example:
        ShippedRecipe("qwen3_8b_math", "Qwen/Qwen3-8B", "grpo, LoRA of rank 32", "data/math/train.parquet", 1, 28)
    """

    name: str
    model: str
    method: str
    data: str
    devices: int
    """Number of devices that its comment states; 1 where it states none."""
    memory_gib: int | None
    """GiB on each device that its comment states; None where it states none."""


def shipped_recipes() -> list[ShippedRecipe]:
    """Return all recipes that ship, by name."""
    return [_read(name, file) for name, file in sorted(recipe_files().items())]


def _read(name: str, file: Path) -> ShippedRecipe:
    config = load_config(file, data_may_be_missing=True, files_may_be_missing=True)
    lines = file.read_text(encoding="utf-8").splitlines()
    comment = "\n".join(line.removeprefix("#").strip() for line in lines if line.startswith("#"))
    devices, memory = _DEVICES.search(comment), _MEMORY.search(comment)
    return ShippedRecipe(
        name=name,
        model=config.model.path,
        method=_method(config),
        data=str(config.data.train),
        devices=int(devices[1]) if devices else 1,
        memory_gib=int(memory[1]) if memory else None,
    )


def _method(config: Settings) -> str:
    """Return the estimator or preset, and which parameters are trained."""
    rank, quantize = config.model.lora.rank, config.model.quantize
    trained = f"LoRA of rank {rank}" if rank else "all parameters"
    over = "" if quantize == "none" else f" over {quantize}"
    return f"{config.algorithm.preset or config.algorithm.advantage.name}, {trained}{over}"
