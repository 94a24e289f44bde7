"""The tools of `rollout.agent.tools`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hwgrpo.agents.action import Tool


def load_tools(configs: Sequence[Any]) -> list[Tool]:
    """Return the tools of the settings (`ToolConfig`)."""
    return []
