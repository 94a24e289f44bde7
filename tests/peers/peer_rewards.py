"""The reward functions of verl and TRL: their own files, loaded without the packages around them."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.peers.peers_figures import PACKAGES
from tests.support.processes.wheels import fetched


@functools.cache
def verl_reward(name: str) -> Any:
    """Return a module of `verl.utils.reward_score`."""
    return _loaded(Path(fetched("peers", PACKAGES), "verl/utils/reward_score", f"{name}.py"), f"verl_reward_{name}")


@functools.cache
def trl_reward(name: str) -> Any:
    """Return a module of `trl.rewards`."""
    folder = Path(fetched("trl", ("trl",)), "trl")
    package = ModuleType("trl_files")
    package.__path__ = [str(folder)]
    sys.modules["trl_files"] = package
    rewards = ModuleType("trl_files.rewards")
    rewards.__path__ = [str(folder / "rewards")]
    sys.modules["trl_files.rewards"] = rewards
    try:
        return _loaded(folder / "rewards" / f"{name}.py", f"trl_files.rewards.{name}")
    finally:
        for module in [each for each in sys.modules if each.partition(".")[0] == "trl_files"]:
            del sys.modules[module]


def _loaded(path: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        sys.modules.pop(name, None)
    return module
