"""A recipe as overrides of `python3 -m verl.trainer.main_ppo`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hwgrpo.catalog import TASK_SCHEMES
from hwgrpo.config import Config
from hwgrpo.exports.peer_export import Exported, choice, export_peer, synthetic
from hwgrpo.exports.variable_settings import with_variables
from hwgrpo.imports.import_result import Imported
from hwgrpo.imports.variable_text import known
from hwgrpo.imports.verl_algorithm import BY_SOURCE, KWARGS, NO_LIMIT
from hwgrpo.imports.verl_import import import_verl
from hwgrpo.imports.verl_settings import ACTOR, MODEL, ROLLOUT, verl_settings
from hwgrpo.peer_tables.verl_names import ROWS, VERL

_LOSS, _CORRECTION = ACTOR + "policy_loss.", "algorithm.rollout_correction."
_FUNCTION = "reward.custom_reward_function."
_OVERLONG = "reward.reward_kwargs.overlong_buffer_cfg."
_TOKENS = 16384
"""verl's default of ppo_max_token_len_per_gpu."""
_REASONS = {
    "data.validation": "verl reads a file always; nothing is validated",
    "trainer.tokens_per_micro_batch": "verl needs one",
    "trainer.tensor_parallel_size": "verl's FSDP has none",
    "optim.name": "verl gives all parameters to one optimizer",
    "optim.schedule": "verl's are constant and cosine",
    "model.lora.dropout": "verl's FSDP has none",
    "reward.functions": "verl scores a row by its data_source, or all by one function of a file",
    "rollout.skip_special_tokens": "verl's rewards see no special tokens",
    "rollout.engine": "verl's engines are vLLM and SGLang",
    "algorithm.loss.dual_clip": "verl always has one",
    "algorithm.advantage.eps": "verl adds 1e-6",
    "model.quantize": "verl's base model is not quantized",
    "algorithm.advantage.singleton": "verl's advantage of a group of one is its reward",
}


def export_verl(config: Config, devices: int = 8) -> Exported:
    """Return a recipe in verl's settings.

    Args:
        config: checked settings.
        devices: devices of a node in verl's run; 8 is verl's default.
    """
    config = with_variables(config)
    values = dict(_joint(config, devices))
    return export_peer(config, VERL, values, _import_again, _REASONS, synthetic(config, "verl"))


def _import_again(values: Mapping[str, Any]) -> Imported:
    return import_verl(verl_settings(values))


def _joint(config: Config, devices: int) -> Iterator[tuple[str, Any]]:
    """Yield the keys that are converted together, with values; defaults of verl are left out later."""
    yield "trainer.n_gpus_per_node", devices
    yield from _data(config)
    yield from _batches(config)
    yield from _adapters(config)
    yield from _algorithm(config)
    yield from _kl(config)
    yield from _correction(config)
    yield from _rewards(config)
    yield from _engine(config)
    yield from _run(config)


def _data(config: Config) -> Iterator[tuple[str, Any]]:
    d = config.data
    yield "data.train_files", d.train
    if d.validation is not None:
        yield "data.val_files", d.validation
    elif not str(known(d.train)).startswith(TASK_SCHEMES):
        yield "data.val_files", d.train
        yield "trainer.val_before_train", False
        yield "trainer.test_freq", -1
    if d.overlong == "filter":
        yield "data.filter_overlong_prompts", True
    else:
        yield from choice(ROWS, "data.truncation", d.overlong)
    yield "data.max_prompt_length", d.max_prompt_tokens
    yield "data.max_response_length", config.rollout.max_response_tokens
    yield from ((f"data.apply_chat_template_kwargs.{key}", value) for key, value in d.chat_template_kwargs.items())
    yield MODEL + "trust_remote_code", config.model.trust_remote_code


def _batches(config: Config) -> Iterator[tuple[str, Any]]:
    t, o = config.trainer, config.optim
    update = t.prompts_per_update or t.prompts_per_step
    updates = t.prompts_per_step // update * t.epochs_per_batch
    yield "data.train_batch_size", t.prompts_per_step
    yield ACTOR + "ppo_mini_batch_size", update
    yield ROLLOUT + "n", config.rollout.n
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    yield ACTOR + "use_dynamic_bsz", True
    yield ACTOR + "ppo_max_token_len_per_gpu", t.tokens_per_micro_batch or max(_TOKENS, longest)
    yield ACTOR + "grad_clip", o.grad_clip
    if o.warmup_steps and o.warmup_steps % updates == 0:
        yield ACTOR + "optim.lr_warmup_steps", o.warmup_steps // updates
    elif o.warmup_ratio:
        yield ACTOR + "optim.lr_warmup_steps_ratio", o.warmup_ratio
    yield ACTOR + "optim.min_lr_ratio", o.min_lr_ratio
    if o.name == "adamw_8bit":
        yield ACTOR + "optim.optimizer_impl", "bitsandbytes.optim"
    elif o.name == "muon":  # torch's takes matrices alone
        yield ACTOR + "optim.optimizer", "AdamW"


def _adapters(config: Config) -> Iterator[tuple[str, Any]]:
    adapter = config.model.lora
    if not (adapter.rank or adapter.adapter):
        return
    if not adapter.adapter:
        yield MODEL + "lora_rank", adapter.rank
        yield MODEL + "lora_alpha", int(adapter.alpha) if adapter.alpha == int(adapter.alpha) else adapter.alpha
    targets = [each.removeprefix("re:") for each in adapter.target_modules]
    is_one = len(targets) == 1 and (targets != adapter.target_modules or targets == ["all-linear"])
    yield MODEL + "target_modules", targets[0] if is_one else adapter.target_modules


def _algorithm(config: Config) -> Iterator[tuple[str, Any]]:
    a = config.algorithm
    yield "algorithm.adv_estimator", "grpo"  # verl's default needs a critic
    yield from choice(ROWS, "algorithm.adv_estimator", a.advantage.name)
    yield "algorithm.norm_adv_by_std_in_grpo", a.advantage.std != "none"
    yield from choice(ROWS, _LOSS + "loss_mode", a.loss.name)
    yield ACTOR + "clip_ratio_low", a.loss.clip_low
    yield ACTOR + "clip_ratio_high", a.loss.clip_high
    if a.loss.dual_clip is not None:
        yield ACTOR + "clip_ratio_c", a.loss.dual_clip
    for name, key in KWARGS.get(a.loss.name, {}).items():
        if name in a.loss.kwargs:
            yield key, a.loss.kwargs[name]
    yield from choice(ROWS, ACTOR + "loss_agg_mode", a.aggregation.name)
    if a.aggregation.norm_length is not None:
        yield ACTOR + "loss_scale_factor", a.aggregation.norm_length
    f, prefix = a.filter_groups, "algorithm.filter_groups."
    yield prefix + "enable", f.enable
    if f.enable:
        yield prefix + "metric", "seq_reward" if f.metric == "reward" else f.metric
        yield prefix + "max_num_gen_batches", 0 if f.max_rounds == NO_LIMIT else f.max_rounds


def _kl(config: Config) -> Iterator[tuple[str, Any]]:
    kl = config.algorithm.kl
    if not kl.coef:
        return
    if not kl.in_reward:
        yield ACTOR + "use_kl_loss", True
        yield ACTOR + "kl_loss_coef", kl.coef
        yield from choice(ROWS, ACTOR + "kl_loss_type", kl.estimator)
        return
    yield "algorithm.use_kl_in_reward", True
    yield from choice(ROWS, "algorithm.kl_penalty", kl.estimator)
    yield "algorithm.kl_ctrl.kl_coef", kl.coef
    if kl.target is not None:
        yield "algorithm.kl_ctrl.type", "adaptive"
        yield "algorithm.kl_ctrl.target_kl", kl.target
        yield "algorithm.kl_ctrl.horizon", kl.horizon


def _correction(config: Config) -> Iterator[tuple[str, Any]]:
    c = config.algorithm.correction
    yield _CORRECTION + "bypass_mode", config.algorithm.old_logprobs == "rollout"
    level, _, kind = c.name.partition("_")
    if kind in ("truncate", "mask") and c.high is not None and (kind == "mask") == (c.low is not None):
        yield _CORRECTION + "rollout_is", level
        yield _CORRECTION + "rollout_is_threshold", f"{c.low}_{c.high}" if c.low is not None else c.high
        yield _CORRECTION + "rollout_is_batch_normalize", c.normalize
    if c.reject:
        limits = ["_".join(map(str, limit)) if isinstance(limit, list) else str(limit) for limit in c.reject.values()]
        yield _CORRECTION + "rollout_rs", ",".join(c.reject)
        yield _CORRECTION + "rollout_rs_threshold", ",".join(limits)


def _rewards(config: Config) -> Iterator[tuple[str, Any]]:
    first, *others = config.reward.functions
    path, colon, name = first.name.rpartition(":")
    if colon:
        yield _FUNCTION + "path", path
        yield _FUNCTION + "name", name
        yield from ((f"{_FUNCTION}reward_kwargs.{key}", value) for key, value in first.kwargs.items())
    if len(others) == 1 and others[0].name == "length" and (colon or first.name == BY_SOURCE):
        penalty = others[0].kwargs
        yield "reward.reward_manager.name", "dapo"
        yield _OVERLONG + "enable", True
        for key, here in (("len", "buffer"), ("penalty_factor", "factor")):
            if here in penalty:
                yield _OVERLONG + key, penalty[here]
        if "max_response_tokens" in penalty:
            yield "reward.reward_kwargs.max_resp_len", penalty["max_response_tokens"]


def _engine(config: Config) -> Iterator[tuple[str, Any]]:
    r, t = config.rollout, config.trainer
    engine = "sglang" if r.engine == "sglang_server" else "vllm"
    yield ROLLOUT + "name", engine
    yield ROLLOUT + "tensor_model_parallel_size", r.tensor_parallel_size
    yield from ((f"{ROLLOUT}engine_kwargs.{engine}.{key}", value) for key, value in r.engine_kwargs.items())
    if r.max_model_len is not None:
        yield ROLLOUT + "max_model_len", r.max_model_len
    if t.strategy == "fsdp2":
        yield ACTOR + "strategy", "fsdp2"
    yield ACTOR + "ulysses_sequence_parallel_size", t.sequence_parallel_size
    yield ACTOR + "fsdp_config.offload_policy", t.fsdp2.offload
    yield ACTOR + "fsdp_config.optimizer_offload", t.offload == "optimizer"
    if config.model.dtype != "auto":
        yield from choice(ROWS, ACTOR + "fsdp_config.dtype", config.model.dtype)


def _run(config: Config) -> Iterator[tuple[str, Any]]:
    t, o = config.trainer, config.observe
    if t.max_steps:
        yield "trainer.total_epochs", t.max_steps  # verl stops at the earlier of both, and an epoch has a step or more
    if t.validation_n:
        own = t.validation_sampling
        yield ROLLOUT + "val_kwargs.n", t.validation_n
        yield ROLLOUT + "val_kwargs.do_sample", True
        for key in ("temperature", "top_p", "top_k"):
            value = getattr(own, key) if getattr(own, key) is not None else getattr(config.rollout, key)
            yield f"{ROLLOUT}val_kwargs.{key}", -1 if key == "top_k" and value == 0 else value
    yield "trainer.default_local_dir", t.output_dir
    if o.project is not None:
        yield "trainer.project_name", o.project
    if o.run_name is not None:
        yield "trainer.experiment_name", o.run_name
    if t.resume in ("auto", "never"):
        yield from choice(ROWS, "trainer.resume_mode", t.resume)
    else:
        yield "trainer.resume_mode", "resume_path"
        yield "trainer.resume_from_path", t.resume
    yield from choice(ROWS, "trainer.device", config.backend.name)
    yield "trainer.logger", ["console", *(each for each in o.loggers if each != "jsonl")]
