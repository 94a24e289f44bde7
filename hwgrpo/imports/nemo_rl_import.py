"""Settings of a NeMo-RL run -> settings here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hwgrpo.errors import ConfigError
from hwgrpo.imports.conversion import Assignment, Converted, Launch, Refusal, Remark, lower_clip
from hwgrpo.imports.import_result import Imported
from hwgrpo.imports.peer_import import Conversion, import_peer
from hwgrpo.imports.peer_settings import PeerSettings, value_here

_N, _STEP, _UPDATE = "grpo.num_generations_per_prompt", "grpo.num_prompts_per_step", "policy.train_global_batch_size"
_TOTAL = "policy.max_total_sequence_length"
_PROMPT, _RESPONSE = "data.max_input_seq_length", "policy.generation.max_new_tokens"
_NO_LIMIT = 1_000_000
_ENVIRONMENTS = {"math": "math"}
"""NeMo-RL's environments -> the rewards here."""
_DTENSOR, _MEGATRON = "policy.dtensor_cfg.", "policy.megatron_cfg."
_MEGATRON_OPTIMIZER = tuple(
    f"{_MEGATRON}optimizer.{each}"
    for each in ("optimizer", "lr", "weight_decay", "adam_beta1", "adam_beta2", "adam_eps")
)
_MEGATRON_SCHEDULER = (_MEGATRON + "scheduler.lr_decay_style", _MEGATRON + "scheduler.lr_warmup_iters")


def import_nemo_rl(v: PeerSettings) -> Imported:
    """Return the recipe of a NeMo-RL run.

    Raises:
        ConfigError: batch sizes without a counterpart.
    """
    return import_peer(v, CONVERSIONS)


def _data(v: PeerSettings) -> Iterator[Converted]:
    name, train, validation = "data.dataset_name", "data.train_data_path", "data.val_data_path"
    if v.is_given(train):
        yield Assignment("data.train", v[train], (train,))
    elif v.is_given(name) and v[name] != "ResponseDataset":
        yield Refusal(name, v[name], "NeMo-RL prepares it by code of its own", f"{train}, or data.train=FILE here")
    yield Remark((name,), f"rows of {train}, as they are")
    if v.is_given(validation):
        yield Assignment("data.validation", v[validation], (validation,))
    for key, here in (("data.train_split", "data.split"), ("data.val_split", "data.validation_split")):
        if v.is_given(key):
            yield Assignment(here, v[key], (key,))


def _longest_prompt(v: PeerSettings) -> int:
    return v[_PROMPT] if v.is_given(_PROMPT) else v[_TOTAL]


def _lengths(v: PeerSettings) -> Iterator[Converted]:
    origin, longest = (_RESPONSE, v[_RESPONSE]) if v[_RESPONSE] is not None else (_TOTAL, v[_TOTAL])
    note = f"prompt and response together have up to {v[_TOTAL]} there" if longest >= v[_TOTAL] else ""
    yield Assignment("rollout.max_response_tokens", longest, (origin,), note)
    yield Assignment("data.max_prompt_tokens", _longest_prompt(v), (_PROMPT, _TOTAL))
    yield Remark((_TOTAL,), "prompt and response have a limit each here")
    steps = "grpo.max_num_steps"
    if v[steps] < _NO_LIMIT:
        yield Assignment("trainer.max_steps", v[steps], (steps,), "also beyond grpo.max_num_epochs")
    yield Remark((steps,), "grpo.max_num_epochs ends the run")


def _batches(v: PeerSettings) -> Iterator[Converted]:
    n, step, update = v[_N], v[_STEP], v[_UPDATE]
    if update % n or (step * n) % update:
        raise ConfigError(
            f"{_UPDATE}={update} counts responses, and must be whole groups of {_N}={n} that divide the {step * n} of "
            f"a step; use {_UPDATE}={step * n} for one update per step"
        )
    yield Assignment("rollout.n", n, (_N,))
    yield Assignment("trainer.prompts_per_update", None if update == step * n else update // n, (_UPDATE, _N))
    yield Remark((_UPDATE,), f"{update} responses are the {step} prompts of a step")
    micro = "policy.train_micro_batch_size"
    if v.is_given(micro):
        longest = _longest_prompt(v) + (v[_RESPONSE] or v[_TOTAL])
        note = f"{v[micro]} sequences of up to {longest} tokens, {v[_TOTAL]} there"
        yield Assignment("trainer.tokens_per_micro_batch", v[micro] * longest, (micro,), note)


def _advantage(v: PeerSettings) -> Iterator[Converted]:
    name, scales, leaves = "grpo.adv_estimator.name", "grpo.normalize_rewards", "grpo.use_leave_one_out_baseline"
    here, centred = value_here(v, name), "grpo.adv_estimator.minus_baseline"
    if not here:
        yield Refusal(name, v[name], "its rewards are those of NeMo-RL's environments", "grpo")
    elif here != "grpo":
        yield Assignment("algorithm.advantage.name", here if v[centred] else "reinforce_plus_plus", (name, centred))
    elif v[leaves] and v[scales]:
        default = "" if v.is_given(leaves) else ", and is NeMo-RL's default"
        why = f"the standard deviation without the response itself has no counterpart{default}"
        yield Refusal(leaves, True, why, f"{leaves}=false; or {scales}=false, which is rloo")
    else:
        yield Assignment("algorithm.advantage.name", "rloo" if v[leaves] else "grpo", (leaves, name))
        if not v[leaves]:
            yield Assignment("algorithm.advantage.std", "group" if v[scales] else "none", (scales,))
    yield Remark((name, scales, leaves), "as here")
    yield Remark((centred,), f"without effect beside {name}={v[name]}")
    on, rounds = "grpo.use_dynamic_sampling", "grpo.dynamic_sampling_max_gen_batches"
    yield Assignment("algorithm.filter_groups.enable", v[on], (on,))
    if v[on]:
        yield Assignment("algorithm.filter_groups.max_rounds", v[rounds], (rounds,))
    yield Remark((rounds,), f"without effect beside {on}=false")


def _loss(v: PeerSettings) -> Iterator[Converted]:
    sequence, cispo, tokens = (
        f"loss_fn.{each}" for each in ("sequence_level_importance_ratios", "use_cispo", "token_level_loss")
    )
    low, high, dual = (f"loss_fn.ratio_clip_{each}" for each in ("min", "max", "c"))
    if v[sequence] and v[cispo]:
        yield Refusal(cispo, True, "cispo has the ratio of a token", f"{sequence}=false")
    if (v[sequence] and v[tokens]) or (v[cispo] and not v[tokens]):
        wanted = "false" if v[sequence] else "true"
        raise ConfigError(f"{tokens} must be {wanted} beside {sequence if v[sequence] else cispo}=true, as in NeMo-RL")
    forces, one = "loss_fn.force_on_policy_ratio", v[_STEP] * v[_N] == v[_UPDATE]
    if v[forces] and not one:
        why = "the ratio is always that of policy and old policy"
        yield Refusal(forces, True, why, f"{_UPDATE}={v[_STEP] * v[_N]}, one update per step, where it is 1")
    yield Remark((forces,), "the ratio is 1 in the one update of a step")
    name = "gspo" if v[sequence] else "cispo" if v[cispo] else "ppo_clip"
    yield Assignment("algorithm.loss.name", name, (sequence, cispo))
    yield lower_clip(v[low], (low,))
    yield Assignment("algorithm.loss.clip_high", v[high], (high,))
    yield Assignment("algorithm.loss.dual_clip", v[dual], (dual,))
    yield Assignment("algorithm.aggregation.name", "token-mean" if v[tokens] else "seq-mean-token-mean", (tokens,))
    coef, kind = "loss_fn.reference_policy_kl_penalty", "loss_fn.reference_policy_kl_type"
    yield Assignment("algorithm.kl.coef", v[coef], (coef,))
    clamps = {"input": "loss_fn.kl_input_clamp_value", "output": "loss_fn.kl_output_clamp_value"}
    if v[coef] and v[kind] != "k3" and one:
        yield Assignment("algorithm.kl.estimator", v[kind], (kind,), "times the ratio, which has its gradient there")
        yield Assignment("algorithm.kl.times_ratio", True, (kind,))
    elif v[coef] and v[kind] == "k2":
        why = "its gradient has a term for the sampling there, too"
        yield Refusal(kind, "k2", why, f"k3, or {_UPDATE}={v[_STEP] * v[_N]}, one update per step")
    elif v[coef]:
        note = "" if v[kind] == "k3" else "there the gradient has a further term, of mean 0"
        yield Assignment("algorithm.kl.estimator", value_here(v, kind), (kind,), note)
        for side, key in clamps.items():
            if v[kind] == "k3":
                yield Assignment(f"algorithm.kl.{side}_clamp", v[key], (key,), "here it leaves the gradient as it is")
    yield Remark((kind, *clamps.values()), f"without effect beside {coef}=0" if not v[coef] else "k3 alone is clamped")


def _correction(v: PeerSettings) -> Iterator[Converted]:
    on = "loss_fn.use_importance_sampling_correction"
    high, low, kind = (f"loss_fn.truncated_importance_sampling_{each}" for each in ("ratio", "ratio_min", "type"))
    sequence = "loss_fn.sequence_level_importance_ratios"
    if not v[on]:
        yield Assignment("algorithm.correction.name", "none", (on,))
        yield Remark((high, low, kind), f"without effect beside {on}=false")
    elif v[high] is None:
        yield Refusal(on, True, "weights have an upper bound", f"{high}=2.0")
        yield Remark((low, kind), f"without effect beside {high}=null")
    elif not value_here(v, kind):
        why = "rows are masked by one statistic, and weighted by another"
        yield Refusal(kind, v[kind], why, "icepop, or algorithm.correction.name=geometric_mask here")
    elif v[kind] == "icepop" and v[low] is None:
        raise ConfigError(f"{low} must be given beside {kind}=icepop, as in NeMo-RL")
    else:
        name = value_here(v, kind)
        whole = v[sequence]  # the weight is then that of all tokens of a response
        yield Assignment("algorithm.correction.name", name.replace("token", "sequence") if whole else name, (kind, on))
        yield Assignment("algorithm.correction.high", v[high], (high,))
        if v[low]:
            yield Assignment("algorithm.correction.low", v[low], (low,))
        yield Remark((low,), "no lower bound")


def _optimizer(v: PeerSettings) -> Iterator[Converted]:
    key, updates = "policy.scheduler", max(1, v[_STEP] * v[_N] // v[_UPDATE])
    if v[_MEGATRON + "enabled"]:
        yield from _megatron_optimizer(v, updates)
        names = ("name", *(f"kwargs.{each}" for each in ("lr", "weight_decay", "betas", "eps")))
        without = (key, *(f"policy.optimizer.{each}" for each in names))
        yield Remark(without, f"without effect beside {_MEGATRON}enabled=true")
        return
    yield Remark((*_MEGATRON_OPTIMIZER, *_MEGATRON_SCHEDULER), f"without effect beside {_MEGATRON}enabled=false")
    yield Assignment("optim.name", value_here(v, "policy.optimizer.name"), ("policy.optimizer.name",))
    if not v.is_given(key):
        warmup, start = 50, 0.1  # as in grpo_math_1B.yaml
    else:
        parts = [each for each in v[key] if isinstance(each, Mapping)]
        names = [str(each["name"]).rpartition(".")[2] for each in parts if "name" in each]
        if names not in (["LinearLR", "ConstantLR"], ["ConstantLR"]):
            yield Refusal(key, v[key], "schedules are constant, linear or cosine after a warm-up", "optim.schedule")
            return
        kwargs: Mapping[str, Any] = parts[0].get("kwargs", {})
        warmup = int(kwargs.get("total_iters", 5)) if names[0] == "LinearLR" else 0
        start = float(kwargs.get("start_factor", 1 / 3))
    note = f"{warmup} steps; it begins at 0, in NeMo-RL at {start:g} of the learning rate" if warmup else ""
    yield Assignment("optim.schedule", "constant", (key,))
    yield Assignment("optim.warmup_steps", warmup * updates, (key,), note)


def _megatron_optimizer(v: PeerSettings, updates: int) -> Iterator[Converted]:
    name, rate, decay, *betas, eps = _MEGATRON_OPTIMIZER
    style, warmup = _MEGATRON_SCHEDULER
    if value_here(v, name):
        yield Assignment("optim.name", value_here(v, name), (name,))
    else:
        yield Refusal(name, v[name], "optimizers here are those of optim.name", "adam")
    yield Assignment("optim.lr", v[rate], (rate,))
    yield Assignment("optim.weight_decay", v[decay], (decay,))
    yield Assignment("optim.betas", [v[each] for each in betas], tuple(betas))
    yield Assignment("optim.eps", v[eps], (eps,))
    if value_here(v, style):
        yield Assignment("optim.schedule", value_here(v, style), (style,))
    else:
        yield Refusal(style, v[style], "it ends after lr_decay_iters there, here with the run", "constant")
    note = f"{v[warmup]} steps; it begins at 0" if v[warmup] else ""
    yield Assignment("optim.warmup_steps", v[warmup] * updates, (warmup,), note)


def _engine(v: PeerSettings) -> Iterator[Converted]:
    key, together = "policy.generation.backend", "policy.generation.colocated.enabled"
    own = tuple(
        f"policy.generation.vllm_cfg.{each}"
        for each in ("tensor_parallel_size", "gpu_memory_utilization", "enforce_eager")
    )
    here = value_here(v, key)
    if not here:
        yield Refusal(key, v[key], "this engine is not supported", "vllm or sglang")
        return
    if here == "vllm" and not v[together]:
        here = "vllm_server"
    yield Assignment("rollout.engine", here, (key, together))
    if here in ("vllm", "vllm_server"):
        yield Assignment("rollout.tensor_parallel_size", v[own[0]], own[:1])
        yield Assignment("rollout.gpu_memory_utilization", v[own[1]], own[1:2])
        if v[own[2]]:
            yield Assignment("rollout.enforce_eager", True, own[2:])
    yield Remark(own, "as here" if here != "local" else f"without effect beside {key}={v[key]}")


def _training(v: PeerSettings) -> Iterator[Converted]:
    megatron = v[_MEGATRON + "enabled"]
    used, other = (_MEGATRON, _DTENSOR) if megatron else (_DTENSOR, _MEGATRON)
    tensor = {_DTENSOR: "tensor_parallel_size", _MEGATRON: "tensor_model_parallel_size"}
    for here, keys in (
        ("trainer.tensor_parallel_size", tensor),
        ("trainer.sequence_parallel_size", dict.fromkeys(tensor, "context_parallel_size")),
        ("model.gradient_checkpointing", dict.fromkeys(tensor, "activation_checkpointing")),
    ):
        yield Assignment(here, v[used + keys[used]], (used + keys[used],))
        yield Remark((other + keys[other],), f"without effect beside {used}enabled=true")
    offload, nodes, per_node = _DTENSOR + "cpu_offload", "cluster.num_nodes", "cluster.gpus_per_node"
    launch = Launch((per_node, nodes), v.count(per_node), v.count(nodes))
    origins = (_DTENSOR + "enabled", _MEGATRON + "enabled")
    if launch.processes != 1 or v[offload]:
        yield Assignment(
            "trainer.strategy", "fsdp2", origins, "trained by fsdp2 instead of Megatron" if megatron else ""
        )
    yield Remark(origins, "one device: there is nothing to shard")
    yield Assignment("trainer.fsdp2.offload", v[offload] and not megatron, (offload,))
    yield launch
    if value_here(v, "policy.precision"):
        yield Assignment("model.dtype", value_here(v, "policy.precision"), ("policy.precision",))
    else:
        yield Refusal("policy.precision", v["policy.precision"], "float16 is not trained in", "bfloat16")


def _adapters(v: PeerSettings) -> Iterator[Converted]:
    names = ("enabled", "dim", "alpha", "dropout", "target_modules")
    megatron, whole = v[_MEGATRON + "enabled"], _DTENSOR + "lora_cfg.match_all_linear"
    both = (_DTENSOR + "lora_cfg.", _MEGATRON + "peft.")
    prefix, other = reversed(both) if megatron else both
    on, *keys = (prefix + each for each in names)
    rank, alpha, dropout, targets = keys
    yield Remark(tuple(other + each for each in names), f"without effect beside {_MEGATRON}enabled={megatron}")
    yield Assignment("model.lora.rank", v[rank] if v[on] else 0, (on, rank) if v[on] else (on,))
    if v[on]:
        yield Assignment("model.lora.alpha", v[alpha], (alpha,))
        yield Assignment("model.lora.dropout", v[dropout], (dropout,))
        listed = None if v[whole] and not megatron else v[targets]
        if megatron and listed:
            why = "they are names of Megatron's layers"
            yield Refusal(targets, listed, why, "[], all linear layers; or model.lora.target_modules here")
        else:
            origin = (whole, targets) if not megatron and not listed else (targets,)
            yield Assignment("model.lora.target_modules", listed or ["all-linear"], origin)
    yield Remark((*keys, whole), f"without effect beside {on}=false")


def _run(v: PeerSettings) -> Iterator[Converted]:
    on, period, keep = (f"checkpointing.{each}" for each in ("enabled", "save_period", "keep_top_k"))
    yield Assignment("trainer.save_every", v[period] if v[on] else 0, (period, on), "" if v[on] else "one at the end")
    if v[keep] is not None:
        yield Assignment("trainer.keep_checkpoints", v[keep], (keep,), "the newest ones, not the best")
    names = ("wandb", "tensorboard", "swanlab")
    listed = ["jsonl", *(name for name in names if v[f"logger.{name}_enabled"])]
    yield Assignment("observe.loggers", listed, tuple(f"logger.{name}_enabled" for name in names))
    for key, here in (("logger.wandb.project", "observe.project"), ("logger.wandb.name", "observe.run_name")):
        if v.is_given(key) and v["logger.wandb_enabled"]:
            yield Assignment(here, v[key], (key,))
        yield Remark((key,), "no service has the run")


def _rewards(v: PeerSettings) -> Iterator[Converted]:
    keys = [key for key in v.given if key.startswith("env.")]
    names = dict.fromkeys(key.split(".")[1] for key in keys)
    for name in names:
        if name not in _ENVIRONMENTS:
            first = next(key for key in keys if key.split(".")[1] == name)
            yield Refusal(first, v[first], f"the environment {name} has no counterpart", "reward.functions")
    functions = [{"name": _ENVIRONMENTS[name]} for name in names if name in _ENVIRONMENTS]
    if functions:
        yield Assignment("reward.functions", functions, tuple(keys), "its workers are reward.functions' own")


CONVERSIONS: tuple[Conversion, ...] = (
    *(_data, _lengths, _batches, _advantage, _loss, _correction, _optimizer),
    *(_engine, _training, _adapters, _run, _rewards),
)
