"""verl's settings of images: their column, and the parts of a vision-language model that are trained."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hwgrpo.migrate.imports.conversion import Assignment, Converted, Refusal, Remark
from hwgrpo.migrate.imports.variable_text import known
from hwgrpo.migrate.imports.verl_settings import ACTOR, MODEL, VerlSettings
from hwgrpo.migrate.imports.vision_names import reads_images

_KEY, _PATH = "data.image_key", MODEL + "path"
_FREEZE, _EXCLUDED = ACTOR + "freeze_vision_tower", MODEL + "exclude_modules"
_WITH_SOUND = re.compile(r"(?i)-omni\b|minicpm-?[ov]")
_TEXT = ("layers.0.self_attn.q_proj", "language_model.layers.0.mlp.up_proj")
_VISION = (
    ("visual.blocks.0.attn.qkv", "visual.merger.mlp.0"),
    ("vision_tower.encoder.layers.0.self_attn.q_proj", "multi_modal_projector.linear_1"),
    ("vision_model.encoder.layers.0.self_attn.q_proj", "connector.modality_projection.proj"),
)
"""A linear layer of the tower and one of the projector, of families of models."""


def images(v: VerlSettings) -> Iterator[Converted]:
    """Convert the column of images, and what is trained of the tower; refuse models that also read sound."""
    name = known(v[_PATH]).rpartition("/")[2]
    if _WITH_SOUND.search(name) and not Path(known(v[_PATH])).expanduser().is_dir():
        yield Refusal(_PATH, v[_PATH], "models that read sound are not supported", "Qwen/Qwen3-VL-8B-Instruct")
    key = v[_KEY]
    # verl's default, which all of its scripts for images repeat, and configs of text runs have
    yield Assignment("data.images.key", None if known(key) == "images" else key, (_KEY,))
    yield Remark((_KEY,), "as here: the column images, or else image")
    adapted = v[MODEL + "lora_rank"] or v[MODEL + "lora.rank"] or v[MODEL + "lora_adapter_path"]
    if not reads_images(v[_PATH], given_images=v.is_given(_KEY)):
        yield Remark((_FREEZE,), "the model is not known as one that reads images")
        yield from _excluded_in_text(v, bool(adapted))
    elif adapted:
        yield Remark((_FREEZE,), "adapters are trained: model.lora.vision")
        yield from _adapters(v)
    else:
        yield Assignment(
            "model.train_vision", "none" if v[_FREEZE] else "all", (_FREEZE,), "the tower and its projector"
        )
        yield Remark((_EXCLUDED,), "all parameters are trained")


def _excluded_in_text(v: VerlSettings, adapted: bool) -> Iterator[Converted]:
    if v[_EXCLUDED] and adapted and _parts_left(v[_EXCLUDED]) is None:
        yield _refusal(v)
    else:
        yield Remark((_EXCLUDED,), "a text model has none of them" if adapted else "all parameters are trained")


def _adapters(v: VerlSettings) -> Iterator[Converted]:
    """Convert the modules that get no adapters, where they are the tower or the tower with its projector."""
    parts = _parts_left(v[_EXCLUDED]) if v[_EXCLUDED] else "all"
    if parts is None:
        yield _refusal(v)
    else:
        yield Assignment("model.lora.vision", parts, (_EXCLUDED,), "peft adapts the linear layers of the tower, too")


def _refusal(v: VerlSettings) -> Refusal:
    why = "layers are named, not left out, but for those of a vision tower"
    return Refusal(_EXCLUDED, v[_EXCLUDED], why, "model.lora.target_modules, with re:PATTERN")


def _parts_left(excluded: Any) -> str | None:
    """Return the parts that see images and are not excluded, a value of `model.lora.vision`; None: others are."""

    def is_excluded(name: str) -> bool:
        if isinstance(excluded, list):
            return any(name == each or name.endswith(f".{each}") for each in map(known, excluded))
        return any(re.fullmatch(known(excluded), f"{prefix}{name}") for prefix in ("", "model.", "base_model.model."))

    try:
        if any(map(is_excluded, _TEXT)):
            return None
        left = [(not is_excluded(tower), not is_excluded(projector)) for tower, projector in _VISION]
    except re.error:
        return None
    tower_out = [projector for tower, projector in left if not tower]
    return None if not tower_out else "projector" if any(tower_out) else "none"
