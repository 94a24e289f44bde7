"""A recipe as a YAML file for `trl grpo --config`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hwgrpo.config import Config
from hwgrpo.config.schema import RewardFunctionConfig
from hwgrpo.exports.peer_export import Exported, choice, export_peer, synthetic
from hwgrpo.exports.variable_settings import variable_keys, with_variables
from hwgrpo.imports.import_result import Imported
from hwgrpo.imports.trl_algorithm import REWARDS, SAPO, VESPO
from hwgrpo.imports.trl_batches import LOADERS
from hwgrpo.imports.trl_import import import_trl
from hwgrpo.imports.trl_reader import trl_settings
from hwgrpo.peer_tables.trl_mapped import LOSSES
from hwgrpo.peer_tables.trl_names import ROWS, TRL

_REASONS = {
    "data.validation": "trl grpo validates on a split of dataset_name",
    "data.max_prompt_tokens": "TRL has no limit of prompts",
    "data.overlong": "TRL has no limit of prompts",
    "reward.functions": "TRL names functions of modules; accuracy_reward is math",
    "rollout.skip_special_tokens": "TRL's rewards see no special tokens",
    "rollout.stop": "without vLLM TRL does not pass them on",
    "rollout.engine": "TRL's engines are transformers and vLLM",
    "model.dtype": "TRL has no auto",
    "algorithm.advantage.eps": "TRL adds 1e-4",
    "algorithm.loss.dual_clip": "TRL has none",
    "algorithm.loss.log_ratio_clamp": "TRL does not clamp it",
    "algorithm.kl.estimator": "TRL's is k3",
    "algorithm.kl.in_reward": "TRL's KL is in the loss",
    "trainer.strategy": "a launcher's: accelerate launch --config_file",
}


def export_trl(config: Config) -> Exported:
    """Return a recipe in TRL's settings, for one process."""
    config = with_variables(config)
    unread = dict.fromkeys(variable_keys(config), "TRL's file reads no variables: write the value there")
    return export_peer(config, TRL, dict(_joint(config)), _import_again, _REASONS, unread | synthetic(config, "TRL"))


def _import_again(values: Mapping[str, Any]) -> Imported:
    return import_trl(trl_settings(values, {}))


def _joint(config: Config) -> Iterator[tuple[str, Any]]:
    """Yield the keys that are converted together, with values; defaults of TRL are left out later."""
    yield from _model(config)
    yield from _data(config)
    yield from _batches(config)
    yield from _loss(config)
    yield from _algorithm(config)
    yield from _rewards(config)
    yield from _engine(config)
    yield from _run(config)


def _updates_per_step(config: Config) -> int:
    t = config.trainer
    return t.prompts_per_step // (t.prompts_per_update or t.prompts_per_step) * t.epochs_per_batch


def _model(config: Config) -> Iterator[tuple[str, Any]]:
    m, adapter = config.model, config.model.lora
    yield "model_name_or_path", m.path
    if m.revision is not None:
        yield "model_revision", m.revision
    if m.attention != "auto":
        yield "attn_implementation", m.attention
    if m.dtype == "float32":
        yield "bf16", False
    if not adapter.rank:
        return
    yield "use_peft", True
    yield "lora_r", adapter.rank
    yield "lora_alpha", int(adapter.alpha)
    yield "lora_dropout", adapter.dropout
    yield "lora_target_modules", adapter.target_modules
    yield "use_rslora", adapter.rslora
    yield "use_dora", adapter.dora
    if m.quantize in ("nf4", "int8"):
        yield {"nf4": "load_in_4bit", "int8": "load_in_8bit"}[m.quantize], True


def _data(config: Config) -> Iterator[tuple[str, Any]]:
    d, t = config.data, config.trainer
    files = [d.train] if isinstance(d.train, str) else d.train
    loaders = [LOADERS.get(each.rpartition(".")[2]) for each in files]
    if len(files) > 1 or loaders[0] is not None:
        yield (
            "datasets",
            [
                {"path": loader, "data_files": each, "split": d.split} if loader else {"path": each, "split": d.split}
                for each, loader in zip(files, loaders, strict=True)
            ],
        )
        return
    yield "dataset_name", d.train
    yield "dataset_train_split", d.split
    if d.validation == d.train:
        per_step = _updates_per_step(config)
        yield "dataset_test_split", d.validation_split
        yield "eval_strategy", "steps"
        yield "eval_steps", t.validate_every * per_step
        yield "eval_on_start", t.validate_at_start
        samples = max(1, t.validation_n)
        yield "num_generations_eval", samples
        yield "per_device_eval_batch_size", samples  # TRL's must be divisible by it


def _batches(config: Config) -> Iterator[tuple[str, Any]]:
    t, o, n, per_step = config.trainer, config.optim, config.rollout.n, _updates_per_step(config)
    yield "num_generations", n
    yield "per_device_train_batch_size", n
    yield "gradient_accumulation_steps", t.prompts_per_update or t.prompts_per_step
    if t.prompts_per_update not in (None, t.prompts_per_step):
        yield "steps_per_generation", t.prompts_per_step
    yield "num_iterations", t.epochs_per_batch
    if t.max_steps:
        yield "max_steps", t.max_steps * per_step
    else:
        yield "num_train_epochs", t.epochs
    warmup = o.warmup_steps or o.warmup_ratio
    yield "warmup_steps", warmup
    yield "adam_beta1", o.betas[0]
    yield "adam_beta2", o.betas[1]
    schedule = o.schedule
    if o.min_lr_ratio and schedule == "cosine":
        yield "lr_scheduler_kwargs", {"min_lr_rate": o.min_lr_ratio}
        schedule = "cosine_with_min_lr"
    elif warmup and schedule == "constant":
        schedule = "constant_with_warmup"
    yield "lr_scheduler_type", schedule


def _loss(config: Config) -> Iterator[tuple[str, Any]]:
    a = config.algorithm
    sequence = a.loss.name == "gspo"
    wanted = "ppo_clip" if sequence else a.loss.name, a.aggregation.name
    names = [name for name, pair in LOSSES.items() if pair == wanted]
    if not names:
        return
    kind = "dapo" if "dapo" in names else names[0]
    yield "loss_type", kind
    if sequence:
        yield "importance_sampling_level", "sequence"
    if kind == "cispo":
        yield "epsilon_high", round(1 + a.loss.clip_high, 12)
    elif kind not in ("sapo", "vespo"):
        yield "epsilon", a.loss.clip_low
        if a.loss.clip_high != a.loss.clip_low:
            yield "epsilon_high", a.loss.clip_high
    if kind == "sapo":
        yield from ((key, getattr(a.loss, here)) for here, key in SAPO.items())
    if kind == "vespo":
        yield from ((key, float(a.loss.kwargs[here])) for here, key in VESPO.items() if here in a.loss.kwargs)


def _algorithm(config: Config) -> Iterator[tuple[str, Any]]:
    a, kl, c = config.algorithm, config.algorithm.kl, config.algorithm.correction
    yield from choice(ROWS, "multi_objective_aggregation", a.advantage.name)
    if a.advantage.name != "gdpo":
        yield from choice(ROWS, "scale_rewards", a.advantage.std)
    if kl.coef and not kl.in_reward:
        yield "beta", kl.coef
        yield "use_bias_correction_kl", kl.times_ratio
        if kl.sync_every:
            yield "sync_ref_model", True
            yield "ref_model_sync_steps", kl.sync_every * _updates_per_step(config)
            yield "ref_model_mixup_alpha", kl.sync_share
    if a.entropy_target is not None:
        yield "use_adaptive_entropy", True
        yield "entropy_target", a.entropy_target
        for key in ("entropy_coef_delta", "entropy_coef_min", "entropy_coef_max"):
            yield key, getattr(a, key)
    if config.rollout.engine in ("vllm", "vllm_server"):
        yield "vllm_importance_sampling_correction", c.name != "none"
        if c.name != "none":
            yield from choice(ROWS, "vllm_importance_sampling_mode", c.name)
            yield "vllm_importance_sampling_clip_max", c.high
            if c.low is not None:
                yield "vllm_importance_sampling_clip_min", c.low


def _rewards(config: Config) -> Iterator[tuple[str, Any]]:
    functions = config.reward.functions
    names = [_reward_name(each) for each in functions]
    if functions and all(names):
        yield "reward_funcs", names
        if any(each.weight != 1 for each in functions):
            yield "reward_weights", [each.weight for each in functions]


def _reward_name(function: RewardFunctionConfig) -> str | None:
    """Return TRL's name of a reward function, `module.function` for one in a file; None where it has none."""
    file, _, name = function.name.partition(":")
    if file.endswith(".py") and name and not file.startswith(("/", "..", "~")):
        return f"{file.removesuffix('.py').removeprefix('./').replace('/', '.')}.{name}"
    return next(
        (
            there
            for there, here in REWARDS.items()
            if here["name"] == function.name and here.get("kwargs", {}) == function.kwargs
        ),
        None,
    )


def _engine(config: Config) -> Iterator[tuple[str, Any]]:
    r = config.rollout
    if r.engine not in ("vllm", "vllm_server"):
        return
    if r.stop:
        yield "generation_kwargs", {"stop": list(r.stop)}
    yield "use_vllm", True
    yield from choice(ROWS, "vllm_mode", r.engine)
    if r.max_model_len is not None:
        yield "vllm_max_model_length", r.max_model_len
    if r.engine == "vllm_server":
        if isinstance(r.server.url, str):
            yield "vllm_server_base_url", r.server.url
        yield "vllm_server_timeout", r.server.start_timeout
        return
    if r.gpu_memory_utilization is not None:
        yield "vllm_gpu_memory_utilization", r.gpu_memory_utilization
    yield "vllm_tensor_parallel_size", r.tensor_parallel_size
    yield "vllm_enable_sleep_mode", r.sleep_mode != "never"


def _run(config: Config) -> Iterator[tuple[str, Any]]:
    t, o, per_step = config.trainer, config.observe, _updates_per_step(config)
    if t.save_every:
        yield "save_steps", t.save_every * per_step
    else:
        yield "save_strategy", "no"
    yield "logging_steps", o.log_every * per_step
    loggers = [each for each in o.loggers if each != "jsonl"]
    if loggers:
        yield "report_to", loggers
    if o.run_name is not None:
        yield "run_name", o.run_name
    if o.project is not None:
        yield "project", o.project
    if t.resume != "never":
        yield "resume_from_checkpoint", True if t.resume == "auto" else t.resume
    if config.backend.name == "cpu":
        yield "use_cpu", True
    if t.strategy == "fsdp2":
        yield "fsdp", "full_shard" if t.fsdp2.reshard_after_forward else "shard_grad_op"
