"""For which hardware a build of torch is: from its version's local tag, or from the toolkits that it names."""

from __future__ import annotations

import re
from typing import Literal

Build = Literal["cpu", "cuda", "rocm", "xpu"]
TAGS: dict[str, Build] = {"cpu": "cpu", "cu": "cuda", "rocm": "rocm", "xpu": "xpu"}


def of_tag(version: str | None) -> Build | None:
    """Return the build that a version's local tag names ("2.13.0+cu128"); None: the default wheels have no tag."""
    tag = re.match(r"[^+]*\+(cpu|cu(?=\d)|rocm|xpu)", version or "")
    return TAGS[tag[1]] if tag else None


def of_toolkits(cuda: object, hip: object, xpu: object = None) -> Build:
    """Return the build of a torch whose torch.version has these toolkits; each is None or empty where it has not."""
    return "rocm" if hip else "cuda" if cuda else "xpu" if xpu else "cpu"
