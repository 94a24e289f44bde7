"""Whether the model of another project's run reads images: by its configuration, or else by its name on the hub."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from hwgrpo.migrate.imports.variable_text import known

_NAMED = re.compile(r"(?i)(?<![a-z])(?:vl|vlm)\d?(?![a-z])|internvl|llava|vision|pixtral|smolvlm|glm-?[\d.]+v")
_ALSO_TEXT = re.compile(r"(?i)qwen3\.5|gemma-?[34]")
"""Names of models with a tower that are trained on text, too."""


def reads_images(path: Any, *, given_images: bool = False) -> bool:
    """Return whether a model is known as one that reads images.

    Args:
        path: its folder or hub name.
        given_images: whether the run says that its prompts have images.
    """
    where = str(known(path))
    try:
        return "vision_config" in json.loads((Path(where).expanduser() / "config.json").read_bytes())
    except (OSError, ValueError):
        name = where.rpartition("/")[2]
    return bool(_NAMED.search(name) or (given_images and _ALSO_TEXT.search(name)))
