"""Checks beyond the schema's types: limits of single values, files, and conflicting settings."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwgrpo.catalog import (
    ADVANTAGES_OF_SINGLE_RESPONSES,
    DATA_CHECK,
    ENGINES,
    LOGGERS,
    METRICS,
    PEER_NAMES,
    REWARDS,
    SERVICES,
    STAGES,
    STRATEGIES,
)
from hwgrpo.config.adapter_settings import refuse_dora
from hwgrpo.config.algorithm_rules import check_algorithm
from hwgrpo.config.derived import longest_share, prompts_per_update, ranks_per_sequence, sampling_of, sharing_setting
from hwgrpo.config.fields import Limits
from hwgrpo.config.named_files import verifier_of
from hwgrpo.config.rollout_rules import check_prefetching_ranks, check_rollout
from hwgrpo.config.schema import LARGEST_ERROR, ObserveConfig, Settings
from hwgrpo.config.shipped_files import preset_names
from hwgrpo.config.uses import check_used
from hwgrpo.errors import ConfigError, choice_error, nearest, quoted, shown
from hwgrpo.registry import import_target
from hwgrpo.support.given_objects import find_object, is_object
from hwgrpo.support.paths import check_path, did_you_mean, find_model
from hwgrpo.support.template_clock import read_date
from hwgrpo.user_code import FORM, names_a_file, split_name

if TYPE_CHECKING:
    pass


def check_config(
    config: Settings,
    *,
    data_may_be_missing: bool = False,
    files_may_be_missing: bool = False,
    imported: Collection[str] = (),
    unread: Sequence[str] = (),
) -> list[str]:
    """Check all limits and conflicts before anything is loaded.

    Args:
        config: the settings.
        data_may_be_missing: do not check that files with prompts and the packages of loggers are here; see
            `missing_loggers` and `hwgrpo.data.missing_data`.
        files_may_be_missing: nor that any other file is: the settings are those of another machine.
        imported: settings or sections not set by the user, which may be without effect.
        unread: sections and settings that may name missing plug-ins.

    Returns:
        A note for each setting of `imported` that has no effect.

    Raises:
        ConfigError: the first one, with key, value, allowed values and remedy.
    """
    _check_limits(config, "", unread)
    sampling_of(config)
    _check_names(config, unread)
    notes = check_used(config, imported)
    if not files_may_be_missing:
        _check_files(config)
    _check_sources(config)
    missing = [*(() if "observe" in unread else missing_loggers(config)), *import_target(DATA_CHECK)(config)]
    if missing and not data_may_be_missing:
        raise ConfigError(missing[0])
    _check_contradictions(config)
    if "algorithm" not in unread:
        _check_responses_differ(config)
    check_strategy(config)
    check_rollout(config)
    return notes


def _strategy_kind(config: Settings) -> Any:
    """Return the `StrategyKind`; None for `auto`, and for one of a missing plugin where the section is not read."""
    return STRATEGIES.load(config.trainer.strategy) if config.trainer.strategy in STRATEGIES else None


def check_world_size(config: Settings, world_size: int) -> None:
    """Check what depends on the number of ranks.

    Raises:
        ConfigError: the strategy or the batch sizes do not fit `world_size`.
    """
    t = config.trainer
    strategy = _strategy_kind(config)
    if strategy is not None and strategy.one_process and world_size > 1:
        raise ConfigError(
            f"trainer.strategy={t.strategy!r} with {world_size} ranks would train {world_size} separate models; "
            "use trainer.strategy=ddp (or auto)"
        )
    if t.threads == "free" and world_size > 1:
        raise ConfigError(
            f"trainer.threads=free with {world_size} ranks, which would count each other as other programs; set a "
            "number of threads, or trainer.threads=0, which divides the cores of a host among its ranks"
        )
    size = ranks_per_sequence(config)
    check_prefetching_ranks(config, world_size)
    if world_size % size:
        raise ConfigError(
            f"{sharing_setting(config)} does not divide the run's {world_size} "
            f"{'rank' if world_size == 1 else 'ranks'}: groups of that many ranks share sequences; use a divisor of "
            f"{world_size}, or start a multiple of {size} processes (hwgrpo launch)"
        )
    engine, size = config.rollout.engine, config.rollout.tensor_parallel_size
    if engine == "vllm" and world_size % size:
        raise ConfigError(
            f"rollout.tensor_parallel_size={size} with rollout.engine={engine!r} does not divide the run's "
            f"{world_size} {'rank' if world_size == 1 else 'ranks'}, which share engines; use a divisor, or "
            "rollout.engine=vllm_server with devices of its own"
        )
    for key, value in (("prompts_per_step", t.prompts_per_step), ("prompts_per_update", prompts_per_update(config))):
        if value % world_size:
            raise ConfigError(
                f"trainer.{key}={value} cannot be divided among {world_size} ranks; use a multiple of {world_size}, or "
                "start another number of processes (hwgrpo launch --devices)"
            )


def _check_limits(section: Any, prefix: str, unread: Sequence[str]) -> None:
    for field in dataclasses.fields(section):
        key, value = f"{prefix}{field.name}", getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            _check_limits(value, key + ".", unread)
            continue
        if isinstance(value, list) and value and dataclasses.is_dataclass(value[0]):
            for i, element in enumerate(value):
                _check_limits(element, f"{key}.{i}.", unread)
        if field.metadata.get("path"):
            for text in value if isinstance(value, list) else [value]:
                check_path(text, key)
        limits: Limits | None = field.metadata.get("limits")
        if limits is None or value is None:
            continue
        for place, one in (
            ((f"{key}.{i}", v) for i, v in enumerate(value)) if isinstance(value, list) else [(key, value)]
        ):
            if limits.names() is None or not any(f"{key}.".startswith(f"{each}.") for each in unread):
                _check_value(one, place, limits)


def _check_value(value: Any, key: str, limits: Limits) -> None:
    names = limits.names()
    if names is None:
        if not limits.accepts(value):
            raise ConfigError(f"{key}={shown(value)} is out of range; allowed: {limits.describe(value)}")
    elif limits.files and names_a_file(value):
        check_file_of(value, key)
    elif value not in names:
        raise unknown_choice(key, value, [*names, FORM] if limits.files else names)


def check_file_of(name: str, key: str) -> None:
    """Check that the file of `path/to/file.py:function` exists.

    Raises:
        ConfigError: it does not.
    """
    file = Path(name.rpartition(":")[0] or name).expanduser()
    if not file.is_file():
        hint = did_you_mean(file, lambda other: other.suffix == ".py")
        raise ConfigError(f"{key}={name!r}: there is no file {file} (looked in {os.getcwd()}).{hint}")


def unknown_choice(key: str, value: str, names: Collection[str]) -> ConfigError:
    """Return the error for a value that is not one of `names`, with the value or setting that it may mean."""
    if key == "backend.name":
        from hwgrpo_backends.decide import describe_unknown

        return ConfigError(describe_unknown(f"{key}={shown(value)}", value, [name for name in names if name != "auto"]))
    here = PEER_NAMES.load("value")(key, value)
    error = ConfigError(f"{key}={shown(value)} is not known: {here}") if here else choice_error(key, value, names)
    preset = str(value).lower()
    if key.startswith("algorithm.") and preset in preset_names() and preset not in names:
        end = "" if str(error).endswith((".", "?")) else "."
        return ConfigError(f"{error}{end} algorithm.preset={preset} sets all settings of that method")
    return error


def _check_sources(config: Settings) -> None:
    read_date(config.data.template_date)
    for key, named in (("data.train", config.data.train), ("data.validation", config.data.validation)):
        listed = named if isinstance(named, list) else [named]
        if not named and key == "data.validation":
            continue
        if not listed or not all(isinstance(source, str) and source for source in listed):
            raise ConfigError(
                f"{key}={quoted(named)} must be a path or name, or a list of them, e.g. {key}=[a.jsonl,b.jsonl]"
            )


def _check_names(config: Settings, unread: Sequence[str]) -> None:
    if "observe" not in unread:
        _check_observe(config.observe, config.trainer.stages)
    for i, function in enumerate(config.reward.functions):
        if is_object(function.name):
            find_object(function.name, f"reward.functions.{i}.name")
        elif ".py" not in function.name and function.name not in REWARDS:
            raise unknown_choice(f"reward.functions.{i}.name", function.name, [*REWARDS.names(), FORM])
    _check_fused_modules(list(config.model.fused_modules))
    betas = config.optim.betas
    if len(betas) != 2:
        raise ConfigError(f"optim.betas={betas} must be two numbers, each 0 <= x < 1, e.g. [0.9, 0.999]")


def _check_observe(observe: ObserveConfig, stages: list[str]) -> None:
    for registry, names in ((LOGGERS, observe.loggers), (METRICS, observe.metrics), (STAGES, stages)):
        for name in names:
            if names_a_file(name):
                check_file_of(name, registry.kind)
            elif name not in registry:
                raise unknown_choice(registry.kind, name, [*registry.names(), FORM])
    functions = [split_name(name)[1] for name in (*observe.loggers, *observe.metrics) if names_a_file(name)]
    for function, arguments in observe.kwargs.items():
        if function not in functions:
            raise choice_error("observe.kwargs", function, functions)
        if not isinstance(arguments, dict):
            raise ConfigError(
                f"observe.kwargs.{function}={shown(arguments)} must be keyword arguments, "
                f"e.g. observe.kwargs.{function}.x=1"
            )


def check_logger_installed(name: str) -> None:
    """Check, without importing it, that the package of a logger is installed.

    Raises:
        ConfigError: it is not; the message has the command that installs it.
    """
    # A folder of that name in the working directory (wandb writes one) is found too, as a package without a file.
    if name in SERVICES and ((spec := importlib.util.find_spec(name)) is None or spec.origin is None):
        raise ConfigError(
            f"observe.loggers contains {name!r}, but its package is not installed; "
            f'pip install "hwgrpo[{name}]", or remove it from observe.loggers'
        )


def _check_fused_modules(modules: list[str]) -> None:
    from hwgrpo_backends.registry import load_all

    known = dict.fromkeys(module for backend in load_all().backends.values() for module in backend.modules)
    for module in modules:
        if module not in (*known, "auto", "none"):
            raise choice_error("model.fused_modules", module, ("auto", "none", *known))
    if not modules or (len(modules) > 1 and {"auto", "none"} & set(modules)):
        raise ConfigError(
            f"model.fused_modules={modules} must be [auto], [none], or some of: {', '.join(known)}; "
            "leave it out for auto"
        )


def check_resume(config: Settings) -> None:
    """Check what `trainer.resume` names.

    Raises:
        ConfigError: it is neither a known name nor an existing file.
    """
    resume, words = config.trainer.resume, ("auto", "never")
    if resume not in words and not Path(resume).exists():
        near = nearest(resume, words)
        hint = f" Did you mean {near!r}?" if near else did_you_mean(Path(resume), Path.is_dir)
        raise ConfigError(
            f"trainer.resume={resume!r} is neither auto, never nor a folder that exists; name one of them.{hint}"
        )


def missing_loggers(config: Settings) -> list[str]:
    """Return problems with the packages of `observe.loggers`."""
    missing = []
    for name in config.observe.loggers:
        try:
            check_logger_installed(name)
        except ConfigError as error:
            missing.append(str(error))
    return missing


def _check_files(config: Settings) -> None:
    for key, name in (("model.path", config.model.path), ("model.tokenizer", config.model.tokenizer)):
        if is_object(name):
            find_object(str(name), key)
        elif name is not None and not name.startswith("builtin://"):
            find_model(name, key)
    for i, function in enumerate(config.reward.functions):
        if ".py" in function.name:
            check_file_of(function.name, f"reward.functions.{i}.name")
        if ".py" in (verifier := verifier_of(function) or ""):
            check_file_of(verifier, f"reward.functions.{i}.kwargs.verifier")
    if config.algorithm.process.function is not None:
        check_file_of(config.algorithm.process.function, "algorithm.process.function")
    adapter = config.model.lora.adapter
    if adapter and not Path(adapter).expanduser().is_dir():
        hint = did_you_mean(Path(adapter).expanduser(), Path.is_dir)
        raise ConfigError(
            f"model.lora.adapter={adapter!r}: there is no such folder; name one with adapter_config.json.{hint}"
        )
    settings = config.trainer.deepspeed.config
    if settings and not Path(settings).expanduser().is_file():
        hint = did_you_mean(Path(settings).expanduser(), Path.is_file)
        raise ConfigError(f"trainer.deepspeed.config={settings!r}: there is no such file; name one in JSON.{hint}")
    template = config.model.chat_template
    if template and not Path(template).expanduser().is_file():
        hint = did_you_mean(Path(template).expanduser(), Path.is_file)
        raise ConfigError(f"model.chat_template={template!r}: there is no such file; name one in Jinja.{hint}")


def _check_contradictions(config: Settings) -> None:
    c, t = config, config.trainer
    if not c.reward.functions:
        raise ConfigError("reward.functions is empty; name at least one reward, e.g. reward.functions=[exact_match]")
    if all(function.weight == 0 for function in c.reward.functions):
        raise ConfigError(
            "every reward.functions weight is 0, so no response is better than another; give one a weight"
        )
    grouped = c.algorithm.advantage.name not in ADVANTAGES_OF_SINGLE_RESPONSES
    if c.rollout.n == 1 and c.algorithm.advantage.singleton != "raw" and grouped:
        raise ConfigError(
            f"rollout.n=1 with algorithm.advantage.name={c.algorithm.advantage.name!r}: a group of one has no baseline "
            "and its advantage is 0; use rollout.n=2 or more, or algorithm.advantage.singleton=raw to train on the "
            "reward itself"
        )
    _check_process(c)
    if t.prompts_per_step % prompts_per_update(c):
        raise ConfigError(
            f"trainer.prompts_per_update={t.prompts_per_update} does not divide trainer.prompts_per_step="
            f"{t.prompts_per_step}: a step needs updates of one size; use a divisor of {t.prompts_per_step}"
        )
    longest = longest_share(c)
    if t.tokens_per_micro_batch is not None and t.tokens_per_micro_batch < longest:
        shared = ranks_per_sequence(c) > 1
        raise ConfigError(
            f"trainer.tokens_per_micro_batch={t.tokens_per_micro_batch} is smaller than "
            f"{'a rank has of one sequence' if shared else 'one sequence can be'} "
            f"(data.max_prompt_tokens={c.data.max_prompt_tokens} + rollout.max_response_tokens="
            f"{c.rollout.max_response_tokens}"
            f"{f', over {sharing_setting(c)}' if shared else ''}); "
            f"use at least {longest}"
        )
    for folder in (Path(t.output_dir), *Path(t.output_dir).parents):
        if folder.exists() and not folder.is_dir():
            what = "is a file" if folder == Path(t.output_dir) else f"is below the file {folder}"
            raise ConfigError(f"trainer.output_dir={shown(t.output_dir)} {what}; name a folder")
    if not c.model.lora.target_modules:
        raise ConfigError("model.lora.target_modules is empty; name layers, or all-linear")
    check_algorithm(c.algorithm)
    r = c.rollout
    _check_horizon(c)
    if c.optim.warmup_steps and c.optim.warmup_ratio:
        raise ConfigError(
            f"optim.warmup_steps={c.optim.warmup_steps} and optim.warmup_ratio={c.optim.warmup_ratio} are both set; "
            "leave one of them out"
        )
    if r.max_staleness and c.algorithm.correction.name == "none" and c.algorithm.old_logprobs != "rollout":
        raise ConfigError(
            f"rollout.max_staleness={r.max_staleness}: responses of older weights need importance weights; set "
            "algorithm.correction.name, e.g. token_truncate"
        )
    if c.observe.loggers.count("jsonl") == 0 and t.save_every:
        raise ConfigError(
            f"trainer.save_every={t.save_every} without the logger jsonl: a resumed run could not cut its metrics "
            "back; add jsonl to observe.loggers"
        )


def _check_responses_differ(config: Settings) -> None:
    """Check that a training run samples different responses to a prompt."""
    if config.rollout.top_k == 1:
        raise ConfigError(
            f"rollout.top_k=1 samples the likeliest token each time: the {config.rollout.n} responses to a prompt are "
            "the same, and none is better than another; use 2 or more, or 0 for all tokens (validations are greedy "
            "with trainer.validation_n=0)"
        )


def _check_horizon(config: Settings) -> None:
    """Check that an adapted KL coefficient stays above 0."""
    kl, responses = config.algorithm.kl, config.trainer.prompts_per_step * config.rollout.n
    least = math.floor(LARGEST_ERROR * responses) + 1
    if kl.target is not None and kl.horizon < least:
        raise ConfigError(
            f"algorithm.kl.horizon={kl.horizon} with {responses} responses per step (trainer.prompts_per_step times "
            f"rollout.n): a step below the target would multiply algorithm.kl.coef by "
            f"{1 - LARGEST_ERROR * responses / kl.horizon:.3g}; use at least {least}, e.g. {10 * responses}"
        )


def _check_process(config: Settings) -> None:
    """Check the settings of steps, which estimators read that have one advantage per token."""
    process = config.algorithm.process
    if not process.delimiter:
        raise ConfigError("algorithm.process.delimiter is empty; name the text that ends a step, or set pattern")
    try:
        re.compile(process.pattern or "")
    except re.error as error:
        raise ConfigError(f"algorithm.process.pattern={process.pattern!r} is no regular expression: {error}") from error
    name = config.algorithm.advantage.name
    if config.reward.shuffle and name in ("process", "gigpo"):
        raise ConfigError(
            f"reward.shuffle=true permutes one reward per response, and algorithm.advantage.name={name!r} has one per "
            f"{'step' if name == 'process' else 'turn'}; use algorithm.advantage.name=grpo for the control run"
        )
    for i, function in enumerate(config.reward.functions):
        if function.name == "environment" and config.rollout.workflow == "single_turn":
            raise ConfigError(
                f"reward.functions.{i}.name=environment with rollout.workflow=single_turn, whose responses have no "
                "environment; set rollout.workflow to environment or tools, or use another reward"
            )


def check_strategy(config: Settings) -> None:
    """Check that the strategy supports the other settings.

    Raises:
        ConfigError: it does not; with the reason and the remedy.
    """
    c, t, strategy = config, config.trainer, _strategy_kind(config)
    if t.threads == "free" and t.deterministic:
        raise ConfigError(
            "trainer.threads=free with trainer.deterministic=true: another number of threads may round differently; "
            "set a number of threads, or leave trainer.deterministic out"
        )
    if t.threads == "free" and c.rollout.max_staleness:
        raise ConfigError(
            f"trainer.threads=free with rollout.max_staleness={c.rollout.max_staleness}, whose second thread generates "
            "beside the training: the free cores are of one of them; set a number of threads, or max_staleness=0"
        )
    if strategy is not None and strategy.one_process and t.sequence_parallel_size > 1:
        raise ConfigError(
            f"trainer.sequence_parallel_size={t.sequence_parallel_size} with trainer.strategy={t.strategy!r}: "
            "sequences are shared by several processes; use trainer.strategy=ddp, fsdp2 or deepspeed, or leave it out"
        )
    if t.tensor_parallel_size > 1:
        tensor = f"trainer.tensor_parallel_size={t.tensor_parallel_size}"
        if strategy is None or not strategy.shards_layers:
            raise ConfigError(
                f"{tensor} with trainer.strategy={t.strategy!r}: tensor parallelism needs trainer.strategy=fsdp2; "
                "use that, or trainer.sequence_parallel_size, which every strategy of several processes takes"
            )
        if t.sequence_parallel_size > 1:
            raise ConfigError(
                f"{tensor} with trainer.sequence_parallel_size={t.sequence_parallel_size}: either shares sequences "
                "among the same ranks; leave one of them out"
            )
        if c.model.lora.rank or c.model.lora.adapter:
            key = "rank" if c.model.lora.rank else "adapter"
            raise ConfigError(
                f"{tensor} with model.lora.{key}={getattr(c.model.lora, key)!r}: adapters are not sharded; use "
                "trainer.sequence_parallel_size, or train all weights"
            )
    if c.model.quantize != "none":
        _check_quantized(c, strategy)
    for key, value, default in (("trainer.offload", t.offload, "none"), ("optim.name", c.optim.name, "adamw")):
        if value != default and strategy is not None and not strategy.holds_states:
            raise ConfigError(
                f"{key}={value!r} with trainer.strategy={t.strategy!r}, which has an optimizer of its own; leave it "
                "out (DeepSpeed: trainer.deepspeed.offload_optimizer=true), or use single, ddp or fsdp2"
            )
    if c.optim.name == "muon" and strategy is not None and not strategy.full_matrices:
        raise ConfigError(
            f"optim.name='muon' with trainer.strategy={t.strategy!r}: Muon needs full matrices, of which a rank has a "
            "shard; use trainer.strategy=ddp, or optim.name=adamw"
        )
    if c.optim.name == "muon" and t.offload != "none":
        raise ConfigError(
            f"optim.name='muon' with trainer.offload={t.offload!r}: only AdamW's states are offloaded; leave one out"
        )
    sync, share = c.algorithm.kl.sync_every, c.algorithm.kl.sync_share
    if sync and strategy is not None and strategy.sharding(t, 2).in_compute_dtype:
        stage = f" and trainer.deepspeed.stage={t.deepspeed.stage}" if t.strategy == "deepspeed" else ""
        raise ConfigError(
            f"algorithm.kl.sync_every={sync} with trainer.strategy={t.strategy!r}{stage}, which holds the reference "
            "in the compute dtype, where small moves are lost; use trainer.strategy=fsdp2, or leave it out"
        )
    if sync and share < 1 and (c.model.lora.rank or c.model.lora.adapter):
        key = "rank" if c.model.lora.rank else "adapter"
        raise ConfigError(
            f"algorithm.kl.sync_share={share} with model.lora.{key}={getattr(c.model.lora, key)!r}: an adapter's "
            "weights are products, whose mean has no factors of its rank; use sync_share=1, or train all parameters"
        )
    if strategy is not None and strategy.refuse is not None:
        strategy.refuse(config)


def _check_quantized(config: Settings, strategy: Any) -> None:
    """Check that adapters are trained, and that the strategy and the rollout engine support `model.quantize`."""
    quantize = f"model.quantize={config.model.quantize!r}"
    if not (config.model.lora.rank or config.model.lora.adapter):
        raise ConfigError(f"{quantize} with model.lora.rank=0: quantized weights are not trained; set model.lora.rank")
    refuse_dora(config.model.lora, quantize, "its norms are of the weights, which are codes")
    if strategy is not None and not strategy.takes_quantized:
        raise ConfigError(
            f"{quantize} with trainer.strategy={config.trainer.strategy!r}, which would cast the codes of quantized "
            "weights; use trainer.strategy=auto (in several processes ddp, or fsdp2 where ddp does not fit)"
        )
    if not ENGINES.load(config.rollout.engine).samples_with_policy and config.algorithm.correction.name == "none":
        raise ConfigError(
            f"{quantize} with rollout.engine={config.rollout.engine!r}, which samples with the unquantized base model: "
            "set algorithm.correction.name, e.g. token_truncate, or use rollout.engine=local"
        )
