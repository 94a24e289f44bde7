"""The formulas of verl and TRL: their own code, run on tensors, without the packages that the rest of theirs needs."""

from __future__ import annotations

import ast
import functools
import importlib
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from tests.peers.peers_figures import PACKAGES
from tests.support.processes.wheels import fetched


def verl_core() -> Any:
    """Return verl's module of estimators and losses, `verl.trainer.ppo.core_algos`."""
    return _verl_modules()[0]


def verl_correction() -> Any:
    """Return verl's module of rollout corrections, `verl.trainer.ppo.rollout_corr_helper`."""
    return _verl_modules()[1]


@functools.cache
def _verl_modules() -> list[Any]:
    root = fetched("peers", PACKAGES)
    packages = ("tensordict", "verl", "verl.utils", "verl.trainer", "verl.workers", "verl.trainer.ppo")
    packages += ("verl.protocol", "verl.trainer.config", "verl.workers.config")
    packages += ("verl.trainer.config.algorithm", "verl.workers.config.actor")
    stubs = {name: ModuleType(name) for name in packages}
    for name, stub in stubs.items():
        stub.__path__ = [str(root / name.replace(".", "/"))]
    vars(stubs["tensordict"])["TensorDict"] = dict
    vars(stubs["verl.trainer.config"])["AlgoConfig"] = type("AlgoConfig", (), {})
    vars(stubs["verl.workers.config"])["ActorConfig"] = object
    vars(stubs["verl.protocol"])["DataProto"] = object
    vars(stubs["verl.trainer.config.algorithm"])["RolloutCorrectionConfig"] = object
    vars(stubs["verl.workers.config.actor"])["PolicyLossConfig"] = object
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in ("tensordict", "verl")}
    sys.modules.update(stubs)
    try:
        groups = importlib.import_module("verl.utils.groupwise")
        vars(stubs["verl.utils"]).update(as_torch_index=groups.as_torch_index, group_mean_std=groups.group_mean_std)
        return [importlib.import_module(f"verl.trainer.ppo.{name}") for name in ("core_algos", "rollout_corr_helper")]
    finally:
        for name in [each for each in sys.modules if each.partition(".")[0] in ("tensordict", "verl")]:
            del sys.modules[name]
        sys.modules.update(before)


@functools.cache
def verl_kl_penalty() -> Any:
    """Return verl's `apply_kl_penalty(data, kl_ctrl, kl_penalty)` of its trainer."""
    source = Path(fetched("peers", PACKAGES), "verl/trainer/ppo/ray_trainer.py").read_text()
    found = [each for each in ast.parse(source).body if getattr(each, "name", "") == "apply_kl_penalty"]
    mean = {"masked_mean": lambda values, mask, axis: (values * mask).sum(axis) / (mask.sum(axis) + 1e-8)}
    namespace: dict[str, Any] = {"torch": torch, "core_algos": verl_core(), "DataProto": object, **mean}
    exec(compile(ast.Module(list(found), []), "ray_trainer.py", "exec"), namespace)
    return namespace["apply_kl_penalty"]


class VerlActor(dict[str, Any]):
    """verl's `actor` settings, as its losses read them."""

    def __init__(self, *, low: float = 0.2, high: float = 0.28, **settings: Any) -> None:
        super().__init__(clip_ratio_c=settings.pop("clip_ratio_c", 3.0))
        self.clip_ratio, self.clip_ratio_low, self.clip_ratio_high = low, low, high
        self.global_batch_info: dict[str, Any] = {}
        self.policy_loss = SimpleNamespace(**settings.pop("policy_loss", {}))
        self.tau_pos, self.tau_neg = 1.0, 1.05
        vars(self).update(settings)


@functools.cache
def _trl_trainer() -> type:
    """Return a class with the methods of TRL's GRPOTrainer that compute its loss."""
    source = Path(fetched("trl", ("trl",)), "trl/trainer/grpo_trainer.py").read_text()
    [found] = [each for each in ast.parse(source).body if getattr(each, "name", "") == "GRPOTrainer"]
    assert isinstance(found, ast.ClassDef)
    wanted = ("get_off_policy_mask", "get_gamma_weights", "get_high_entropy_mask", "_compute_loss")
    found.body = [each for each in found.body if getattr(each, "name", "") in wanted]
    found.bases = []
    ends = {"nanmin": lambda values: values.min(), "nanmax": lambda values: values.max()}
    namespace: dict[str, Any] = {"torch": torch, "math": __import__("math"), **ends}
    exec(compile(ast.Module([found], []), "grpo_trainer.py", "exec"), namespace)
    return namespace["GRPOTrainer"]


TRL_DEFAULTS = {
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "beta": 0.0,
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "use_vllm": False,
    "vllm_importance_sampling_correction": True,
    "entropy_coef": 0.0,
    "max_completion_length": 256,
}
TRL_ARGUMENTS = {
    "delta": None,
    "use_bias_correction_kl": True,
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
    "steps_per_generation": 1,
    "entropy_target": 0.2,
    "entropy_coef_delta": 0.005,
    "entropy_coef_min": 0.0,
    "entropy_coef_max": 1.0,
}


def trl_loss(
    logprobs: torch.Tensor,
    entropies: torch.Tensor,
    inputs: Mapping[str, torch.Tensor],
    adapted: dict[str, Any] | None = None,
    **settings: Any,
) -> torch.Tensor:
    """Return the loss that TRL's `_compute_loss` computes in one process without accumulation.

    Args:
        logprobs: [B, T] of the current policy, with gradient.
        entropies: [B, T].
        inputs: what TRL's trainer passes on: `completion_mask` [B, T], `advantages` [B], `old_per_token_logps`, ...
        adapted: attributes of the trainer's adaptive entropy, changed by the call; None: it is off.
        settings: attributes of the trainer and fields of its arguments.
    """
    unknown = settings.keys() - TRL_DEFAULTS.keys() - TRL_ARGUMENTS.keys()
    assert not unknown, unknown
    accelerator = SimpleNamespace(
        num_processes=1,
        gather=lambda values: values,
        reduce=lambda values, reduction: values,
        pad_across_processes=lambda values, dim, pad_index: values,
        sync_gradients=adapted is not None,
    )
    trainer = _trl_trainer()()
    vars(trainer).update(TRL_DEFAULTS | {name: settings[name] for name in settings.keys() & TRL_DEFAULTS.keys()})
    vars(trainer).update(
        args=SimpleNamespace(**TRL_ARGUMENTS | {k: v for k, v in settings.items() if k in TRL_ARGUMENTS}),
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        aux_loss_enabled=False,
        use_adaptive_entropy=adapted is not None,
        _entropy_bonus_enabled=bool(settings.get("entropy_coef")) or adapted is not None,
        _metrics=defaultdict(lambda: defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *a, **k: (logprobs, entropies, None),
    )
    vars(trainer).update(adapted or {})
    mask = inputs["completion_mask"]
    ids = torch.zeros_like(mask)
    given = {"prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "num_items_in_batch": mask.sum()}
    loss = trainer._compute_loss(None, given | dict(inputs))
    for name in adapted or ():
        assert adapted is not None
        adapted[name] = vars(trainer)[name]
    return loss
