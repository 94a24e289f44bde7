"""Settings: the schema, loading (recipe + overrides), checking, documentation."""

from hwgrpo.config.load import load_config
from hwgrpo.config.schema import Config

__all__ = ["Config", "load_config"]
