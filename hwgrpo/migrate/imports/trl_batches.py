"""TRL's settings of batches, lengths of the run, the optimizer's schedule, data and the model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from hwgrpo.config.backend_choices import attention_choices
from hwgrpo.errors import ConfigError, shown
from hwgrpo.migrate.imports.conversion import Assignment, Converted, Launch, Refusal, Remark
from hwgrpo.migrate.imports.trl_settings import TrlSettings, trl_value
from hwgrpo.migrate.imports.vision_names import reads_images

_MASTERS = "parameters are fp32 masters; bf16 sets the dtype that they are computed in"
_WITHOUT_EFFECT = ("dtype", "torch_dtype", "device_map", "low_cpu_mem_usage", "use_cache", "use_kernels")
"""Arguments of from_pretrained that change neither the parameters nor the gradient here."""
LOADERS = {"parquet": "parquet", "json": "json", "jsonl": "json", "csv": "csv"}
"""A file's extension -> the path of a dataset that loads such `data_files`."""
UNKNOWN_PROMPT = 2048
"""Longest prompt where neither data nor settings say it."""
GIVEN = "object://validation"
"""Validation data that is given as an object."""
_LORA = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "use_rslora", "use_dora")


def batches(v: TrlSettings) -> Iterator[Converted]:
    """Convert the batch sizes, which count completions in TRL and prompts here."""
    sizes = v.batches()
    n, processes = v["num_generations"], v.world_size()
    origins = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")
    note = f"{sizes.prompts_per_step * n} completions of {n} each"
    yield Assignment("rollout.n", n, ("num_generations",))
    yield Assignment("trainer.prompts_per_step", sizes.prompts_per_step, (*origins, "generation_batch_size"), note)
    one = sizes.prompts_per_update == sizes.prompts_per_step
    yield Assignment("trainer.prompts_per_update", None if one else sizes.prompts_per_update, origins)
    yield Assignment("trainer.epochs_per_batch", v["num_iterations"], ("num_iterations",))
    yield Launch(("num_processes",), processes)
    yield Remark(("generation_batch_size", *origins), "they make one update per batch; micro-batches are cut by tokens")


def length(v: TrlSettings) -> Iterator[Converted]:
    """Convert the length of the run and the warm-up."""
    per_step = v.batches().updates_per_step
    key, epochs = "max_steps", v["num_train_epochs"]
    total = v.total_updates()
    if v[key] > 0 and v[key] % per_step:
        below = v[key] // per_step * per_step
        options = [each for each in (below, below + per_step) if each]
        why = f"a step has {per_step} updates, and is trained to its end"
        yield Refusal(key, v[key], why, " or ".join(f"{key}={each}" for each in options))
    elif total is not None:
        steps, note = v.in_steps(total)
        origin = (key,) if v[key] > 0 else ("num_train_epochs",)
        yield Assignment("trainer.max_steps", max(1, steps), origin, note)
        yield Remark(("num_train_epochs",), f"without effect beside max_steps={v[key]}")
    elif epochs != int(epochs) or epochs < 1:
        yield Refusal("num_train_epochs", epochs, "the number of rows is not known", "whole passes, or max_steps")
    else:
        yield Assignment("trainer.epochs", int(epochs), ("num_train_epochs",))
    yield Remark((key,), "as long as num_train_epochs says")
    warmup = v.count_of_updates("warmup_steps", v["warmup_steps"])
    if v["lr_scheduler_type"] == "constant":
        yield Remark(("warmup_steps",), "without effect beside lr_scheduler_type=constant, as in transformers")
    elif warmup is None:
        yield Assignment("optim.warmup_ratio", v["warmup_steps"], ("warmup_steps",))
    else:
        yield Assignment("optim.warmup_steps", warmup, ("warmup_steps",))


def optimizer(v: TrlSettings) -> Iterator[Converted]:
    """Convert AdamW's betas and the schedule of the learning rate."""
    yield Assignment("optim.betas", [v["adam_beta1"], v["adam_beta2"]], ("adam_beta1", "adam_beta2"))
    key, arguments = "lr_scheduler_type", "lr_scheduler_kwargs"
    here, given = trl_value(v, key), mapping_of(v, arguments)
    if not here:
        yield Refusal(key, v[key], "it is not supported", "linear, cosine, cosine_with_min_lr or constant")
        return
    yield Assignment("optim.schedule", here, (key,))
    least = given.pop("min_lr", None)
    share = given.pop("min_lr_rate", None if least is None else least / v["learning_rate"])
    half = given.pop("num_cycles", 0.5)
    if given or half != 0.5:
        yield Refusal(arguments, v[arguments], f"{next(iter(given), 'num_cycles')} is not supported", "min_lr_rate")
    elif share is not None:
        yield Assignment("optim.min_lr_ratio", share, (arguments,))
    else:
        yield Remark((arguments,), "as here")


def data(v: TrlSettings) -> Iterator[Converted]:
    """Convert the dataset, its splits, its prompts and their limit."""
    column = "dataset_prompt_column"
    yield Assignment("data.prompt_key", v[column], (column,))
    if v.is_given("system_prompt"):
        yield Assignment("data.system_prompt", v["system_prompt"], ("system_prompt",))
    if v.is_given(column) or v.is_given("system_prompt"):
        yield Assignment(
            "data.chat", "always", (column, "system_prompt"), "open-r1 makes a conversation of each prompt"
        )
    validates, name, mixture = v["eval_strategy"] != "no", "dataset_name", v["datasets"]
    splits = ("dataset_train_split", "dataset_test_split")
    if mixture:
        yield from _mixture(v, validates)
        yield Remark((name, *splits), "without effect beside datasets, as in TRL")
    elif v.is_given(name):
        yield Assignment("data.train", v[name], (name,))
        yield Assignment("data.split", v[splits[0]], splits[:1])
        if validates:
            yield Assignment("data.validation", v[name], (name, "eval_strategy"))
            yield Assignment("data.validation_split", v[splits[1]], splits[1:])
    if v.evaluates and validates:
        yield Assignment("data.validation", GIVEN, ("eval_strategy",))
    yield Remark(splits, "nothing reads it")
    prompt = "max_prompt_length"
    if v[prompt] is not None:
        yield Assignment("data.max_prompt_tokens", v[prompt], (prompt,))
        yield Assignment("data.overlong", "truncate_left", (prompt,), "TRL below 1.0 kept the last tokens")
        return
    window, response = v["vllm_max_model_length"], v["max_completion_length"]
    longest = window - response if window is not None and window > response else v.longest_prompt or UNKNOWN_PROMPT
    note = "TRL has no limit; a longer prompt is an error"
    yield Assignment("data.max_prompt_tokens", longest, (prompt,), note)
    yield Assignment("data.overlong", "error", (prompt,))


def _mixture(v: TrlSettings, validates: bool) -> Iterator[Converted]:
    key, paths, splits = "datasets", [], set()
    for each in v[key]:
        entry = dict(each) if isinstance(each, Mapping) else {}
        path = entry.pop("path", None)
        paths.append(entry.pop("data_files", None) if path in LOADERS.values() else path)
        splits.add(entry.pop("split", "train"))
        entry.pop("columns", None)  # others are not read
        others = [name for name, value in entry.items() if value is not None]
        if others or paths[-1] is None:
            why = f"{others[0]} is not supported" if others else "an entry has no path"
            yield Refusal(key, v[key], why, "entries with path and split, or files with the rows")
            return
    if len(splits) > 1:
        yield Refusal(key, v[key], "they are of several splits", "one split")
        return
    yield Assignment("data.train", paths[0] if len(paths) == 1 else paths, (key,))
    yield Assignment("data.split", splits.pop(), (key,))
    if validates:
        yield Refusal("eval_strategy", v["eval_strategy"], "datasets has no test split", "dataset_name, or no")


def model(v: TrlSettings) -> Iterator[Converted]:
    """Convert the model, its dtype and its attention."""
    if v.is_given("model_name_or_path"):
        yield Assignment("model.path", v["model_name_or_path"], ("model_name_or_path",))
    key = "model_init_kwargs"
    given = {name: value for name, value in mapping_of(v, key).items() if value is not None}
    revision = given.pop("revision", None) or v["model_revision"]
    yield Assignment("model.revision", None if revision == "main" else revision, (key, "model_revision"))
    if given.pop("trust_remote_code", False):
        yield Assignment("model.trust_remote_code", True, (key,))
    attention = given.pop("attn_implementation", None) or v["attn_implementation"]
    if attention is not None and attention not in attention_choices():
        origin = "attn_implementation" if v.is_given("attn_implementation") else key
        yield Refusal(origin, attention, "it is not one of those here", f"one of {', '.join(attention_choices())}")
    elif attention is not None:
        yield Assignment("model.attention", attention, (key, "attn_implementation"))
    others = [name for name in given if name not in _WITHOUT_EFFECT]
    if others:
        why = f"{others[0]} has no setting here"
        yield Refusal(key, {others[0]: given[others[0]]}, why, "revision, attn_implementation, trust_remote_code")
    yield Remark((key,), _MASTERS)
    low = v["bf16"] if v["bf16"] is not None else not v["fp16"]
    yield Assignment("model.dtype", "bfloat16" if low else "float32", ("bf16",))
    yield Remark(("dtype",), _MASTERS)
    yield Remark(("attn_implementation", "model_revision"), "as here")


def adapters(v: TrlSettings) -> Iterator[Converted]:
    """Convert LoRA and the quantization of the frozen model."""
    enabled = v["use_peft"]
    yield Assignment("model.lora.rank", v["lora_r"] if enabled else 0, ("use_peft", *(["lora_r"] if enabled else [])))
    if enabled:
        targets = v["lora_target_modules"]
        note = "" if targets else "PEFT's default for most families"
        listed = [targets] if isinstance(targets, str) else targets or ["q_proj", "v_proj"]
        yield Assignment("model.lora.alpha", float(v["lora_alpha"]), ("lora_alpha",))
        yield Assignment("model.lora.dropout", v["lora_dropout"], ("lora_dropout",))
        yield Assignment("model.lora.target_modules", listed, ("lora_target_modules",), note)
        yield Assignment("model.lora.rslora", v["use_rslora"], ("use_rslora",))
        yield Assignment("model.lora.dora", v["use_dora"], ("use_dora",))
    if v.is_given("model_name_or_path") and reads_images(v["model_name_or_path"]):
        # as transformers' model requires gradients, and PEFT looks for target modules in all of it
        part = "model.lora.vision" if enabled else "model.train_vision"
        yield Assignment(part, "all", ("model_name_or_path", "use_peft"), "the tower and its projector, too")
    yield Remark(_LORA, "without effect beside use_peft=False")
    four, eight = "load_in_4bit", "load_in_8bit"
    quantized = [key for key in (four, eight) if v[key]]
    if len(quantized) == 2:
        yield Refusal(eight, True, "load_in_4bit=True is the same setting", "one of both")
    elif quantized and not enabled:
        yield Refusal(quantized[0], True, "quantized weights are frozen, and there are no adapters", "use_peft=True")
    else:
        kind = {four: "nf4", eight: "int8"}[quantized[0]] if quantized else "none"
        yield Assignment("model.quantize", kind, (four, eight))


def mapping_of(v: TrlSettings, key: str) -> dict[str, Any]:
    """Return a mapping that may be written as JSON.

    Raises:
        ConfigError: it is neither.
    """
    value = v[key]
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = "not JSON"
    if value is None or isinstance(value, Mapping):
        return dict(value or {})
    raise ConfigError(f"{key}={shown(v[key])} must be a mapping, or one as JSON, as in TRL")
