"""Fused modules of a run: which are wanted, what became of them, and what the run says of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from hwgrpo_backends import Backend
from hwgrpo_kernels import fused_modules

from hwgrpo.config import Config
from hwgrpo.errors import ConfigError, RunError
from hwgrpo.training.policy.auto_settings import AttentionSelection
from hwgrpo.training.policy.policy_model import PolicyModel
from hwgrpo.training.strategies.strategy import Strategy


@dataclass(frozen=True)
class Fused:
    """What became of the fused modules."""

    attention: AttentionSelection
    """What computes attention now: the choice, but for a fused one that its trial left."""
    record: dict[str, Any] = field(default_factory=dict)
    """{"taken": {module: names}, "left": {module: {name: why}}}; empty where none was wanted."""
    line: str = ""
    """The same for people; empty where none was wanted."""


def choose_modules(config: Config, backend: Backend) -> tuple[str, ...]:
    """Return the fused modules to try: those named, or all that the backend lists.

    Raises:
        ConfigError: one is named that the backend does not have.
    """
    wanted = tuple(config.model.fused_modules)
    if wanted == ("auto",):
        return backend.modules
    if wanted == ("none",):
        return ()
    for module in wanted:
        if module not in backend.modules:
            has = ", ".join(backend.modules) or "none"
            raise ConfigError(
                f"model.fused_modules={list(wanted)}: the backend {backend.name} has no fused {module} (but: {has}); "
                "use model.fused_modules=[auto], which takes what there is"
            )
    return wanted


def fuse(config: Config, backend: Backend, policy: PolicyModel, attention: AttentionSelection) -> Fused:
    """Put the fused modules into a policy on its device, before a strategy wraps it.

    Raises:
        ConfigError: one was asked for by name and is taken nowhere.
    """
    modules = choose_modules(config, backend)
    if attention.is_fused:
        modules = (*modules, fused_modules.ATTENTION_MODULE)
    if not modules:
        return Fused(attention)
    applied = fused_modules.apply(policy.model, modules, policy.compute_dtype)
    asked = {module: "model.fused_modules" for module in modules if module in config.model.fused_modules}
    if attention.is_fused and config.model.attention == attention.name:
        asked[fused_modules.ATTENTION_MODULE] = "model.attention"
    for module, key in asked.items():
        if not applied.replaced[module]:
            value = list(config.model.fused_modules) if key == "model.fused_modules" else attention.name
            remedy = "[auto]" if key == "model.fused_modules" else "auto"
            raise ConfigError(
                f"{key}={value!r}: {module} replaces no module: {applied.skip_reasons(module)}; use {key}={remedy}"
            )
    if attention.is_fused and not applied.replaced[fused_modules.ATTENTION_MODULE]:
        why = applied.skip_reasons(fused_modules.ATTENTION_MODULE)
        skipped = (*attention.skipped, (attention.name, why))
        attention = AttentionSelection(attention.loaded_as, skipped=skipped)
    return Fused(attention, applied.as_json(), applied.line())


def fuse_as_on_rank_0(fused: Fused, policy: PolicyModel, device: torch.device) -> None:
    """Put the fused modules that rank 0 has tried and taken into this rank's policy.

    Args:
        fused: what became of them on rank 0.
        policy: has no weights yet, with which it could be tried.
        device: where it will be.
    """
    if fused.record:
        fused_modules.copy_to(policy.model, fused.record["taken"], device.type)


def check_ranks_agree(fused: Fused, strategy: Strategy) -> None:
    """Compare what every rank has taken: each tries on its own device, and one that is ill may find otherwise.

    Raises:
        RunError: they differ.
    """
    taken = [record.get("taken", {}) for record in strategy.gather_objects(fused.record)]
    for rank, theirs in enumerate(taken):
        for module, names in theirs.items():
            if names != taken[0][module]:
                raise RunError(
                    f"rank {rank} uses the fused module {module} in {len(names)} places and rank 0 in "
                    f"{len(taken[0][module])}: their devices do not compute alike (hwgrpo doctor --run tries them); "
                    "model.fused_modules=[none] and model.attention=sdpa leave them out"
                )
