"""The settings of a run, read back from the `config.yaml` in its folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwgrpo.errors import ConfigError

if TYPE_CHECKING:
    from hwgrpo.config import Config

FILE = "config.yaml"


def saved_settings(run_dir: Path) -> dict[str, Any]:
    """Return config.yaml as a plain dict; empty if it does not exist (yet)."""
    from omegaconf import OmegaConf

    path = run_dir / FILE
    if not path.exists():
        return {}
    settings: Any = OmegaConf.to_container(OmegaConf.load(path))
    return settings


def saved_config(run_dir: Path) -> Config:
    """Return config.yaml as a `Config`, without checking it again (files it names may be gone); defaults if none.

    Raises:
        ConfigError: it has settings that this version does not have.
    """
    from omegaconf.errors import OmegaConfBaseException

    from hwgrpo.config.stored_settings import settings_from

    required = {"model": {"path": ""}, "data": {"train": ""}}
    try:
        saved = saved_settings(run_dir)
        for name, values in required.items():
            section = saved.get(name) or {}
            saved[name] = {**values, **section} if isinstance(section, dict) else section
        return settings_from(saved)
    except (ConfigError, OmegaConfBaseException) as error:
        raise ConfigError(
            f"{run_dir / FILE} does not fit this version of hwgrpo ({str(error).splitlines()[0]}); "
            "name another trainer.output_dir"
        ) from error
