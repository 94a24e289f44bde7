"""Names of `trl.experimental`: importing one raises an error that names its counterpart here."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from hwgrpo.trl.trl_errors import MissingName

COUNTERPARTS = {
    "async_grpo": "hwgrpo train RECIPE rollout.source=prefetch samples beside the training",
    "gmpo": "hwgrpo train RECIPE algorithm.loss.name=gmpo",
    "gspo_token": 'GRPOConfig(importance_sampling_level="sequence") of hwgrpo.trl has the same gradient',
    **dict.fromkeys(("harbor", "openreward"), "there are no environments here; give a reward that reads the response"),
    "grpo_with_replay_buffer": "hwgrpo train RECIPE algorithm.filter_groups.enable=true with replay_groups",
}
"""Module of `trl.experimental` -> what there is instead."""
_OTHERS = (
    *("a2po", "bco", "bema_for_ref_model", "cpo", "distillation", "gkd", "gold", "iw_opd", "kto", "minillm"),
    *("nash_md", "online_dpo", "orpo", "ppo", "prm", "sdft", "sdpo", "server_distillation", "ssd", "tpo"),
    *("xpo", "merge_model_callback", "utils"),
)
__path__: list[str] = []
"""Marks a package, so that its modules can be imported."""
_OWNERS = {"AsyncGRPO": "async_grpo", "GMPO": "gmpo", "GRPOWithReplayBuffer": "grpo_with_replay_buffer"}
"""Name of a class without Config or Trainer -> its module."""


def _missing(module: str, name: str) -> MissingName:
    instead = COUNTERPARTS.get(module, "GRPOTrainer of hwgrpo.trl is what there is")
    return MissingName(f"{name} of trl.experimental has no counterpart of this name: {instead}")


class _Module(ModuleType):
    """A module of `trl.experimental`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _missing(self.__name__.rpartition(".")[2], name)


def __getattr__(name: str) -> Any:
    """Raise MissingName with the counterpart of a class; modules are there."""
    if name.startswith("__"):
        raise AttributeError(name)
    kind = name.removesuffix("Config").removesuffix("Trainer")
    raise _missing(_OWNERS.get(kind, ""), name)


for _name in (*COUNTERPARTS, *_OTHERS):
    globals()[_name] = sys.modules[f"{__name__}.{_name}"] = _Module(f"{__name__}.{_name}")
    globals()[_name].__path__ = []
