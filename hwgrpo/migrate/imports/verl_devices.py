"""verl's settings of the rollout engine, of parallelism and offload, and of the run: validation, logs, checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hwgrpo.catalog import LOGGERS
from hwgrpo.migrate.imports.conversion import Assignment, Converted, Refusal, Remark
from hwgrpo.migrate.imports.recipe_text import nested
from hwgrpo.migrate.imports.variable_text import joined, known
from hwgrpo.migrate.imports.verl_algorithm import value_of
from hwgrpo.migrate.imports.verl_batches import SEQUENCE_PARALLEL, TENSOR_PARALLEL
from hwgrpo.migrate.imports.verl_settings import ACTOR, ROLLOUT, VerlSettings

_ENGINES = {"dp": "", "fsdp": "", "fsdp2": "", "megatron": "Megatron", "veomni": "VeOmni", "mindspeed": "MindSpeed"}
"""verl's training engines -> what is said of one that shards otherwise."""
_AUTO = "vLLM where it is installed and the device can use it, else the local engine; the run prints which"
_FILTERED = (
    "verl's trainer has log-probs over all tokens, as here with vLLM and SGLang; with the local engine they are over "
    "those that the filters keep"
)
_VLLM = ("max_num_batched_tokens", "enable_chunked_prefill", "enable_prefix_caching")
_VALIDATION = tuple(f"{ROLLOUT}val_kwargs.{each}" for each in ("do_sample", "temperature", "top_p", "top_k", "n"))


def engine(v: VerlSettings) -> Iterator[Converted]:
    """Convert the rollout engine and its arguments."""
    key = ROLLOUT + "name"
    name = v[key]
    here = "auto" if name is None else value_of(key, name)
    if not here:
        yield Refusal(key, name, "TensorRT-LLM is not supported", "vllm, sglang or hf")
        return
    note = "" if v.is_given(key) else "verl needs the key; this is vllm's"
    yield Assignment("rollout.engine", here, (key,), _AUTO if name == "vllm" else note)
    vllm, sglang = (v.below(f"{ROLLOUT}engine_kwargs.{each}.") for each in ("vllm", "sglang"))
    own = tuple(ROLLOUT + each for each in _VLLM)
    kwargs, keys = {}, []
    if here == "auto":
        kwargs = {each: v[ROLLOUT + each] for each in _VLLM if v.is_given(ROLLOUT + each)} | _today(vllm)
        keys = [*own, *(f"{ROLLOUT}engine_kwargs.vllm.{each}" for each in vllm)]
    elif here == "sglang_server":
        kwargs, keys = sglang, [f"{ROLLOUT}engine_kwargs.sglang.{each}" for each in sglang]
    if kwargs:
        yield Assignment("rollout.engine_kwargs", nested(kwargs), tuple(keys))
    others = tuple(each for each in v.given if each.startswith(ROLLOUT + "engine_kwargs."))
    yield Remark((*own, *others), f"arguments of another engine than {name}")
    longest = ROLLOUT + "max_model_len"
    if v[longest] is not None:
        needed = v["data.max_prompt_length"] + (v[ROLLOUT + "response_length"] or v["data.max_response_length"])
        if v[longest] < needed:
            yield Refusal(longest, v[longest], f"a sequence can have {needed} tokens", f"at least {needed}")
        else:
            yield Assignment("rollout.max_model_len", v[longest], (longest,))


def _today(vllm: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of vLLM by their names of today."""
    kwargs = dict(vllm)
    if kwargs.pop("disable_mm_preprocessor_cache", False):
        kwargs.setdefault("mm_processor_cache_gb", 0)
    return kwargs


def sampling(v: VerlSettings) -> Iterator[Converted]:
    """Convert the filters of sampling; verl's trainer has log-probs over all tokens, whatever they drop."""
    own = v[ROLLOUT + "name"] != "sglang"
    for key, off in (("top_p", 1.0), ("top_k", 0)):
        value = max(v[ROLLOUT + key], 0) if key == "top_k" else v[ROLLOUT + key]
        note = _FILTERED if own and value != off else ""
        yield Assignment(f"rollout.{key}", value, (ROLLOUT + key,), note)


def parallelism(v: VerlSettings) -> Iterator[Converted]:
    """Convert the training engine, sequence and tensor parallelism, offload."""
    strategy, chosen = ACTOR + "strategy", "model_engine"
    engines = [each for each in (v.given.get(strategy), v.given.get(chosen)) if each is not None]
    other = next((name for each in engines if (name := _ENGINES.get(each, each))), None)
    sizes = {}
    for key, origins in (("tensor", TENSOR_PARALLEL), ("sequence", SEQUENCE_PARALLEL)):
        given = [each for each in origins if v.is_given(each)]
        above = [each for each in given if v[each] > 1]
        sizes[key] = max([1, *(v[each] for each in above)])
        if len(sizes) < 2 or min(sizes.values()) == 1:
            yield Assignment(f"trainer.{key}_parallel_size", sizes[key], tuple(above or given or origins[:1]))
        else:
            why = "sequences are shared among ranks by tensor parallelism already"
            yield Refusal(above[0], v[above[0]], why, "1, or a tensor parallel size of 1")
        yield Remark(origins, "without effect beside the other key" if above else "one rank has all of a sequence")
    offload = ACTOR + "fsdp_config.offload_policy"
    processes = v.launch().processes
    sharded = ((processes or 1) > 1 and bool(engines)) or sizes["tensor"] > 1 or v[offload]
    note = f"trained by fsdp2 instead of {other}" if other else ""
    if sharded:
        origins = (strategy, chosen) if engines else (TENSOR_PARALLEL[0], offload)
        yield Assignment("trainer.strategy", "fsdp2", origins, note)
    why = (
        "one device: there is nothing to shard" if processes else "the number of devices is not known: the run chooses"
    )
    yield Remark((strategy, chosen), f"{why}{'; ' + note if note else ''}")
    yield from _offload(v)


def _offload(v: VerlSettings) -> Iterator[Converted]:
    policy = ACTOR + "fsdp_config.offload_policy"
    names = ("fsdp_config", "megatron", "engine", "veomni")
    states = tuple(f"{ACTOR}{each}.optimizer_offload" for each in names)
    states = (*states, ACTOR + "optim.override_optimizer_config.optimizer_cpu_offload")
    weights = tuple(f"{ACTOR}{each}.param_offload" for each in names)
    yield Assignment("trainer.fsdp2.offload", v[policy], (policy,))
    if v[policy]:
        yield Remark(states, "trainer.fsdp2.offload holds the states in host memory, too")
    else:
        on = tuple(each for each in states if v[each])
        yield Assignment("trainer.offload", "optimizer" if on else "none", on or states)
        yield Remark(states, "the states are offloaded by another key")
    moved = any(v[each] for each in weights)
    yield Remark(
        weights,
        "weights stay on the device between stages; set trainer.fsdp2.offload=true where memory is short"
        if moved
        else "weights stay on the device, as here",
    )


def validation(v: VerlSettings) -> Iterator[Converted]:
    """Convert the samples of validations."""
    samples, temperature, top_p, top_k, n = _VALIDATION
    if v[temperature] == 0:
        yield Assignment("trainer.validation_n", 0, (temperature, n), "greedy responses are all alike: one")
        yield Remark((samples, top_p, top_k), "the response is greedy, because the temperature is 0, as in verl")
        return
    yield Assignment("trainer.validation_n", v[n], (n, temperature), "and a greedy one")
    yield Remark((samples,), f"{temperature} alone decides, as in verl")
    for key, origin in (("temperature", temperature), ("top_p", top_p), ("top_k", top_k)):
        train, value = v[ROLLOUT + key], v[origin]
        own = None if value == train else max(value, 0) if key == "top_k" else value
        yield Assignment(f"trainer.validation_sampling.{key}", own, (origin,), "as in training" if own is None else "")


def run(v: VerlSettings) -> Iterator[Converted]:
    """Convert the folder, the logs, resuming, the device and the number of processes."""
    folder, project, name = (f"trainer.{each}" for each in ("default_local_dir", "project_name", "experiment_name"))
    output = v[folder] or joined("checkpoints/", v[project], "/", v[name])
    yield Assignment("trainer.output_dir", output, (folder,) if v[folder] else (project, name))
    for key, here in ((project, "observe.project"), (name, "observe.run_name")):
        if v.is_given(key):
            yield Assignment(here, v[key], (key,))
    mode, path = "trainer.resume_mode", "trainer.resume_from_path"
    if v[mode] == "resume_path":
        yield Assignment("trainer.resume", v[path] or "", (mode, path), "a checkpoint of hwgrpo; verl's cannot be read")
    else:
        yield Assignment("trainer.resume", value_of(mode, v[mode]), (mode,))
        yield Remark((path,), f"without effect beside resume_mode={v[mode]}")
    device = "trainer.device"
    yield Assignment("backend.name", value_of(device, v[device]), (device,))
    yield v.launch()
    yield from _loggers(v)


def _loggers(v: VerlSettings) -> Iterator[Converted]:
    key = "trainer.logger"
    if not v.is_given(key):
        return
    written = v[key] if isinstance(v[key], list) else [v[key]]
    listed = known(written)
    names = (*LOGGERS.names(), "console", "file")
    unknown = [name for each, name in zip(listed, written, strict=True) if each not in names]
    if unknown:
        yield Refusal(
            key, v[key], f"there is no logger {', '.join(map(str, unknown))}", f"{', '.join(LOGGERS.names())}, console"
        )
        return
    loggers = [each for each in dict.fromkeys(listed) if each in LOGGERS.names() and each != "jsonl"]
    note = "the console is observe.progress" if "console" in listed else ""
    yield Assignment("observe.loggers", ["jsonl", *loggers], (key,), note)
