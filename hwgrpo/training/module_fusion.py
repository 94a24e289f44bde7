"""Fused modules of a run: select them, insert them into the model, and record the result."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from hwgrpo_backends import Backend
from hwgrpo_kernels import fused_modules

from hwgrpo.config import Config
from hwgrpo.config.schema import ModelConfig
from hwgrpo.errors import ConfigError, RunError
from hwgrpo.training import fusion_check
from hwgrpo.training.policy.auto_settings import AttentionSelection
from hwgrpo.training.policy.policy_model import PolicyModel
from hwgrpo.training.strategies.strategy import Strategy


@dataclass(frozen=True)
class Fused:
    """The fused modules in a model."""

    attention: AttentionSelection
    """The attention in use: the selected one, or its fallback if a fused one failed its self-test."""
    record: dict[str, Any] = field(default_factory=dict)
    """`AppliedModules.as_json` for environment.json; empty if none was selected."""
    line: str = ""
    """The same as a log line; empty if none was selected."""


def choose_modules(model: ModelConfig, backend: Backend) -> tuple[str, ...]:
    """Return the fused modules to insert: for `auto` all of the backend, else those configured that its device has.

    Raises:
        ConfigError: the device does not have one of the configured modules.
    """
    wanted = tuple(model.fused_modules)
    if wanted == ("auto",):
        return backend.modules
    if wanted == ("none",):
        return ()
    known = [each for each in fused_modules.modules(backend.device_type) if each != fused_modules.ATTENTION_MODULE]
    for module in wanted:
        if module not in known:
            has = ", ".join(known) or "none"
            raise ConfigError(
                f"model.fused_modules={list(wanted)}: the backend {backend.name} has no fused {module} (but: {has}); "
                "use model.fused_modules=[auto], which uses those it has"
            )
    return wanted


def fuse(config: Config, backend: Backend, policy: PolicyModel, attention: AttentionSelection) -> Fused:
    """Insert the fused modules into a policy on its device, before a strategy wraps it.

    Each module is self-tested, and then the whole model: if its hidden states or gradients differ from those without
    fused modules by more than rounding, it keeps its own.

    Raises:
        ConfigError: a module set by name replaces no module of the model.
    """
    modules = choose_modules(config.model, backend)
    if attention.is_fused:
        modules = (*modules, fused_modules.ATTENTION_MODULE)
    if not modules:
        return Fused(attention)
    device = policy.base.get_input_embeddings().weight.device
    plain, failure = _passes(policy, device)
    applied = fused_modules.apply(policy.model, modules, policy.compute_dtype)
    record, line = applied.as_json(), applied.line()
    if any(applied.replaced.values()):
        fused, failure = (None, failure) if failure else _passes(policy, device)
        applied.undo()  # the effect of rounding is measured without them
        reason = failure
        if plain is not None and fused is not None:
            reason = fusion_check.reason_against(policy, device, plain, fused)
        if reason is None:
            fused_modules.copy_to(policy.model, record, device.type)
        else:
            applied.reject(modules, reason)
            record, line = applied.as_json(), applied.line()
    selected = {module: "model.fused_modules" for module in modules if module in config.model.fused_modules}
    if attention.is_fused and config.model.attention == attention.name:
        selected[fused_modules.ATTENTION_MODULE] = "model.attention"
    for module, key in selected.items():
        if not record["replaced"][module]:
            value = list(config.model.fused_modules) if key == "model.fused_modules" else attention.name
            remedy = "[auto]" if key == "model.fused_modules" else "auto"
            raise ConfigError(
                f"{key}={value!r}: {module} replaces no module: {applied.skip_reasons(module)}; use {key}={remedy}"
            )
    if attention.is_fused and not record["replaced"][fused_modules.ATTENTION_MODULE]:
        reason = applied.skip_reasons(fused_modules.ATTENTION_MODULE)
        skipped = (*attention.skipped, (attention.name, reason))
        attention = AttentionSelection(attention.loaded_as, skipped=skipped)
    return Fused(attention, record, line)


def _passes(policy: PolicyModel, device: torch.device) -> tuple[fusion_check.Passes | None, str | None]:
    """Return the passes of the startup check, or None and why it fails; a model may call its layers in its own way."""
    try:
        return fusion_check.run_passes(policy, device), None
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, NotImplementedError) as error:
        text = (str(error).splitlines() or [""])[0]
        return None, f"the startup check of the whole model fails ({type(error).__name__}: {text})"


def fuse_as_on_rank_0(fused: Fused, policy: PolicyModel, device: torch.device) -> None:
    """Insert the fused modules that passed their self-test on rank 0 into this rank's policy.

    Args:
        fused: rank 0's fused modules.
        policy: on the meta device, where no self-test can run.
        device: this rank's device.
    """
    if fused.record:
        fused_modules.copy_to(policy.model, fused.record, device.type)


def check_ranks_agree(fused: Fused, strategy: Strategy) -> None:
    """Compare the fused modules of all ranks: each runs its self-tests, and a faulty device may fail one.

    Raises:
        RunError: they differ.
    """
    replaced = [record.get("replaced", {}) for record in strategy.gather_objects(fused.record)]
    for rank, modules in enumerate(replaced):
        for module, names in modules.items():
            if names != replaced[0][module]:
                raise RunError(
                    f"rank {rank} uses the fused module {module} in {len(names)} places and rank 0 in "
                    f"{len(replaced[0][module])}: their devices compute differently (hwgrpo doctor --run tests them); "
                    "model.fused_modules=[none] and model.attention=sdpa disable fused modules"
                )
