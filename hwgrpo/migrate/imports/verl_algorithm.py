"""verl's settings of the algorithm: advantage, loss, aggregation, KL, correction, group filter, rewards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hwgrpo.errors import ConfigError, shown
from hwgrpo.migrate.imports.conversion import Assignment, Converted, Refusal, Remark
from hwgrpo.migrate.imports.variable_text import joined, known
from hwgrpo.migrate.imports.verl_settings import ACTOR, VerlSettings
from hwgrpo.migrate.tables.verl_names import ROWS

_LOSS = ACTOR + "policy_loss."
_MODE = _LOSS + "loss_mode"
_AGGREGATION, _SCALE = ACTOR + "loss_agg_mode", ACTOR + "loss_scale_factor"
_FORCED = "seq-mean-token-mean"
_FORCES = ("sapo", "geo_mean")
"""Losses that verl aggregates as `_FORCED`, whatever loss_agg_mode says."""
_OVER_TOKENS = (
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "opo",
    "gdpo",
    "optimal_token_baseline",
)
"""Estimators that read the mask of response tokens, which verl narrows to those kept before it computes advantages."""
_NOT_OF_RATIO = ("geo_mean", "dppo_kl")
"""Losses whose lower clip bounds a log-ratio or a KL, which may be above 1."""
KWARGS = {
    "clip_cov": {"share": _LOSS + "clip_cov_ratio", "low": _LOSS + "clip_cov_lb", "high": _LOSS + "clip_cov_ub"},
    "kl_cov": {"share": _LOSS + "kl_cov_ratio", "coef": _LOSS + "ppo_kl_coef"},
    "dppo_tv": {"cap": ACTOR + "clip_ratio_c"},
    "dppo_kl": {"cap": ACTOR + "clip_ratio_c"},
    "dro": {"beta": _LOSS + "dro_beta"},
}
"""verl's loss -> argument here -> verl's setting."""
_CORRECTION = "algorithm.rollout_correction."
_BYPASS = _CORRECTION + "bypass_mode"
_V1 = "trainer.use_v1"
_OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg."
_LONGEST = "reward.reward_kwargs.max_resp_len"
_FUNCTION = "reward.custom_reward_function."
_MANAGER = "reward.reward_manager.name"
BY_SOURCE = "by_source"
NO_LIMIT = 1000
"""Rounds of sampling that stand for no limit."""


def value_of(key: str, value: Any) -> str:
    """Return the value here of a choice; "" where it is refused."""
    return ROWS[key].values[value].partition(" | ")[0]


def advantage(v: VerlSettings) -> Iterator[Converted]:
    """Convert the advantage estimator."""
    key, std = "algorithm.adv_estimator", "algorithm.norm_adv_by_std_in_grpo"
    name = v[key]
    here = value_of(key, name)
    if not here:
        why = "it needs a critic" if name == "gae" else "it is not supported"
        default = "" if v.is_given(key) else ", and is verl's default where the key is not given"
        instead = "algorithm.adv_estimator=" + ("grpo" if name == "gae" else "optimal_token_baseline")
        yield Refusal(key, name, why + default, instead)
    else:
        yield Assignment("algorithm.advantage.name", here, (key,))
    divides = v[std] or name == "grpo_vectorized"
    note = "verl divides with grpo_vectorized, whatever this key says" if divides and not v[std] else ""
    yield Assignment("algorithm.advantage.std", "group" if divides else "none", (std,), note)
    singleton = {"grpo_passk": "error", "rloo_vectorized": "zero"}.get(name, "raw")
    yield Assignment(
        "algorithm.advantage.singleton", singleton, (), "verl's advantage where one response of a group is left"
    )


def loss(v: VerlSettings) -> Iterator[Converted]:
    """Convert the policy loss, its clips and its aggregation."""
    mode = v[_MODE]
    here = value_of(_MODE, mode)
    if not here:
        why = "it reads policy_loss.rollout_correction, which is not supported"
        yield Refusal(_MODE, mode, why, "vanilla, with algorithm.rollout_correction.bypass_mode=True")
        return
    note = ""
    if v[_BYPASS] and mode != "vanilla":
        if not v[_V1]:
            why = "with bypass_mode=True verl's older trainer computes PPO clip in its place, or REINFORCE by loss_type"
            yield Refusal(_MODE, mode, why, f"vanilla, or {_V1}=True, where it is computed")
        note = f"as verl's v1 trainer with bypass_mode=True; its older one ({_V1}=False) computes PPO clip"
    yield Assignment("algorithm.loss.name", here, (_MODE,), note)
    yield from _clips(v, mode)
    yield Assignment("algorithm.loss.dual_clip", v[ACTOR + "clip_ratio_c"], (ACTOR + "clip_ratio_c",))
    kwargs = {name: v[key] for name, key in KWARGS.get(mode, {}).items() if v[key] is not None}
    ours = {"clip_cov": {"share": 2e-4, "low": 1.0, "high": 5.0}, "kl_cov": {"share": 2e-4, "coef": 0.1}}.get(mode, {})
    if kwargs != ours:
        yield Assignment("algorithm.loss.kwargs", kwargs, tuple(KWARGS[mode].values()))
    yield from _aggregation(v, mode)


def _clips(v: VerlSettings, mode: str) -> Iterator[Converted]:
    """Convert the bounds of the ratio; a lower bound of 0 or less is none, because ratios are positive."""
    both, low, high = (ACTOR + name for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"))
    for key, bound in (("clip_low", low), ("clip_high", high)):
        origin = both if v[bound] is None else bound
        value, note = v[origin], ""
        if key == "clip_low" and value > 1:
            if mode in _NOT_OF_RATIO:
                yield Refusal(origin, value, f"the lower clip of {mode} is at most 1 here", "1, or less")
                continue
            value, note = 1.0, "the ratio has no lower bound"
        yield Assignment(f"algorithm.loss.{key}", value, (origin, *([bound] if origin == both else [])), note)
    if v.is_given(both) and v[low] is not None and v[high] is not None:
        yield Remark(
            (both,),
            f"verl clips at clip_ratio_low={v[low]:g} and clip_ratio_high={v[high]:g} unless these are null; set them",
        )


def _aggregation(v: VerlSettings, mode: str) -> Iterator[Converted]:
    chosen, scale = v[_AGGREGATION], v[_SCALE]
    if mode in _FORCES:
        note = f"verl aggregates {mode} so, whatever loss_agg_mode says"
        if chosen != _FORCED and (v[ACTOR + "use_kl_loss"] or v[ACTOR + "entropy_coeff"]):
            note += f"; it aggregates KL and entropy by {chosen}, here they follow the loss"
        yield Assignment("algorithm.aggregation.name", _FORCED, (_MODE,), note)
        yield Remark((_AGGREGATION, _SCALE), f"without effect beside loss_mode={mode}")
        return
    note = f"verl of early 2026 aggregated gspo as {_FORCED}" if mode == "gspo" and chosen != _FORCED else ""
    yield Assignment("algorithm.aggregation.name", chosen, (_AGGREGATION,), note)
    if scale is None:
        return
    if chosen != "seq-mean-token-sum-norm":
        yield Remark((_SCALE,), f"without effect beside loss_agg_mode={chosen}")
    elif scale != int(scale) or scale < 1:
        yield Refusal(_SCALE, scale, "the divisor is a number of tokens here", "a whole number of at least 1")
    else:
        yield Assignment("algorithm.aggregation.norm_length", int(scale), (_SCALE,))


def kl(v: VerlSettings) -> Iterator[Converted]:
    """Convert the KL in the loss, or in the reward."""
    in_loss, coef, kind = ACTOR + "use_kl_loss", ACTOR + "kl_loss_coef", ACTOR + "kl_loss_type"
    in_reward, penalty = "algorithm.use_kl_in_reward", "algorithm.kl_penalty"
    control = tuple(f"algorithm.kl_ctrl.{name}" for name in ("type", "kl_coef", "target_kl", "horizon"))
    if v[in_loss] and v[in_reward]:
        yield Refusal(in_reward, True, "with use_kl_loss=True the KL would be twice", "one of both")
        return
    if v[in_reward]:
        if not value_of(penalty, v[penalty]):
            yield Refusal(penalty, v[penalty], "it is not supported", "algorithm.kl_penalty=kl, or a KL in the loss")
            return
        yield Assignment("algorithm.kl.coef", v[control[1]], (in_reward, control[1]))
        yield Assignment("algorithm.kl.estimator", value_of(penalty, v[penalty]).rstrip("+"), (penalty,))
        yield Assignment("algorithm.kl.in_reward", True, (in_reward,))
        if v[control[0]] == "adaptive":
            yield Assignment("algorithm.kl.target", v[control[2]], (control[0], control[2]))
            yield Assignment("algorithm.kl.horizon", v[control[3]], (control[3],))
        yield Remark((in_loss, coef, kind, *control), "the KL is in the reward, with a fixed coefficient")
        return
    yield Remark((in_reward, penalty, *control), "there is no KL in the reward")
    if not v[in_loss]:
        yield Assignment("algorithm.kl.coef", 0.0, (in_loss,))
        yield Remark((coef, kind), "without effect beside use_kl_loss=False")
        return
    here = value_of(kind, v[kind])
    if not here:
        yield Refusal(kind, v[kind], "it is not supported", "low_var_kl, or algorithm.kl.estimator=exact here")
        return
    yield Assignment("algorithm.kl.coef", v[coef], (in_loss, coef))
    note = "in a loss its gradient has mean 0; k2, or k1+, has that of the KL" if here == "k1" else ""
    yield Assignment("algorithm.kl.estimator", here, (kind,), note)


def correction(v: VerlSettings) -> Iterator[Converted]:
    """Convert importance weights and rejection for the gap between engine and trainer."""
    name, bound, normalize, rejects, bounds, kind = (
        _CORRECTION + each
        for each in (
            *("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs"),
            *("rollout_rs_threshold", "loss_type"),
        )
    )
    yield Remark((_V1,), "verl's trainers differ here with bypass_mode and max_num_gen_batches alone")
    if v[_BYPASS]:
        yield Remark(
            (name, bound, normalize), "verl's trainers weigh no token with bypass_mode=True, but by loss_type=reinforce"
        )
        yield Remark((kind,), "the loss of policy_loss.loss_mode")
        if v[kind] != "ppo_clip":
            why = (
                "with bypass_mode=True verl's v1 trainer keeps policy_loss.loss_mode, and its older one "
                f"({_V1}=False) weighs log-probs by the current policy's ratio, which is not supported"
            )
            yield Refusal(kind, v[kind], why, "ppo_clip, or policy_loss.loss_mode=gpg")
        if v[rejects] is not None:
            why = (
                "with bypass_mode=True verl's v1 trainer rejects nothing, and its older one "
                f"({_V1}=False) by the current policy's ratio, which is not supported"
            )
            yield Refusal(rejects, v[rejects], why, "leaving it out, which is the v1 trainer's, or bypass_mode=False")
        yield Assignment("algorithm.old_logprobs", "rollout", (_BYPASS,))
        return
    yield Remark((kind,), "without effect beside bypass_mode=False")
    yield Assignment("algorithm.old_logprobs", "trainer", (_BYPASS,))
    if v[name] is None:
        yield Remark((name, bound, normalize), "there are no importance weights")
    else:
        low, high = _bounds(bound, known(v[bound]), v[bound])
        here = value_of(name, v[name])
        masks = low is not None
        yield Assignment(
            "algorithm.correction.name", here.replace("truncate", "mask") if masks else here, (name, bound)
        )
        yield Assignment("algorithm.correction.high", high, (bound,))
        if masks:
            yield Assignment("algorithm.correction.low", low, (bound,))
        yield Assignment("algorithm.correction.normalize", v[normalize], (normalize,))
    if v[rejects] is None:
        yield Remark((rejects, bounds), "nothing is rejected")
        return
    statistics = [each.strip() for each in known(v[rejects]).split(",") if each.strip()]
    bound = "" if v[bounds] is None else str(known(v[bounds]))
    limits = [each.strip() for each in bound.split(",") if each.strip()]
    limits = limits * len(statistics) if len(limits) == 1 else limits
    if len(limits) != len(statistics):
        yield Refusal(
            bounds, v[bounds], f"rollout_rs has {len(statistics)} statistics", "one threshold, or one of each"
        )
        return
    tokens = next((each for each in statistics if each.startswith("token_")), None)
    if tokens is not None and v[_MODE] == "geo_mean":
        why = f"verl leaves tokens that {tokens} rejects out of the ratio of geo_mean, which has all tokens here"
        yield Refusal(rejects, v[rejects], why, "a statistic of sequences, e.g. seq_mean_k1")
        return
    reject: dict[str, Any] = {}
    for statistic, limit in zip(statistics, limits, strict=True):
        low, high = _bounds(bounds, limit, v[bounds])
        reject[statistic] = [1 / high if low is None else low, high] if statistic.endswith("k1") else high
    estimator = v["algorithm.adv_estimator"]
    note = f"verl's advantages of {estimator} leave rejected tokens out" if estimator in _OVER_TOKENS else ""
    yield Assignment("algorithm.correction.reject", reject, (rejects, bounds), note)


def _bounds(key: str, value: Any, written: Any) -> tuple[float | None, float]:
    """Return the lower and the upper bound of `2.0` or `"0.5_2.0"`; an error shows it as it was written."""
    low, _, high = str(value).rpartition("_")
    try:
        return (float(low) if low else None), float(high)
    except ValueError:
        raise ConfigError(f"{key}={shown(written)} must be a number, or two as 0.5_2.0, as in verl") from None


def filtered_groups(v: VerlSettings) -> Iterator[Converted]:
    """Convert dynamic sampling."""
    enable, metric, rounds = (f"algorithm.filter_groups.{each}" for each in ("enable", "metric", "max_num_gen_batches"))
    yield Assignment("algorithm.filter_groups.enable", v[enable], (enable,))
    sampled = v["data.gen_batch_size"]
    if sampled is not None and sampled != v["data.train_batch_size"] and not v[enable]:
        yield Refusal("data.gen_batch_size", sampled, "all prompts of a step are trained", "data.train_batch_size")
    yield Remark(("data.gen_batch_size",), "a round of sampling has up to trainer.prompts_per_step prompts")
    if not v[enable]:
        yield Remark((metric, rounds), "without effect beside filter_groups.enable=False")
        return
    own = v.is_given(_FUNCTION + "path")
    name = v[metric] or "reward"
    if known(name) in ("seq_reward", "seq_final_reward", "reward"):
        here = "reward"
    elif known(name) == "score" or not own:
        here = v[_FUNCTION + "name"] if own else BY_SOURCE
    else:
        here = name
    yield Assignment("algorithm.filter_groups.metric", here, (metric,))
    if v[rounds] <= 0:
        yield Assignment("algorithm.filter_groups.max_rounds", NO_LIMIT, (rounds,), "verl has no limit")
        return
    size, step = v["data.gen_batch_size"] or v["data.train_batch_size"], v["data.train_batch_size"]
    note = (
        f"{v[rounds]} batches of {size} prompts, in rounds of {step}; then verl's DAPO recipe stops, and here the step "
        "is filled with other groups; verl's v1 trainer has no limit"
    )
    most = max(1, -(-v[rounds] * size // step))
    yield Assignment("algorithm.filter_groups.max_rounds", most, (rounds, "data.gen_batch_size"), note)


def rewards(v: VerlSettings) -> Iterator[Converted]:
    """Convert the reward function and the overlong penalty of the manager dapo."""
    manager = v[_MANAGER]
    if not value_of(_MANAGER, manager):
        instead = "algorithm.adv_estimator=gdpo, or a timeout or service of a reward function (docs/rewards.md)"
        yield Refusal(_MANAGER, manager, "this manager is not supported", instead)
    path, name = _FUNCTION + "path", _FUNCTION + "name"
    origins = [path, name]
    if v[path]:
        function: dict[str, Any] = {"name": joined(v[path], ":", v[name])}
        given = v.below(_FUNCTION + "reward_kwargs.")
        function |= {"kwargs": given} if given else {}
        origins += [f"{_FUNCTION}reward_kwargs.{each}" for each in given]
        note = ""
    else:
        function, note = {"name": BY_SOURCE}, "verl scores each row by its data_source, too"
        yield Remark(
            (name, *(f"{_FUNCTION}reward_kwargs.{each}" for each in v.below(_FUNCTION + "reward_kwargs."))),
            "without effect beside custom_reward_function.path=null",
        )
    functions = [function]
    overlong = tuple(_OVERLONG + each for each in ("enable", "len", "penalty_factor", "log"))
    if manager == "dapo" and v[overlong[0]]:
        longest = {} if v[_LONGEST] is None else {"max_response_tokens": v[_LONGEST]}
        penalty = {"buffer": v[overlong[1]], "factor": v[overlong[2]], "floor": False, **longest}
        functions.append({"name": "length", "kwargs": penalty})
        origins += [_MANAGER, *overlong, _LONGEST]
    else:
        yield Remark((*overlong, _LONGEST), "without effect unless the manager is dapo and the buffer is enabled")
        origins.append(_MANAGER)
    yield Assignment("reward.functions", functions, tuple(origins), note)
    yield Assignment("rollout.skip_special_tokens", True, (), "verl decodes responses without special tokens")
