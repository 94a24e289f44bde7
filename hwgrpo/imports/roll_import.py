"""Settings of a run of ROLL's RLVR pipeline -> settings here."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from hwgrpo.errors import ConfigError, shown
from hwgrpo.imports.conversion import Assignment, Converted, Launch, Refusal, Remark, lower_clip
from hwgrpo.imports.import_result import Imported
from hwgrpo.imports.peer_import import Conversion, import_peer
from hwgrpo.imports.peer_settings import PeerSettings, value_here
from hwgrpo.imports.variable_text import known

_N, _STEP = "num_return_sequences_in_group", "rollout_batch_size"
_ARGUMENTS, _MODEL = "actor_train.training_args.", "actor_train.model_args."
_PER, _ACCUMULATION = _ARGUMENTS + "per_device_train_batch_size", _ARGUMENTS + "gradient_accumulation_steps"
_DEVICES, _ENGINES = "actor_train.device_mapping", "actor_infer.device_mapping"
_STRATEGY_NAME, _STRATEGY = (f"actor_train.strategy_args.strategy_{each}" for each in ("name", "config"))
_SEQUENCE = (_STRATEGY + ".context_parallel_size", _MODEL + "ulysses_size")
_OFFLOAD = _STRATEGY + ".zero_optimization.offload_optimizer.device"
_PIPELINE = _STRATEGY + ".pipeline_model_parallel_size"
_TENSOR = _STRATEGY + ".tensor_model_parallel_size"
_RULES = {"MathRuleRewardWorker": "math"}
"""ROLL's reward workers -> the rewards here."""
_RANGE = re.compile(r"list\(range\((?:(\d+), *)?(\d+)\)\)")
_LISTED = re.compile(r"(?:list\()?\[[\d, ]*\]\)?")


def import_roll(v: PeerSettings) -> Imported:
    """Return the recipe of a ROLL run.

    Raises:
        ConfigError: batch sizes without a counterpart, or lengths that are not stated.
    """
    return import_peer(v, CONVERSIONS)


def device_list(key: str, value: Any) -> list[int]:
    """Return the devices of `list(range(0,8))`, `[0, 1]`, or a list.

    Raises:
        ConfigError: it is none of these.
    """
    if value is None:
        return [0]
    value = known(value)
    if isinstance(value, str) and (found := _RANGE.fullmatch(value.strip())):
        return list(range(int(found[1] or 0), int(found[2])))
    if isinstance(value, str) and _LISTED.fullmatch(value.strip()):
        value = [int(each) for each in re.findall(r"\d+", value)]
    if isinstance(value, list) and value and all(type(each) is int for each in value):
        return value
    raise ConfigError(f"{key}={shown(value)} must be a list of devices, as list(range(0,8))")


def _parallel(v: PeerSettings) -> tuple[int, int]:
    """Return the ranks that share a sequence, and those that share tensors."""
    return max(v[key] for key in _SEQUENCE), v[_TENSOR]


def _data(v: PeerSettings) -> Iterator[Converted]:
    for key, here in (
        ("actor_train.data_args.file_name", "data.train"),
        ("validation.data_args.file_name", "data.validation"),
    ):
        if v.is_given(key):
            files = v[key]
            yield Assignment(here, files[0] if isinstance(files, list) and len(files) == 1 else files, (key,))
    prompt, response, both = "prompt_length", "response_length", "sequence_length"
    yield Assignment("data.max_prompt_tokens", v[prompt], (prompt,))
    if v[both] is not None:
        if v[both] <= v[prompt]:
            raise ConfigError(f"{both}={v[both]} must be more than {prompt}={v[prompt]}, which it counts, too")
        yield Assignment("rollout.max_response_tokens", v[both] - v[prompt], (both, prompt))
        yield Remark((response,), f"without effect beside {both}, as in ROLL")
    elif v[response] is not None:
        yield Assignment("rollout.max_response_tokens", v[response], (response,))
    else:
        raise ConfigError(f"{response} or {both} must be set, as in ROLL; give {response}=1024")


def _batches(v: PeerSettings) -> Iterator[Converted]:
    n, step = v[_N], v[_STEP]
    yield Assignment("rollout.n", n, (_N,))
    devices = len(device_list(_DEVICES, v[_DEVICES]))
    sequence, tensor = _parallel(v)
    yield Launch((_DEVICES,), devices)
    ranks = max(1, devices // (sequence * tensor * (v[_PIPELINE] or 1)))
    update = v[_PER] * v[_ACCUMULATION] * ranks
    if update % n or (step * n) % update:
        raise ConfigError(
            f"an update has {update} responses ({_PER}={v[_PER]} x {_ACCUMULATION}={v[_ACCUMULATION]} x {ranks} ranks) "
            f"and must be whole groups of {_N}={n} that divide the {step * n} of a step; use "
            f"{_ACCUMULATION}={max(1, step * n // (v[_PER] * ranks))} for one update per step"
        )
    note = f"{update} responses over {ranks} ranks"
    one = update == step * n
    yield Assignment("trainer.prompts_per_update", None if one else update // n, (_PER, _ACCUMULATION), note)
    yield Remark((_PER, _ACCUMULATION), "one update per step; micro-batches are cut by tokens")


def _advantage(v: PeerSettings) -> Iterator[Converted]:
    key, mean, std, whitens = "adv_estimator", "norm_mean_type", "norm_std_type", "whiten_advantages"
    keys = (key, mean, std, whitens)
    if not value_here(v, key):
        default = "" if v.is_given(key) else ", and is ROLL's default"
        why = "it needs a critic" if v[key] == "gae" else "rewards of steps are not supported"
        yield Refusal(key, v[key], why + default, f"{key}=grpo")
        yield Remark(keys, "left out with adv_estimator")
        return
    kinds = ("group", "group") if v[key] == "grpo" else (value_here(v, mean), value_here(v, std))
    if v[whitens] and kinds in (("batch", "batch"), ("batch", "none"), ("none", "none")):
        yield Assignment("algorithm.advantage.name", "reinforce_plus_plus", keys)
    elif v[whitens] and kinds in (("group", "batch"), ("group", "none")):
        yield Assignment("algorithm.advantage.name", "reinforce_plus_plus_baseline", keys)
    elif not v[whitens] and kinds[0] == "group" and kinds[1]:
        yield Assignment("algorithm.advantage.name", "grpo", (key, mean))
        yield Assignment("algorithm.advantage.std", kinds[1], (std, key))
    else:
        origin = whitens if v[whitens] else mean
        why = f"mean {v[mean]} and deviation {v[std]} with {whitens}={v[whitens]} is no estimator"
        yield Refusal(origin, v[origin], why, f"{key}=grpo with {whitens}=false")
    yield Remark(keys, f"as {key}={v[key]} says")


def _loss(v: PeerSettings) -> Iterator[Converted]:
    variant, level, mode = "pg_variant", "importance_sampling", "loss_agg_mode"
    both, ranges, low, high = "pg_clip", "use_pg_clip_range", "pg_clip_low", "pg_clip_high"
    worker = "actor_train.worker_cls"
    lacks = str(known(v[worker])).endswith("ActorPGWorker") and not v.is_given(variant)
    name = value_here(v, variant)
    if lacks:
        yield Refusal(worker, v[worker], f"it needs actor_train.{variant}", f"actor_train.{variant}=ppo")
    elif not name:
        yield Refusal(variant, v[variant], "this loss is not supported", f"{variant}=ppo or cispo")
    elif name == "cispo" and v[level] == "seq":
        yield Refusal(level, "seq", "cispo has the ratio of a token", "token")
    else:
        yield Assignment("algorithm.loss.name", "gspo" if v[level] == "seq" else name, (variant, level))
    yield Remark((worker,), f"its loss is that of {variant}")
    own = ("actor_train.cispo_epsilon_low", "actor_train.cispo_epsilon_high")
    bounds = own if name == "cispo" else (low, high) if v[ranges] else (both, both)
    yield Remark(own, f"without effect beside {variant}={v[variant]}")
    switch = () if name == "cispo" else (ranges,)
    yield lower_clip(v[bounds[0]], (bounds[0], *switch))
    yield Assignment("algorithm.loss.clip_high", v[bounds[1]], (bounds[1], *switch))
    other = f"{variant}=cispo" if name == "cispo" else f"{ranges}={v[ranges]}"
    yield Remark((both, low, high, ranges), f"without effect beside {other}")
    dual = "dual_clip_loss"
    yield Assignment(
        "algorithm.loss.dual_clip", 1 + 2 * v[both] if v[dual] else None, (dual, *((both,) if v[dual] else ()))
    )
    if value_here(v, mode):
        yield Assignment("algorithm.aggregation.name", v[mode], (mode,))
    else:
        yield Refusal(mode, v[mode], "ROLL does not divide it by the number of sequences", "seq-mean-token-sum")


def _kl(v: PeerSettings) -> Iterator[Converted]:
    on, coef, tokens, first = "use_kl_loss", "kl_loss_coef", "add_token_level_kl", "init_kl_coef"
    if v[tokens] and v[first]:
        why = "each token's advantage has the KL of the later tokens"
        yield Refusal(tokens, True, why, f"{on}=true, or algorithm.kl.in_reward here")
    yield Remark((first,), f"of {tokens}")
    yield Remark((tokens,), "there is no KL in the reward")
    yield Assignment("algorithm.kl.coef", v[coef] if v[on] else 0.0, (coef, on) if v[on] else (on,))
    yield Remark((coef,), f"without effect beside {on}=false")
    if v[on] and v[coef]:
        yield Assignment("algorithm.kl.estimator", "k3", (on,))
        yield Assignment("algorithm.kl.input_clamp", None, (), "ROLL does not clamp the log-ratio to the reference")


def _correction(v: PeerSettings) -> Iterator[Converted]:
    on, kind, bound = (f"train_infer_correction.is_weight.{each}" for each in ("enabled", "weight_type", "upper_bound"))
    if not v[on]:
        yield Assignment("algorithm.correction.name", "none", (on,))
        yield Remark((kind, bound), f"without effect beside {on}=false")
    elif not value_here(v, kind) or v[bound] is None:
        key, why = (
            (kind, "there are no segments") if not value_here(v, kind) else (bound, "weights have an upper bound")
        )
        yield Refusal(key, v[key], why, f"{kind}=token with {bound}=1.2")
    else:
        yield Assignment("algorithm.correction.name", value_here(v, kind), (kind, on))
        yield Assignment("algorithm.correction.high", v[bound], (bound,))


def _rewards(v: PeerSettings) -> Iterator[Converted]:
    keys = [key for key in v.given if key.startswith("rewards.")]
    workers = {key: str(known(v[key])).rpartition(".")[2] for key in keys if key.endswith(".worker_cls")}
    functions = []
    for key, worker in workers.items():
        if worker in _RULES:
            functions.append({"name": _RULES[worker]})
        else:
            yield Refusal(key, v[key], "this worker has no counterpart", "reward.functions (docs/rewards.md)")
    for key in keys:
        if key.endswith("_filter_config.type") and known(v[key]) != "no_filter":
            yield Refusal(key, v[key], "groups are filtered for all rewards at once", "algorithm.filter_groups here")
    scored = tuple(key for key, worker in workers.items() if worker in _RULES)
    if functions:
        yield Assignment("reward.functions", functions, scored)
    yield Remark(tuple(keys), "of the reward worker; not read")
    clip = "reward_clip"
    exact = len(functions) == len(workers) == 1
    if v[clip] is not None and not (exact and v[clip] >= 1):
        yield Refusal(clip, v[clip], "rewards are not clipped", "the reward function")
    yield Remark((clip,), "rewards are 0 or 1")


def _optimizer(v: PeerSettings) -> Iterator[Converted]:
    schedule = _ARGUMENTS + "lr_scheduler_type"
    steps, share = _ARGUMENTS + "warmup_steps", _ARGUMENTS + "warmup_ratio"
    betas = (_ARGUMENTS + "adam_beta1", _ARGUMENTS + "adam_beta2")
    yield Assignment("optim.schedule", value_here(v, schedule), (schedule,))
    if v[schedule] == "constant" and v[_STRATEGY_NAME] != "megatron_train":
        yield Remark((steps, share), f"without effect beside {schedule}=constant, as in ROLL")
    elif v[steps] > 0:
        yield Assignment("optim.warmup_steps", v[steps], (steps,))
        yield Remark((share,), f"without effect beside {steps}={v[steps]}")
    else:
        yield Assignment("optim.warmup_ratio", v[share], (share, steps))
    yield Assignment("optim.betas", [v[key] for key in betas], betas)


def _sampling(v: PeerSettings) -> Iterator[Converted]:
    top, count, name = "actor_infer.generating_args.top_k", "val_n_sample", "actor_infer.strategy_args.strategy_name"
    if v[top] is not None:
        yield Assignment("rollout.top_k", max(v[top], 0), (top,))
    yield Assignment("trainer.validation_n", v[count], (count,), "and a greedy response")
    engine = value_here(v, name)
    trained = device_list(_DEVICES, v[_DEVICES])
    sampled = device_list(_ENGINES, v[_ENGINES]) if v.is_given(_ENGINES) else trained
    apart = not {*trained} & {*sampled}
    yield Assignment("rollout.engine", "vllm_server" if engine == "vllm" and apart else engine, (name, _ENGINES))
    config = "actor_infer.strategy_args.strategy_config."
    for key in ("gpu_memory_utilization", "mem_fraction_static"):
        if v.is_given(config + key):
            yield Assignment("rollout.gpu_memory_utilization", v[config + key], (config + key,))
    yield Assignment(
        "rollout.tensor_parallel_size", v[config + "tensor_parallel_size"], (config + "tensor_parallel_size",)
    )
    window, needed = config + "max_model_len", v["prompt_length"] + (v["response_length"] or 0)
    needed = v["sequence_length"] or needed
    if v[window] is not None and v[window] >= needed:
        yield Assignment("rollout.max_model_len", v[window], (window,))
    elif v[window] is not None:
        yield Refusal(window, v[window], f"a sequence can have {needed} tokens", f"at least {needed}")


def _training(v: PeerSettings) -> Iterator[Converted]:
    name, stage = _STRATEGY_NAME, _STRATEGY + ".zero_optimization.stage"
    sequence, tensor = _parallel(v)
    devices = len(device_list(_DEVICES, v[_DEVICES]))
    yield Assignment("trainer.sequence_parallel_size", sequence, tuple(key for key in _SEQUENCE if v[key] == sequence))
    yield Assignment("trainer.tensor_parallel_size", tensor, (_TENSOR,))
    config = str(known(v[_STRATEGY]) or "")
    if value_here(v, name) == "deepspeed" and sequence == tensor == 1:
        level = v[stage] if v[stage] is not None else int((re.findall(r"zero(\d)", config) or [2])[0])
        origin = stage if v[stage] is not None else _STRATEGY
        yield Assignment("trainer.strategy", "deepspeed" if level else "ddp", (name,))
        if level:
            yield Assignment("trainer.deepspeed.stage", level, (origin,))
            offloads = "offload" in config or v[_OFFLOAD] == "cpu"
            yield Assignment("trainer.deepspeed.offload_optimizer", offloads, (_STRATEGY, _OFFLOAD))
    elif devices > 1:
        yield Assignment("trainer.strategy", "fsdp2", (name,))
    yield Remark((*_SEQUENCE, name, _STRATEGY, _OFFLOAD, stage), "as here")


def _adapters(v: PeerSettings) -> Iterator[Converted]:
    rank, alpha, dropout, targets = (
        _MODEL + each for each in ("lora_rank", "lora_alpha", "lora_dropout", "lora_target")
    )
    yield Assignment("model.lora.rank", v[rank] or 0 if v[targets] else 0, (targets, rank) if v[targets] else ())
    if v[targets] and v[rank]:
        yield Assignment("model.lora.dropout", v[dropout], (dropout,))
        listed = v[targets].split(",") if isinstance(v[targets], str) else v[targets] or ["all-linear"]
        yield Assignment("model.lora.alpha", float(2 * v[rank] if v[alpha] is None else v[alpha]), (alpha,))
        yield Assignment("model.lora.target_modules", [each.strip() for each in listed], (targets,))
    yield Remark((rank, alpha, dropout, targets), f"without effect without {targets}, as in ROLL")


def _run(v: PeerSettings) -> Iterator[Converted]:
    keep, resume, track, run = "max_ckpt_to_keep", "resume_from_checkpoint", "track_with", "exp_name"
    if v[keep]:
        yield Assignment("trainer.keep_checkpoints", v[keep], (keep,))
    yield Remark((keep,), "ROLL keeps all, here trainer.keep_checkpoints are kept")
    if isinstance(v[resume], str) and v[resume].lower() not in ("true", "false"):
        yield Refusal(resume, v[resume], "it is a checkpoint of ROLL", "false, or model.path of its weights")
    else:
        yield Assignment("trainer.resume", "auto" if str(v[resume]).lower() == "true" else "never", (resume,))
    logger = value_here(v, track)
    yield Assignment("observe.loggers", list(dict.fromkeys(("jsonl", logger))), (track,))
    if v.is_given(run) and logger in ("wandb", "swanlab", "trackio"):
        yield Assignment("observe.run_name", v[run], (run,))
    yield Remark((run,), "no service has the run")


CONVERSIONS: tuple[Conversion, ...] = (
    *(_data, _batches, _advantage, _loss, _kl, _correction, _rewards),
    *(_optimizer, _sampling, _training, _adapters, _run),
)
