"""Conditions under which settings have an effect, for `used_by` of the schema's fields."""

from __future__ import annotations

from typing import Any

from hwgrpo import catalog
from hwgrpo.config.fields import AnyOf, Use, holds, none_of, off, on, one_of, own_function, read_by
from hwgrpo.config.named_files import verifier_of
from hwgrpo.user_code import names_a_file

NOT_BUILT_IN = (Use("model.path", (), " to a folder or a hub name", lambda path: not path.startswith("builtin://")),)
ADAPTERS = on("model.lora.rank", " above 0")
"""Condition that a run trains adapters."""

DIFFICULTY = tuple(
    Use(f"data.difficulty.{key}", (), " set", lambda threshold: threshold is not None)
    for key in ("easy_threshold", "hard_threshold")
)

VISION_TRAINS = (*none_of("model.train_vision", "none"), *none_of("model.lora.vision", "none"))

AGENT = one_of("rollout.workflow", "environment", "tools")
TOOLS = on("rollout.agent.tools")
ENVIRONMENTS = on("rollout.agent.environments")
OUTSIDE_ENGINE = none_of("rollout.engine", "local")
SERVER = one_of("rollout.engine", "auto", "vllm_server", "sglang_server")
OWN_SERVER = off("rollout.server.url")
RUNNING_SERVER = on("rollout.server.url")
RECORDED = (one_of("rollout.engine", "auto", "local"), off("trainer.deterministic", "=false"))
REPORTS_FLOORS = none_of("rollout.engine", "vllm", "vllm_server", "sglang_server")
SAME_DISTRIBUTION = tuple(
    one_of(f"rollout.{key}", off) + REPORTS_FLOORS for key, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))
)

PROGRAMS = (
    Use(
        "reward.functions",
        (),
        " with code",
        lambda functions: any(
            name == "code" or names_a_file(name) for each in functions for name in (each.name, verifier_of(each) or "")
        ),
    ),
)
"""Condition that a reward runs programs: code, or a function of the user's with an argument `sandbox_level`."""
PAIRS = one_of("reward_model.loss", "bradley_terry")
OUTCOMES = none_of("reward_model.loss", "bradley_terry")

DIVIDED = none_of("algorithm.advantage.std", "none")
STEPS = (*one_of("algorithm.advantage.name", "process"), *own_function("algorithm.advantage.name"))
"""Condition that the advantage estimator reads rewards of steps."""
TEXT_STEPS = one_of("algorithm.process.steps", "text")
ADAPTIVE_ENTROPY = (on("algorithm.entropy_target", " above 0"),)
CORRECTED = none_of("algorithm.correction.name", "none")
KL_ON = on("algorithm.kl.coef", " above 0")
KL_IN_LOSS = off("algorithm.kl.in_reward", "=false")
FILTERED = on("algorithm.filter_groups.enable", "=true")

VALIDATION = (
    *on("data.validation"),
    Use(
        "data.train", (), "=task://... or reasoning_gym://...", lambda spec: str(spec).startswith(catalog.TASK_SCHEMES)
    ),
)
SAMPLED = on("trainer.validation_n", " of 1 or more")
SERVICE = holds("observe.loggers", "wandb", "trackio", "swanlab")


def read_by_estimator(setting: str) -> AnyOf:
    return read_by("algorithm.advantage.name", catalog.ADVANTAGES, setting)


def read_by_loss(setting: str) -> AnyOf:
    return read_by("algorithm.loss.name", catalog.POLICY_LOSSES, setting)


def read_by_kl(setting: str) -> AnyOf:
    """Return the condition for a setting of the KL, which functions of the user's own do not get."""
    return one_of("algorithm.kl.estimator", *catalog.KL_ESTIMATORS.readers(setting))


def splits(key: str) -> tuple[Use, ...]:
    return (Use(key, (), " to a folder or a hub dataset", _names_with_splits),)


def _names_with_splits(spec: Any) -> bool:
    """Return whether a data source can have splits; a task has its own, and a file is one split."""
    listed = [spec] if isinstance(spec, str) else spec or []
    return any(
        not name.startswith(catalog.TASK_SCHEMES) and not name.endswith((".jsonl", ".json", ".parquet", ".csv", ".tsv"))
        for name in listed
    )
