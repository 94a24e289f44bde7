"""Arguments of `GRPOTrainer` that tutorials name otherwise, that are refused, or that override what is never called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hwgrpo.errors import ConfigError, nearest
from hwgrpo.trl.grpo_config import note

_TUTORIALS = {
    **dict.fromkeys(("reward_function", "reward_functions", "reward_fn"), "reward_funcs"),
    "tokenizer": "processing_class",
    "config": "args",
}
"""Arguments that no TRL version has, or that earlier ones had -> the argument."""
_REFUSED = {
    "rollout_func": (
        "responses are sampled by the engine",
        "tools or environment_factory, or rollout.workflow=FILE.py:COROUTINE of hwgrpo train",
    ),
}

_NEVER_CALLED = (
    *("compute_loss", "_compute_loss", "_generate_and_score_completions", "_calculate_rewards", "_generate"),
    *("training_step", "prediction_step", "evaluation_loop", "_get_per_token_logps_and_entropies", "_prepare_inputs"),
    *("create_optimizer", "create_scheduler", "create_optimizer_and_scheduler", "create_model_card"),
    *("get_train_dataloader", "get_eval_dataloader", "_get_train_sampler", "_get_eval_sampler", "compute_metrics"),
    *("_inner_training_loop", "_save_checkpoint", "_maybe_log_save_evaluate", "optimizer_step"),
    *("_generate_single_turn", "_tokenize_prompts", "_tool_call_loop", "_log_metric", "_log_completion_extra"),
    *("get_high_entropy_mask", "get_off_policy_mask", "get_gamma_weights", "_load_optimizer_and_scheduler"),
)
"""Methods of TRL's trainer that nothing calls here."""


def check_overrides(kind: type, base: type) -> None:
    """Raise ConfigError if a subclass overrides a method that nothing calls here; note what the script alone calls.

    Args:
        kind: the class of the trainer.
        base: GRPOTrainer.
    """
    overridden = next(
        (name for name in _NEVER_CALLED if getattr(kind, name, None) is not getattr(base, name, None)), None
    )
    if overridden is not None:
        raise ConfigError(
            f"{kind.__name__}.{overridden} would never be called: hwgrpo has its own training loop; give a "
            "loss, an advantage or a reward as a function of hwgrpo (docs/extend.md)"
        )
    for name in ("evaluate", "save_model"):
        if getattr(kind, name) is not getattr(base, name):
            note(f"{kind.__name__}.{name} is called by the script alone: the run evaluates and saves without it")


def renamed(others: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of other names under their names.

    Raises:
        ConfigError: an unknown one.
    """
    known = ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class", "peft_config")
    known += ("callbacks", "optimizers", "quantization_config", "tools", "environment_factory")
    result = {}
    for name, value in others.items():
        if name not in _TUTORIALS:
            near = nearest(name, [*known, *_TUTORIALS, *_REFUSED])
            raise ConfigError(f"GRPOTrainer: unknown argument {name}" + (f": did you mean {near}?" if near else ""))
        result[_TUTORIALS[name]] = value
        note(f"GRPOTrainer: TRL has no argument {name}; it is read as {_TUTORIALS[name]}")
    return result


def refuse(given: Mapping[str, Any]) -> None:
    """Raise ConfigError if an argument without a counterpart is given."""
    for name, value in given.items():
        if value is not None:
            why, instead = _REFUSED[name]
            raise ConfigError(f"{name} is not supported: {why}; instead: {instead}")
