"""Settings of an OpenRLHF run -> settings here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hwgrpo.config.backend_choices import attention_choices
from hwgrpo.errors import ConfigError
from hwgrpo.imports.conversion import Assignment, Converted, Launch, Refusal, Remark, lower_clip
from hwgrpo.imports.import_result import Imported
from hwgrpo.imports.openrlhf_reader import DEVICES
from hwgrpo.imports.peer_import import Conversion, import_peer
from hwgrpo.imports.peer_settings import PeerSettings, value_here
from hwgrpo.imports.variable_text import known

_N, _STEP, _UPDATE = "rollout.n_samples_per_prompt", "rollout.batch_size", "train.batch_size"
_ESTIMATOR, _LOSS = "algo.advantage.estimator", "actor.policy_loss_type"
_LENGTHS = ("data.max_len", "prompt_max_len", "rollout.max_new_tokens")
_OLD_RESPONSE = "generate_max_len"
"""The name of versions whose prompts had a limit of their own, of 1024 tokens."""
_ALL = 100_000_000
_EPS = 1e-9


def import_openrlhf(v: PeerSettings) -> Imported:
    """Return the recipe of an OpenRLHF run.

    Raises:
        ConfigError: batch sizes without a counterpart.
    """
    return import_peer(v, CONVERSIONS)


def _data(v: PeerSettings) -> Iterator[Converted]:
    train, validation, chat = "data.prompt_dataset", "eval.dataset", "data.apply_chat_template"
    if v.is_given(train):
        files = [each.strip() for each in v[train].split(",")]
        yield Assignment("data.train", files[0] if len(files) == 1 else files, (train,))
    yield Assignment("data.chat", "always" if v[chat] else "never", (chat,))
    rows = "data.max_samples"
    yield Assignment("data.max_rows", 0 if v[rows] >= _ALL else v[rows], (rows,))
    keys = ("eval.split", "eval.steps", "eval.n_samples_per_prompt", "eval.temperature")
    if not v.is_given(validation):
        yield Remark(keys, "nothing is validated without eval.dataset")
        return
    yield Assignment("data.validation", v[validation], (validation,))
    yield Assignment("data.validation_split", v[keys[0]], keys[:1])
    yield Assignment("trainer.validate_every", max(v[keys[1]], 0), keys[1:2])
    yield Assignment("trainer.validation_n", v[keys[2]], keys[2:3], "and a greedy response")
    if v.is_given(keys[3]) and v[keys[3]] != v["rollout.temperature"]:
        why = "validations sample at the training temperature, and once greedily"
        yield Refusal(keys[3], v[keys[3]], why, f"eval.temperature={v['rollout.temperature']:g}")
    yield Remark(keys[3:], "validations sample at the training temperature, and once greedily")


def _lengths(v: PeerSettings) -> Iterator[Converted]:
    both, prompt, response = _LENGTHS
    if v[prompt] is not None or v.written.get(response) == _OLD_RESPONSE:
        yield Assignment("data.max_prompt_tokens", v[prompt] or 1024, (prompt,))
        yield Assignment("rollout.max_response_tokens", v[response] or 1024, (response,))
        yield Remark((both,), "prompt_max_len and generate_max_len bound the lengths")
        return
    total = v[both]
    if v[response] is not None and v[response] >= total:
        raise ConfigError(f"{response}={v[response]} must be less than {both}={total}, which counts the prompt, too")
    note = "" if v[response] is not None else f"half of {both}; OpenRLHF gives a response what its prompt leaves"
    longest = v[response] if v[response] is not None else total // 2
    yield Assignment("rollout.max_response_tokens", longest, (response, both), note)
    yield Assignment("data.max_prompt_tokens", total - longest, (both,), "what the response leaves")


def _batches(v: PeerSettings) -> Iterator[Converted]:
    n, step, update = v[_N], v[_STEP], v[_UPDATE]
    if n < 2:
        raise ConfigError(f"{_N}={n}: a group needs at least 2 responses; use {_N}=8")
    if update % n:
        nearest = max(1, round(update / n)) * n
        raise ConfigError(
            f"{_UPDATE}={update} counts responses, and must be whole groups of {_N}={n} here; use {_UPDATE}={nearest}"
        )
    prompts = update // n
    if step % prompts:
        raise ConfigError(
            f"{_STEP}={step} prompts must be a multiple of {_UPDATE}={update} responses, {prompts} prompts; use "
            f"{_UPDATE}={step * n} for one update per step"
        )
    yield Assignment("rollout.n", n, (_N,))
    yield Assignment("trainer.prompts_per_step", step, (_STEP,))
    yield Assignment("trainer.prompts_per_update", None if prompts == step else prompts, (_UPDATE, _N))
    yield Remark((_UPDATE,), f"{update} responses are the {step} prompts of a step")
    micro, dynamic, budget = "train.micro_batch_size", "train.dynamic_batch_enable", "train.max_tokens_per_gpu"
    longest = v[_LENGTHS[1]] + (v[_LENGTHS[2]] or 1024) if v[_LENGTHS[1]] else v[_LENGTHS[0]]
    if v[dynamic]:
        share = -(-longest // v["ds.ring_attn_size"])
        note = "" if share <= v[budget] else f"{share} tokens of the longest sequence are on a rank"
        yield Assignment("trainer.tokens_per_micro_batch", max(share, v[budget]), (budget, dynamic), note)
    elif v.is_given(micro):
        note = f"{v[micro]} sequences of {longest} tokens"
        yield Assignment("trainer.tokens_per_micro_batch", v[micro] * longest, (micro,), note)
    yield Remark((micro, dynamic, budget), "micro-batches are cut by tokens")


def _advantage(v: PeerSettings) -> Iterator[Converted]:
    name, std = v[_ESTIMATOR], "algo.advantage.no_std_norm"
    here = value_here(v, _ESTIMATOR)
    if not here:
        default = "" if v.is_given(_ESTIMATOR) else ", and is OpenRLHF's default"
        yield Refusal(_ESTIMATOR, name, f"it needs a critic{default}", f"{_ESTIMATOR}=group_norm")
        return
    yield Assignment("algorithm.advantage.name", here, (_ESTIMATOR,))
    if here == "grpo":
        yield Assignment("algorithm.advantage.std", "none" if name == "dr_grpo" else "group", (_ESTIMATOR,))
        yield Assignment("algorithm.advantage.eps", _EPS, (), "OpenRLHF adds 1e-9 to the standard deviation")
    elif v[std] and here.startswith("reinforce"):
        yield Refusal(std, True, "the whitening divides by the standard deviation", f"{_ESTIMATOR}=dr_grpo")
    yield Remark((std,), "as here" if here.startswith("reinforce") else f"without effect beside {name}, as in OpenRLHF")


def _loss(v: PeerSettings) -> Iterator[Converted]:
    both, bounds, mode = "actor.eps_clip", "actor.eps_clip_low_high", "actor.loss_agg_mode"
    yield Assignment("algorithm.loss.name", value_here(v, _LOSS), (_LOSS,))
    low, high = _pair(v, bounds) if v[bounds] is not None else (v[both], v[both])
    origin = (bounds,) if v[bounds] is not None else (both,)
    yield lower_clip(low, origin)
    yield Assignment("algorithm.loss.clip_high", high, origin)
    yield Remark((both,), f"without effect beside {bounds}")
    yield Assignment("algorithm.loss.dual_clip", v["actor.dual_clip"], ("actor.dual_clip",))
    implied = "token-mean" if v[_LOSS] == "ppo" else "seq-mean-token-mean"
    yield Assignment("algorithm.aggregation.name", v[mode] or implied, (mode,) if v[mode] else (_LOSS,))


def _pair(v: PeerSettings, key: str) -> tuple[float, float]:
    value = v[key]
    if not isinstance(value, list) or len(value) != 2:
        raise ConfigError(f"{key}={value} must be two numbers, as in OpenRLHF: {key} 0.2 0.28")
    return float(value[0]), float(value[1])


def _kl(v: PeerSettings) -> Iterator[Converted]:
    in_loss, coef, kind = "algo.kl.use_loss", "algo.kl.init_coef", "algo.kl.estimator"
    if not v[coef]:
        yield Assignment("algorithm.kl.coef", 0.0, (coef,))
        yield Remark((in_loss, kind), f"without effect beside {coef}=0")
        return
    if not v[in_loss]:
        why = "each token's advantage has the KL of the later tokens, after the normalization"
        yield Refusal(in_loss, False, why, f"{in_loss} with {kind}=k2, or {coef}=0")
        yield Remark((coef, kind), f"left out with {in_loss}")
        return
    yield Assignment("algorithm.kl.coef", v[coef], (coef, in_loss))
    note = "in a loss its gradient has mean 0; k2 has that of the KL" if v[kind] == "k1" else ""
    yield Assignment("algorithm.kl.estimator", v[kind], (kind,), note)


def _correction(v: PeerSettings) -> Iterator[Converted]:
    on, kind, bounds = (f"algo.advantage.is_correction_{each}" for each in ("enable", "type", "threshold"))
    if not v[on]:
        yield Assignment("algorithm.correction.name", "none", (on,))
        yield Remark((kind, bounds), f"without effect beside {on}=False")
        return
    here = value_here(v, kind)
    if v[_LOSS] == "gspo":
        why = "gspo has then the ratio to the engine's log-probs instead of a weight"
        yield Refusal(on, True, why, f"{on}=False, or algorithm.correction here")
        return
    if not here:
        why = "rows are masked by one statistic, and weighted by another"
        yield Refusal(kind, v[kind], why, f"{kind}=icepop, or algorithm.correction.name=geometric_mask here")
        return
    low, high = _pair(v, bounds)
    yield Assignment("algorithm.correction.name", here, (kind, on))
    yield Assignment("algorithm.correction.low", low, (bounds,))
    yield Assignment("algorithm.correction.high", high, (bounds,))


def _filter(v: PeerSettings) -> Iterator[Converted]:
    on, bounds = "algo.dynamic_filtering_enable", "algo.dynamic_filtering_range"
    yield Assignment("algorithm.filter_groups.enable", v[on], (on,))
    if v[on]:
        low, high = _pair(v, bounds)
        yield Assignment("algorithm.filter_groups.mean_above", low, (bounds,))
        yield Assignment("algorithm.filter_groups.mean_below", high, (bounds,))
    yield Remark((bounds,), f"without effect beside {on}=False")


def _rewards(v: PeerSettings) -> Iterator[Converted]:
    model, remote = "reward.model_name_or_path", "reward.remote_url"
    buffer, factor = "reward.overlong_buffer_len", "reward.overlong_penalty_factor"
    functions: list[dict[str, Any]] = []
    if v.is_given(remote):
        why = "a function gets other arguments there: queries, prompts and labels"
        instead = "reward.functions=[FILE.py:function] with the signature of docs/rewards.md"
        if known(v[remote]).startswith("http"):
            why, instead = "a service gets another request there", "reward.functions=[{name: http, kwargs: {url: ...}}]"
        yield Refusal(remote, v[remote], why, instead)
    elif v.is_given(model):
        functions.append({"name": "reward_model", "kwargs": {"path": v[model]}})
    yield Remark((model,), f"without effect beside {remote}")
    if v[buffer]:
        penalty = {"buffer": int(v[buffer]), "factor": v[factor], "floor": True}
        functions.append({"name": "length", "kwargs": penalty})
    yield Remark((factor,), f"without effect beside {buffer}=None")
    if functions:
        yield Assignment("reward.functions", functions, (model, *((buffer, factor) if v[buffer] else ())))


def _optimizer(v: PeerSettings) -> Iterator[Converted]:
    kind, schedule, least, share = "actor.optim", "actor.lr_scheduler", "actor.min_lr_ratio", "actor.lr_warmup_ratio"
    if not value_here(v, kind):
        yield Refusal(kind, v[kind], "it has two learning rates there", "actor.optim=adam, or optim.name=muon here")
    else:
        yield Assignment("optim.name", value_here(v, kind), (kind,))
    yield Assignment("optim.schedule", value_here(v, schedule), (schedule,))
    ends = v[schedule] == "cosine_with_min_lr"
    yield Assignment("optim.min_lr_ratio", v[least] if ends else 0.0, (least, schedule) if ends else (schedule,))
    yield Remark((least,), f"without effect beside {schedule}={v[schedule]}")
    if v[schedule] == "constant":
        yield Remark((share,), f"without effect beside {schedule}=constant, as in OpenRLHF")
    else:
        yield Assignment("optim.warmup_ratio", v[share], (share,))


def _engine(v: PeerSettings) -> Iterator[Converted]:
    together, count, parallel = "train.colocate_all", "vllm.num_engines", "vllm.tensor_parallel_size"
    share, sleeps, eager = "vllm.gpu_memory_utilization", "vllm.enable_sleep", "vllm.enforce_eager"
    if v[count] == 0:
        yield Assignment("rollout.engine", "local", (count,))
        yield Remark((together, parallel, share, sleeps, eager), f"without effect beside {count}=0")
        return
    yield Assignment("rollout.engine", "vllm" if v[together] else "vllm_server", (together, count))
    yield Assignment("rollout.tensor_parallel_size", v[parallel], (parallel,))
    if v.is_given(share):
        yield Assignment("rollout.gpu_memory_utilization", v[share], (share,))
    if v[eager]:
        yield Assignment("rollout.enforce_eager", True, (eager,))
    if v[together]:
        yield Assignment("rollout.sleep_mode", "auto" if v[sleeps] else "never", (sleeps,))
    yield Remark((sleeps, eager), "as here")


def _training(v: PeerSettings) -> Iterator[Converted]:
    stage, offload = "ds.zero_stage", "ds.adam_offload"
    sequence, tensor, dtype, attention = (
        "ds.ring_attn_size",
        "ds.tensor_parallel_size",
        "ds.param_dtype",
        "ds.attn_implementation",
    )
    yield Assignment("trainer.sequence_parallel_size", v[sequence], (sequence,))
    yield Assignment("trainer.tensor_parallel_size", v[tensor], (tensor,))
    if max(v[sequence], v[tensor]) > 1:
        yield Assignment("trainer.strategy", "fsdp2", (sequence, tensor), "which spreads sequences and tensors")
        yield Assignment("trainer.offload", "optimizer" if v[offload] else "none", (offload,))
        yield Remark((stage,), "fsdp2 shards all")
    elif v[stage] == 0:
        yield Assignment("trainer.strategy", "ddp", (stage,))
        yield Assignment("trainer.offload", "optimizer" if v[offload] else "none", (offload,))
    else:
        yield Assignment("trainer.strategy", "deepspeed", (stage,))
        yield Assignment("trainer.deepspeed.stage", v[stage], (stage,))
        yield Assignment("trainer.deepspeed.offload_optimizer", v[offload], (offload,))
    if value_here(v, dtype):
        yield Assignment("model.dtype", value_here(v, dtype), (dtype,))
    else:
        yield Refusal(dtype, v[dtype], "float16 is not trained in", f"{dtype}=bf16")
    if known(v[attention]) in attention_choices():
        yield Assignment("model.attention", known(v[attention]), (attention,))
    elif v[attention] is not None:
        yield Refusal(attention, v[attention], "it is not one of those here", ", ".join(attention_choices()))
    yield Launch(DEVICES, *map(v.count, DEVICES))


def _adapters(v: PeerSettings) -> Iterator[Converted]:
    rank, alpha, dropout, targets = (f"ds.lora.{each}" for each in ("rank", "alpha", "dropout", "target_modules"))
    yield Assignment("model.lora.rank", v[rank], (rank,))
    if v[rank]:
        listed = v[targets] if isinstance(v[targets], list) else v[targets].split(",")
        yield Assignment("model.lora.alpha", v[alpha], (alpha,))
        yield Assignment("model.lora.dropout", v[dropout], (dropout,))
        yield Assignment("model.lora.target_modules", listed, (targets,))
    yield Remark((alpha, dropout, targets), f"without effect beside {rank}=0")
    four = "ds.load_in_4bit"
    if v[four] and not v[rank]:
        yield Refusal(four, True, "quantized weights are frozen, and there are no adapters", f"{rank}=16")
    else:
        yield Assignment("model.quantize", "nf4" if v[four] else "none", (four,))


def _run(v: PeerSettings) -> Iterator[Converted]:
    saves, wandb, board = "ckpt.save_steps", "logger.wandb.key", "logger.tensorboard_dir"
    yield Assignment("trainer.save_every", max(v[saves], 0), (saves,))
    listed = ["jsonl", *(["wandb"] if v[wandb] else []), *(["tensorboard"] if v[board] else [])]
    yield Assignment("observe.loggers", listed, (wandb, board))
    for key, here in (("logger.wandb.project", "observe.project"), ("logger.wandb.run_name", "observe.run_name")):
        if v.is_given(key) and v[wandb]:
            yield Assignment(here, v[key], (key,))
        yield Remark((key,), "no service has the run")


CONVERSIONS: tuple[Conversion, ...] = (
    *(_data, _lengths, _batches, _advantage, _loss, _kl, _correction, _filter, _rewards),
    *(_optimizer, _engine, _training, _adapters, _run),
)
