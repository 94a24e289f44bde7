"""TRL's settings of sampling, the engine, devices and the run: validation, logs, checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hwgrpo.catalog import LOGGERS
from hwgrpo.errors import ConfigError, shown
from hwgrpo.migrate.imports.conversion import Assignment, Converted, Refusal, Remark
from hwgrpo.migrate.imports.trl_batches import mapping_of
from hwgrpo.migrate.imports.trl_settings import TrlSettings

_SERVER = ("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout")
_COLOCATED = ("vllm_gpu_memory_utilization", "vllm_tensor_parallel_size", "vllm_enable_sleep_mode")
_VLLM = (*_SERVER, *_COLOCATED, "vllm_max_model_length", "vllm_mode")
_SAMPLING = {
    **{name: f"rollout.{name}" for name in ("temperature", "top_p", "top_k", "min_p")},
    **dict.fromkeys(("max_new_tokens", "max_tokens"), "rollout.max_response_tokens"),
    **dict.fromkeys(("stop", "stop_strings"), "rollout.stop"),
    **dict.fromkeys(("stop_token_ids", "eos_token_id"), "rollout.stop_token_ids"),
}
"""Keys of generation_kwargs -> settings here."""


def sampling(v: TrlSettings) -> Iterator[Converted]:
    """Convert the arguments of generation."""
    key = "generation_kwargs"
    given = mapping_of(v, key)
    if given.pop("do_sample", True) is not True:
        yield Refusal(key, {"do_sample": False}, "a group of greedy responses has no signal", "temperature")
    given.pop("use_cache", None)
    for name, value in given.items():
        here = _SAMPLING.get(name)
        if here is None:
            yield Refusal(key, {name: value}, f"{name} has no setting here", ", ".join(_SAMPLING))
        elif here.startswith("rollout.stop"):
            yield Assignment(here, list(value) if isinstance(value, list | tuple) else [value], (key,))
        else:
            yield Assignment(here, value, (key,), "it overrides the field, as in TRL")
    yield Remark((key,), "as here")


def engine(v: TrlSettings) -> Iterator[Converted]:
    """Convert the rollout engine and its arguments."""
    if not v["use_vllm"]:
        yield Assignment("rollout.engine", "local", ("use_vllm",))
        yield Remark(_VLLM, "without effect beside use_vllm=False")
        return
    serves = v["vllm_mode"] == "server"
    yield Assignment("rollout.engine", "vllm_server" if serves else "vllm", ("use_vllm", "vllm_mode"))
    window = "vllm_max_model_length"
    if v[window] is not None:
        yield Assignment("rollout.max_model_len", v[window], (window,))
    if serves:
        url, host, port, timeout = _SERVER
        at = "127.0.0.1" if v[host] == "0.0.0.0" else v[host]
        address = v[url] or f"http://{at}:{v[port]}"
        yield Assignment("rollout.server.url", address, (url,) if v[url] else (host, port))
        yield Assignment("rollout.server.start_timeout", v[timeout], (timeout,))
        yield Remark((*_SERVER, *_COLOCATED), "an argument of the server itself, or without effect beside base_url")
        return
    share, parallel, sleeps = _COLOCATED
    if v.is_given(share):
        yield Assignment("rollout.gpu_memory_utilization", v[share], (share,))
    yield Assignment("rollout.tensor_parallel_size", v[parallel], (parallel,))
    if v.is_given(sleeps):
        yield Assignment("rollout.sleep_mode", "auto" if v[sleeps] else "never", (sleeps,))
    yield Remark(_SERVER, "without effect beside vllm_mode=colocate")


def agents(v: TrlSettings) -> Iterator[Converted]:
    """Convert the limit of turns; it has an effect with tools or environments alone."""
    key = "max_tool_calling_iterations"
    if not v.agents:
        yield Remark((key,), "there are tools only where a script gives them to GRPOTrainer")
    elif v[key] is not None:
        yield Assignment("rollout.workflow", "environment", ())
        yield Assignment("rollout.agent.max_turns", v[key] + 1, (key,))


def devices(v: TrlSettings) -> Iterator[Converted]:
    """Convert the device, FSDP and DeepSpeed, of arguments or of `accelerate launch`."""
    environment = v.environment
    cpu = v["use_cpu"] or environment.get("ACCELERATE_USE_CPU", "").lower() == "true"
    yield Assignment("backend.name", "cpu" if cpu else "auto", ("use_cpu",))
    if environment.get("ACCELERATE_MIXED_PRECISION") == "fp16":
        raise ConfigError("ACCELERATE_MIXED_PRECISION=fp16: float16 is not trained in; use --mixed_precision bf16")
    if environment.get("ACCELERATE_USE_MEGATRON_LM", "").lower() == "true":
        raise ConfigError("ACCELERATE_USE_MEGATRON_LM=true: there is no Megatron here; use FSDP or DeepSpeed")
    sharding, config = v["fsdp"], mapping_file(v, "fsdp_config")
    listed = " ".join(sharding) if isinstance(sharding, list) else str(sharding or "")
    options = {"true": ["full_shard"], "false": []}.get(listed.lower(), listed.replace(",", " ").split())
    zero = mapping_file(v, "deepspeed")
    by_fsdp = environment.get("ACCELERATE_USE_FSDP", "").lower() == "true"
    by_zero = environment.get("ACCELERATE_USE_DEEPSPEED", "").lower() == "true"
    if options and zero:
        yield Refusal("deepspeed", v["deepspeed"], "fsdp shards the model already", "one of both")
    elif v.prompts is not None and v.world_size() == 1:  # a script that runs now, not a recipe for later
        yield Remark(("fsdp", "fsdp_config", "deepspeed"), "one process: there is nothing to shard")
    elif zero or by_zero:
        yield from _deepspeed(zero, environment)
    elif options or by_fsdp:
        yield from _fsdp(options, config, environment)
    yield Remark(("fsdp", "fsdp_config", "deepspeed"), "as here")
    yield Remark(("ds3_gather_for_generation",), "the local engine gathers module by module, other engines get copies")
    if v.is_given("ddp_timeout"):
        yield Assignment("trainer.process_group_timeout", float(v["ddp_timeout"]), ("ddp_timeout",))


def _fsdp(options: list[str], config: Mapping[str, Any], environment: Mapping[str, str]) -> Iterator[Converted]:
    """Convert FSDP; transformers' keys may begin with fsdp_, accelerate's variables do with FSDP_."""
    values = {key.removeprefix("fsdp_"): value for key, value in config.items()}
    values |= {
        key.removeprefix("FSDP_").lower(): value for key, value in environment.items() if key.startswith("FSDP_")
    }
    sharding = str(values.get("sharding_strategy", values.get("reshard_after_forward", ""))).lower()
    if "no_shard" in (*options, sharding):
        yield Assignment("trainer.strategy", "ddp", ("fsdp",))
        return
    yield Assignment("trainer.strategy", "fsdp2", ("fsdp", "fsdp_config"))
    keeps = bool({"shard_grad_op", "false"} & {*options, sharding})
    yield Assignment("trainer.fsdp2.reshard_after_forward", not keeps, ("fsdp", "fsdp_config"))
    offloads = "offload" in options or str(values.get("offload_params", "false")).lower() == "true"
    yield Assignment("trainer.fsdp2.offload", offloads, ("fsdp", "fsdp_config"))


def _deepspeed(zero: Mapping[str, Any], environment: Mapping[str, str]) -> Iterator[Converted]:
    if "ACCELERATE_DEEPSPEED_CONFIG_FILE" in environment and not zero:
        zero = _json_file("ACCELERATE_DEEPSPEED_CONFIG_FILE", environment["ACCELERATE_DEEPSPEED_CONFIG_FILE"])
    section = zero.get("zero_optimization", {})
    prefix, origin = "ACCELERATE_DEEPSPEED_", ("deepspeed",)
    stage = int(section.get("stage", 0 if zero else environment.get(prefix + "ZERO_STAGE", 2)))
    if zero.get("fp16", {}).get("enabled") is True:
        yield Refusal("deepspeed", "fp16", "float16 is not trained in", "bf16")
    if stage == 0:
        yield Assignment("trainer.strategy", "ddp", origin, "stage 0 shards nothing")
        return
    yield Assignment("trainer.strategy", "deepspeed", origin)
    yield Assignment("trainer.deepspeed.stage", stage, origin)
    for key, here in (("optimizer", "optimizer"), ("param", "parameters")):
        of_file = section.get(f"offload_{key}", {}).get("device", "none")
        device = environment.get(f"{prefix}OFFLOAD_{key.upper()}_DEVICE", "none") if not zero else of_file
        if device == "nvme":
            yield Refusal("deepspeed", "nvme", "nothing is held on disks", "cpu")
        yield Assignment(f"trainer.deepspeed.offload_{here}", device == "cpu", origin)


def mapping_file(v: TrlSettings, key: str) -> dict[str, Any]:
    """Return a mapping, JSON text, or the content of a JSON file that a setting names."""
    value = v[key]
    if isinstance(value, str) and not value.lstrip().startswith("{"):
        return _json_file(key, value)
    return mapping_of(v, key)


def _json_file(key: str, file: str) -> dict[str, Any]:
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}={shown(file)} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{key}={shown(file)} must hold a mapping")
    return content


def validation(v: TrlSettings) -> Iterator[Converted]:
    """Convert the validations."""
    keys = ("eval_steps", "eval_on_start", "num_generations_eval")
    if v["eval_strategy"] == "no":
        yield Remark(("eval_strategy", *keys), "nothing is validated")
        return
    default = v["eval_steps"] if v["eval_steps"] is not None else v["logging_steps"]
    yield from _every(v, "trainer.validate_every", "eval_strategy", "eval_steps", default)
    yield Assignment("trainer.validate_at_start", v["eval_on_start"], ("eval_on_start",))
    samples = v["num_generations_eval"] or v["num_generations"]
    origin = ("num_generations_eval",) if v["num_generations_eval"] else ("num_generations",)
    yield Assignment("trainer.validation_n", samples, origin, "and a greedy response")
    yield Assignment("data.validation_max_rows", 0, (), "TRL validates on all rows")


def saves(v: TrlSettings) -> Iterator[Converted]:
    """Convert the times of checkpoints, and the one to resume from."""
    if v["save_strategy"] == "no":
        yield Assignment("trainer.save_every", 0, ("save_strategy",), "one at the end")
        yield Remark(("save_steps",), "without effect beside save_strategy=no")
    elif v["save_strategy"] == "best":
        yield Refusal("save_strategy", "best", "no checkpoint is the best one", "steps")
    elif _updates_between(v, "save_strategy", "save_steps", v["save_steps"]) is None:
        note = "the number of rows is not known: one at the end; set trainer.save_every for others"
        yield Assignment("trainer.save_every", 0, ("save_strategy", "save_steps"), note)
    else:
        yield from _every(v, "trainer.save_every", "save_strategy", "save_steps", v["save_steps"])
    resume = v["resume_from_checkpoint"] or False
    here = {"false": "never", "true": "auto"}.get(str(resume).lower(), resume)
    yield Assignment("trainer.resume", here, ("resume_from_checkpoint",), "a checkpoint of hwgrpo")


def logs(v: TrlSettings) -> Iterator[Converted]:
    """Convert the logs."""
    if v["logging_strategy"] == "no":
        yield Assignment("observe.progress", "none", ("logging_strategy",))
        yield Remark(("logging_steps",), "without effect beside logging_strategy=no")
    elif v["logging_strategy"] == "epoch" and v.prompts is None:
        yield Remark(("logging_strategy", "logging_steps"), "a line of each step: the number of rows is not known")
    else:
        yield from _every(v, "observe.log_every", "logging_strategy", "logging_steps", v["logging_steps"])
    if v["disable_tqdm"]:
        yield Assignment("observe.progress", "plain", ("disable_tqdm",))
    yield Remark(("disable_tqdm",), "a panel on a terminal, else lines")
    if v["log_completions"] and v["num_completions_to_print"] is not None:
        keys = ("log_completions", "num_completions_to_print")
        yield Assignment("observe.completions_per_step", v["num_completions_to_print"], keys)
    yield Remark(("log_completions", "num_completions_to_print"), "completions.jsonl has 16 of each step")
    yield from _loggers(v)


def _loggers(v: TrlSettings) -> Iterator[Converted]:
    key = "report_to"
    listed = v[key] if isinstance(v[key], list) else [v[key]]
    listed = ["tensorboard"] if listed == ["all"] else [each for each in listed if each not in ("none", None)]
    unknown = [each for each in listed if each not in LOGGERS.names()]
    if unknown:
        names = ", ".join(each for each in LOGGERS.names() if each != "jsonl")
        yield Refusal(key, v[key], f"there is no logger {', '.join(map(str, unknown))}", names)
        return
    yield Assignment("observe.loggers", ["jsonl", *(each for each in listed if each != "jsonl")], (key,))
    service = {"wandb", "trackio", "swanlab"} & {*listed}
    if v.is_given("run_name"):
        yield Assignment("observe.run_name", v["run_name"], ("run_name",))
    named = v.environment.get("WANDB_PROJECT")
    if named and "wandb" in service:  # as transformers' callback, which reads no argument
        note = "" if not v.is_given("project") else "the variable WANDB_PROJECT counts"
        yield Assignment("observe.project", named, ("project",), note)
    elif service:
        yield Assignment("observe.project", v["project"], ("project",))
    yield Remark(("project",), "no service has the run")


def _updates_between(v: TrlSettings, strategy: str, key: str, value: float) -> int | None:
    """Return the updates between two checkpoints, logs or validations; None where they follow from unknown data."""
    return v.updates_per_epoch() if v[strategy] == "epoch" else v.count_of_updates(key, value)


def _every(v: TrlSettings, here: str, strategy: str, key: str, value: float) -> Iterator[Converted]:
    """Convert a number of updates, or an epoch, to steps."""
    updates, origins = _updates_between(v, strategy, key, value), (key, strategy)
    if v[strategy] == "epoch":
        origins = (strategy,)
        yield Remark((key,), f"without effect beside {strategy}=epoch")
    if updates is None:
        origin = strategy if v[strategy] == "epoch" else key
        yield Refusal(origin, v[origin], "the number of rows is not known", f"{key} as a number of updates")
        return
    if not updates:
        yield Refusal(key, 0, "it is no number of updates", f"{strategy}=no")
        return
    steps, note = v.in_steps(updates)
    yield Assignment(here, steps, origins, note)
