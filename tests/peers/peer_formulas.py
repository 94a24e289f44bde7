"""The formulas of verl and TRL: their own code, run on tensors, without the packages that the rest of theirs needs."""

from __future__ import annotations

import ast
import functools
import importlib
import pickle
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any, Optional

import torch
from omegaconf import OmegaConf

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
    mean = {"masked_mean": lambda values, mask, axis: (values * mask).sum(axis) / (mask.sum(axis) + 1e-8)}
    namespace: dict[str, Any] = {"torch": torch, "core_algos": verl_core(), "DataProto": object, **mean}
    return _function_of("verl/trainer/ppo/ray_trainer.py", "apply_kl_penalty", namespace)


def verl_settings(overrides: Sequence[str]) -> Any:
    """Return all of verl's settings, its own defaults and overrides."""
    # OmegaConf.merge would copy each of some hundred settings and assign it once more: four times as long
    return OmegaConf.unsafe_merge(pickle.loads(_verl_defaults()), OmegaConf.from_dotlist([*overrides]))


@functools.cache
def _verl_defaults() -> bytes:
    """Return verl's own defaults, pickled: each use has its copy."""
    file = Path(fetched("peers", PACKAGES), "verl/trainer/config/_generated_ppo_trainer.yaml")
    return pickle.dumps(OmegaConf.load(file))


class PaddedBatch(dict[str, Any]):
    """Tensors by name, as verl's losses select them."""

    def select(self, *names: str) -> PaddedBatch:
        """Return some of them."""
        return PaddedBatch({name: self[name] for name in names})

    def to_padded_tensor(self) -> PaddedBatch:
        """Return them: they are padded."""
        return self


def verl_loss(actor: Any, tensors: Mapping[str, torch.Tensor], counts: Mapping[str, int] | None = None) -> torch.Tensor:
    """Return the loss of verl's actor with its policy term, entropy bonus and KL.

    Args:
        actor: the settings `actor_rollout_ref.actor`.
        tensors: [B, T] `log_probs` and `entropy` of the current policy, `old_log_probs`, `ref_log_prob`, `advantages`,
            `response_mask`, and `rollout_is_weights` if there are some.
        counts: `batch_num_tokens` and `global_batch_size` of the update; None: the tensors are all of it.
    """
    mask = tensors["response_mask"]
    counts = counts or {"batch_num_tokens": int(mask.sum()), "global_batch_size": len(mask)}
    actor.global_batch_info = {}
    output = {"log_probs": tensors["log_probs"], "entropy": tensors["entropy"]}
    return _verl_loss_function()(actor, output, PaddedBatch({**tensors, "dp_size": 1, **counts}))[0]


@functools.cache
def _verl_loss_function() -> Any:
    core = verl_core()
    namespace: dict[str, Any] = {"torch": torch, "TensorDict": dict, "ActorConfig": object, "Metric": _NoMetric}
    namespace |= {name: getattr(core, name) for name in ("agg_loss", "get_policy_loss_fn", "kl_penalty")}
    namespace["AggregationType"] = SimpleNamespace(SUM="sum", MEAN="mean")
    namespace["no_padding_2_padding"] = lambda values, data: values
    return _function_of("verl/workers/utils/losses.py", "ppo_loss", namespace)


class _NoMetric:
    """What verl logs, which no test reads."""

    def __init__(self, **values: Any) -> None:
        """Take anything."""

    @staticmethod
    def from_dict(values: Any, aggregation: Any) -> dict[str, Any]:
        """Return no metrics."""
        return {}


def _function_of(file: str, name: str, namespace: dict[str, Any]) -> Any:
    """Return a function of a file of verl's that runs with the names of `namespace`."""
    exec(_code_of(file, name), namespace)
    return namespace[name]


@functools.cache
def _code_of(file: str, name: str) -> CodeType:
    source = Path(fetched("peers", PACKAGES), file).read_text()
    found = [each for each in ast.parse(source).body if getattr(each, "name", "") == name]
    return compile(ast.Module(list(found), []), file, "exec")


def verl_sampler(data: Any, rows: Sequence[Any]) -> Any:
    """Return the sampler of prompts of the settings `data`; torch's own takes the place of torchdata's."""
    stub = ModuleType("torchdata.stateful_dataloader.sampler")
    vars(stub)["RandomSampler"] = torch.utils.data.RandomSampler
    names = ("torchdata", "torchdata.stateful_dataloader", stub.__name__)
    before = {name: sys.modules.get(name) for name in names}
    sys.modules.update(dict.fromkeys(names, stub))
    try:
        return _function_of("verl/trainer/ppo/utils.py", "create_rl_sampler", {})(data, rows)
    finally:
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module


def verl_advantages(algorithm: Any, batch: dict[str, Any], non_tensors: dict[str, Any]) -> torch.Tensor:
    """Return the advantages [B, T] of verl's trainer for the settings `algorithm`."""
    core = verl_core()
    namespace: dict[str, Any] = {"DataProto": object, "AlgoConfig": dict, "Optional": Optional, "core_algos": core}
    namespace["AdvantageEstimator"] = core.AdvantageEstimator
    data = SimpleNamespace(batch=batch, non_tensor_batch=non_tensors)
    name = algorithm.adv_estimator
    return _function_of("verl/trainer/ppo/ray_trainer.py", "compute_advantage", namespace)(
        data, name, norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo, config=algorithm
    ).batch["advantages"]


def verl_weights(
    correction: Any, old: torch.Tensor, rollout: torch.Tensor, mask: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the importance weights [B, T] of the settings `rollout_correction`, and the mask of what is kept."""
    module = verl_correction()
    vars(module)["DataProto"] = SimpleNamespace(from_dict=lambda tensors: SimpleNamespace(batch=tensors))
    names = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs", "rollout_rs_threshold")
    found, kept, _ = module.compute_rollout_correction_and_rejection_mask(
        old, rollout, mask, **{name: correction[name] for name in names}
    )
    return None if found is None else found.batch["rollout_is_weights"], kept


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
    *,
    accumulation: int = 1,
    **settings: Any,
) -> torch.Tensor:
    """Return the loss that TRL's `_compute_loss` computes in one process, of one micro-batch of an update.

    Args:
        logprobs: [B, T] of the current policy, with gradient.
        entropies: [B, T].
        inputs: what TRL's trainer passes on: `completion_mask` [B, T], `advantages` [B], `old_per_token_logps`, ...
        adapted: attributes of the trainer's adaptive entropy, changed by the call; None: it is off.
        accumulation: micro-batches of the update; `num_items_in_batch` of the inputs is then the tokens of all.
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
        current_gradient_accumulation_steps=accumulation,
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
