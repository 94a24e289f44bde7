"""TRL's settings of the algorithm: loss, advantage, KL, entropy, correction, rewards."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hwgrpo.migrate.imports.conversion import Assignment, Converted, Refusal, Remark, lower_clip
from hwgrpo.migrate.imports.trl_settings import TrlSettings, trl_value
from hwgrpo.migrate.tables.trl_mapped import LOSSES

VESPO = {"k_pos": "vespo_k_pos", "lambda_pos": "vespo_lambda_pos"}
VESPO |= {"k_neg": "vespo_k_neg", "lambda_neg": "vespo_lambda_neg"}
SAPO = {"tau_pos": "sapo_temperature_pos", "tau_neg": "sapo_temperature_neg"}
_EPS = 1e-4
REWARDS: dict[str, dict[str, Any]] = {
    "get_soft_overlong_punishment": {
        "name": "length",
        "kwargs": {"buffer": 256, "factor": 1.0, "floor": True, "max_response_tokens": 1280},
    },
    "accuracy_reward": {"name": "math"},
    "accuracy": {"name": "math"},
}
"""Functions that TRL's script and open-r1's name -> the rewards here."""
NEAREST = {
    **dict.fromkeys(("think_format_reward", "tag_count"), "tags"),
    "reasoning_accuracy_reward": "math",
    "format": "format",
    "length": "length",
    "cosine": "length_cosine",
    "repetition_penalty": "repetition",
    "soft_overlong_punishment": "length",
    **dict.fromkeys(("code", "binary_code", "ioi_code", "cf_code", "code_format"), "code"),
}
"""Functions that TRL's script and open-r1's name, and that differ from each reward here -> the nearest reward."""


def loss(v: TrlSettings) -> Iterator[Converted]:
    """Convert the policy loss, its clips and its aggregation."""
    kind, level = v["loss_type"], v["importance_sampling_level"]
    name, aggregation = LOSSES[kind]
    if level == "sequence":
        if name != "ppo_clip":
            yield Refusal("importance_sampling_level", level, f"{kind} has its own ratio", "token")
            return
        name = "gspo"
    yield Assignment("algorithm.loss.name", name, ("loss_type", "importance_sampling_level"))
    note = "over the update; TRL takes it over each micro-batch" if kind == "bnpo" else ""
    yield Assignment("algorithm.aggregation.name", aggregation, ("loss_type",), note)
    low, high = v["epsilon"], v["epsilon_high"] if v["epsilon_high"] is not None else v["epsilon"]
    origins = ("epsilon_high",) if v["epsilon_high"] is not None else ("epsilon",)
    if kind == "cispo":
        yield Assignment("algorithm.loss.clip_low", 1.0, ("loss_type",), "the ratio has no lower bound")
        note = (
            ""
            if v["epsilon_high"] is not None
            else "; TRL caps by epsilon where epsilon_high is not set (5.0 is usual)"
        )
        yield Assignment("algorithm.loss.clip_high", round(high - 1, 12), origins, f"ratios up to {high:g}{note}")
    elif kind in ("sapo", "vespo"):
        yield Remark(("epsilon", "epsilon_high"), f"{kind} does not clip")
    else:
        yield lower_clip(low, ("epsilon",))
        yield Assignment("algorithm.loss.clip_high", high, origins)
    yield Remark(("epsilon",), "cispo has no lower bound")
    for here, key in SAPO.items():
        yield Assignment(f"algorithm.loss.{here}", v[key], (key,))
    kwargs = {here: v[key] for here, key in VESPO.items()}
    changed = kind == "vespo" and any(v[key] != v.names.rows[key].default for key in VESPO.values())
    if changed:
        yield Assignment("algorithm.loss.kwargs", kwargs, tuple(VESPO.values()))
    yield Remark(tuple(VESPO.values()), "as here" if kind == "vespo" else f"without effect beside loss_type={kind}")
    yield Assignment("algorithm.loss.dual_clip", None, (), "TRL has no dual clip")
    yield Assignment("algorithm.loss.log_ratio_clamp", None, (), "TRL does not clamp it")


def advantage(v: TrlSettings) -> Iterator[Converted]:
    """Convert the advantage."""
    name = trl_value(v, "multi_objective_aggregation")
    yield Assignment("algorithm.advantage.name", name, ("multi_objective_aggregation",))
    yield Assignment("algorithm.advantage.eps", _EPS, (), f"TRL adds {_EPS} to the standard deviation")
    if name == "gdpo":
        whitened = {"per_response": 1}
        yield Assignment("algorithm.advantage.kwargs", whitened, ("multi_objective_aggregation",), "as in TRL")
        yield Remark(("scale_rewards",), "without effect beside normalize_then_sum, as in TRL")
    else:
        yield Assignment("algorithm.advantage.std", trl_value(v, "scale_rewards"), ("scale_rewards",))


def kl(v: TrlSettings) -> Iterator[Converted]:
    """Convert the KL to the reference model."""
    yield Assignment("algorithm.kl.coef", v["beta"], ("beta",))
    moving = ("sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha")
    if not v["beta"]:
        yield Remark(("use_bias_correction_kl", *moving), "without effect beside beta=0.0")
        return
    sequence = v["importance_sampling_level"] == "sequence"
    note = "the ratio of the token; TRL's is that of the sequence here" if sequence else ""
    yield Assignment("algorithm.kl.times_ratio", v["use_bias_correction_kl"], ("use_bias_correction_kl",), note)
    yield Assignment("algorithm.kl.input_clamp", None, (), "TRL does not clamp the KL")
    yield Assignment("algorithm.kl.output_clamp", None, (), "TRL does not clamp the KL")
    if v["sync_ref_model"]:
        steps, note = v.in_steps(v["ref_model_sync_steps"])
        yield Assignment("algorithm.kl.sync_every", steps, moving[:2], note)
        yield Assignment("algorithm.kl.sync_share", v["ref_model_mixup_alpha"], moving[2:])
    yield Remark(moving, "the reference stays the model of the start")


def entropy(v: TrlSettings) -> Iterator[Converted]:
    """Convert the adaptive coefficient of the entropy bonus."""
    keys = ("entropy_coef_delta", "entropy_coef_min", "entropy_coef_max")
    if v["use_adaptive_entropy"]:
        yield Assignment("algorithm.entropy_target", v["entropy_target"], ("entropy_target", "use_adaptive_entropy"))
        for key in keys:
            yield Assignment(f"algorithm.{key}", v[key], (key,))
    yield Remark(("use_adaptive_entropy", "entropy_target", *keys), "the coefficient is fixed")


def correction(v: TrlSettings) -> Iterator[Converted]:
    """Convert importance weights for the gap between vLLM and trainer."""
    on, mode, high, low = (
        f"vllm_importance_sampling_{each}" for each in ("correction", "mode", "clip_max", "clip_min")
    )
    if not (v["use_vllm"] and v[on]):
        yield Assignment("algorithm.correction.name", "none", (on,) if v["use_vllm"] else ("use_vllm",))
        yield Remark((on, mode, high, low), "without use_vllm there is no gap" if v[on] else "there are no weights")
        return
    top = v.given[high] if high in v.given else v[high]
    if low in v.given and v[low] is not None and top is not None and v[low] >= top:
        yield Refusal(low, v[low], f"it is not below {high}={top:g}", f"less than {top:g}")
        return
    if top is None and v[low] is None and v[mode].endswith("truncate"):
        yield Refusal(mode, v[mode], "it needs a bound", f"{high}=3.0")
        return
    if v["loss_type"] == "vespo":
        why = "with loss_type=vespo TRL multiplies the ratio of the sequence by its weights, and not the loss"
        yield Refusal(on, True, why, f"{on}=false, or another loss_type")
        return
    yield Assignment("algorithm.correction.name", trl_value(v, mode), (mode, on))
    yield Assignment("algorithm.correction.high", top, (high,))
    yield Assignment("algorithm.correction.low", v[low], (low,))


def rewards(v: TrlSettings) -> Iterator[Converted]:
    """Convert the reward functions that a script names, and their weights."""
    yield Assignment("rollout.skip_special_tokens", True, (), "TRL decodes responses without special tokens")
    names, weights = v["reward_funcs"], v["reward_weights"]
    names = [names] if isinstance(names, str) else names or []
    trained = v["reward_model_name_or_path"]
    functions: list[dict[str, Any]] = [{"name": "reward_model", "kwargs": {"path": trained}}] if trained else []
    own = [name for name in names if name in NEAREST]
    unknown = [name for name in names if name not in {*REWARDS, *NEAREST} and "." not in name]
    if own:
        rewards_here = ", ".join(dict.fromkeys(NEAREST[name] for name in own))
        yield Refusal("reward_funcs", names, f"{', '.join(own)} is the script's own", f"the rewards {rewards_here}")
    elif unknown:
        yield Refusal("reward_funcs", names, f"{', '.join(unknown)} is no function of TRL", "module.function")
    for name in names:
        if name in REWARDS:
            functions.append(dict(REWARDS[name]))
        elif "." in name:
            module, _, function = name.rpartition(".")
            functions.append({"name": f"{module.replace('.', '/')}.py:{function}"})
    if own or unknown:
        yield Remark(("reward_weights",), "the weights of reward_funcs, some of which are refused")
        return
    keys = ("reward_model_name_or_path", "reward_funcs")
    if not functions:
        yield Remark(("reward_weights",), "the weights of the functions of GRPOTrainer")
        return
    if weights is not None and len(weights) != len(functions):
        yield Refusal("reward_weights", weights, f"there are {len(functions)} functions", "one weight of each")
        return
    for entry, weight in zip(functions, weights or [], strict=False):
        if weight != 1:
            entry["weight"] = float(weight)
    yield Assignment("reward.functions", functions, (*keys, "reward_weights"))
