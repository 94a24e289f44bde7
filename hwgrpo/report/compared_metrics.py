"""The metrics that a comparison of runs looks at, by the stage of the step that they measure."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache

OTHER = "other"
VALIDATION = "validation"
GAP = "rollout-trainer gap"


@dataclass(frozen=True)
class Stage:
    """A stage of the step and its metrics, as patterns; the longest pattern that matches a name decides."""

    name: str
    main: tuple[str, ...]
    """Means over many samples: their gap between runs is compared with noise. Not shares of rare events: these jump."""
    further: tuple[str, ...]
    """Extremes, counts and scheduled values: only their first difference is looked for."""


STAGES = (
    Stage("prompts", ("prompt_length/mean",), ("prompt_length/*", "data/*", "filter_groups/sampled", "images/*")),
    Stage(
        "responses",
        ("response_length/mean",),
        (
            *("response_length/*", "response/*", "filter_groups/*", "rollout/*", "agent/*", "tools/*"),
            *("perf/response_tokens", "perf/total_num*"),
        ),
    ),
    Stage(
        "rewards",
        (
            *("reward", "reward_std", "frac_reward_zero_std", "rewards/*/mean", "filter_groups/reward"),
            *("reward_model/accuracy", "reward_model/margin"),
        ),
        ("rewards/*", "critic/*", "reward/*", "reward_failures/*", "reward_model/*", "agent/*/reward/mean"),
    ),
    Stage("advantages", (), ("critic/advantages/*",)),
    Stage(
        GAP,
        (
            *("rollout_corr/kl", "rollout_corr/k3_kl", "rollout_corr/log_ratio_slope"),
            *("training/rollout_probs_diff_mean", "rollout/probe_logprob_diff"),
        ),
        ("rollout_corr/*", "training/*", "rollout/guard_level"),
    ),
    Stage("loss", ("actor/loss", "actor/pg_loss"), ("actor/*", "clip_ratio/*", "cispo_*")),
    Stage(
        "KL",
        ("actor/kl_loss", "actor/ppo_kl", "actor/reward_kl_penalty"),
        ("kl", "actor/kl_*", "actor/reward_kl_*", "actor/ratio_*"),
    ),
    Stage("gradient", ("actor/grad_norm",), ("actor/lr", "actor/skipped_updates")),
    Stage("entropy", ("actor/entropy",), ("entropy", "actor/entropy_*")),
    Stage(VALIDATION, ("val-core/*", "val/*"), ("val-aux/*",)),
    Stage(OTHER, (), ("*",)),
)
"""In the order of a step; a validation follows the step that it is logged with."""

SCHEDULED = ("actor/lr", "rollout/temperature", "data/epoch")
"""What settings alone decide: compared, but no result that parts."""
NOT_RESULTS = (
    *("timing_s/*", "perf/*", "tools/*/seconds"),
    *("rollout/server_retries", "rollout/server_restarts", "rollout/servers_alive"),
)
"""What a clock, the memory and the machines decide; a longer pattern of a stage wins."""


@lru_cache(maxsize=4096)
def placed(name: str) -> tuple[int, bool] | None:
    """Return (index of the stage, whether it is a main metric); None for a metric that is not a result."""
    matches = [
        (len(pattern), i, is_main)
        for i, stage in enumerate(STAGES)
        for is_main, patterns in ((True, stage.main), (False, stage.further))
        for pattern in patterns
        if fnmatchcase(name, pattern)
    ]
    longest, stage, is_main = max(matches)
    if any(fnmatchcase(name, pattern) and len(pattern) >= longest for pattern in NOT_RESULTS):
        return None
    return stage, is_main
