"""The settings that a run has stored, read back without a check."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from hwgrpo.config.keys import check_keys, expand_names
from hwgrpo.config.load import Config, resolved
from hwgrpo.config.schema import Settings
from hwgrpo.config.yaml_text import read_yaml


def settings_from(saved: Mapping[str, Any] | str) -> Config:
    """Return the stored settings of a run, unchecked: files may be missing, variables unset.

    Args:
        saved: the content of config.yaml, as text or as plain containers.

    Raises:
        ConfigError: it has settings that this version does not have.
    """
    raw = read_yaml(saved, "config.yaml", Settings) if isinstance(saved, str) else copy.deepcopy(dict(saved))
    raw = expand_names(raw or {})
    check_keys(raw, Settings, "")
    return resolved(raw, lenient=True)


@functools.lru_cache(maxsize=8)
def stored_tree(text: str) -> Any:
    """Return what `to_yaml` wrote as plain containers, with interpolations as they stand; do not change them.

    Raises:
        OmegaConfBaseException, YAMLError, ValueError: the text is not YAML of settings.
    """
    return OmegaConf.to_container(OmegaConf.create(text))
