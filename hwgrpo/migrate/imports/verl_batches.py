"""verl's settings of data, lengths, batches, the model and the optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hwgrpo.errors import ConfigError
from hwgrpo.migrate.imports.conversion import Assignment, Converted, Refusal, Remark
from hwgrpo.migrate.imports.variable_text import joined, known
from hwgrpo.migrate.imports.verl_algorithm import value_of
from hwgrpo.migrate.imports.verl_settings import ACTOR, MODEL, ROLLOUT, VerlSettings

_BATCH, _MINI, _EPOCHS = "data.train_batch_size", ACTOR + "ppo_mini_batch_size", ACTOR + "ppo_epochs"
_PROMPT, _RESPONSE = "data.max_prompt_length", "data.max_response_length"
_OPTIM = ACTOR + "optim."
SEQUENCE_PARALLEL = tuple(
    ACTOR + each
    for each in (
        *("ulysses_sequence_parallel_size", "fsdp_config.ulysses_sequence_parallel_size"),
        *("megatron.context_parallel_size", "engine.cp", "veomni.ulysses_parallel_size"),
    )
)
_MEGATRON = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""Megatron's modules -> those of Hugging Face's models that hold the same matrices."""
TENSOR_PARALLEL = (ACTOR + "megatron.tensor_model_parallel_size", ACTOR + "engine.tp")


def data(v: VerlSettings) -> Iterator[Converted]:
    """Convert the files, the limits of lengths, the chat template's options."""
    train, validation = "data.train_files", "data.val_files"
    yield Assignment("data.train", _single(v[train]), (train,))
    if v.is_given(validation):
        yield Assignment("data.validation", _single(v[validation]), (validation,))
    for rows, here in (("train_max_samples", "max_rows"), ("val_max_samples", "validation_max_rows")):
        yield from _first_rows(v, f"data.{rows}", f"data.{here}")
    filters, truncates = "data.filter_overlong_prompts", "data.truncation"
    if v[filters]:
        yield Assignment("data.overlong", "filter", (filters,))
        yield Remark((truncates,), "without effect beside filter_overlong_prompts=True")
    elif here := value_of(truncates, v[truncates]):
        yield Assignment("data.overlong", here, (truncates, filters))
    else:
        yield Refusal(truncates, v[truncates], "prompts are not cut in the middle", "left, right or error")
    yield Assignment("data.max_prompt_tokens", v[_PROMPT], (_PROMPT,))
    longest = ROLLOUT + "prompt_length"
    if v[longest] is not None and v[longest] < v[_PROMPT]:
        yield Refusal(longest, v[longest], f"it is below data.max_prompt_length={v[_PROMPT]}", "the same value")
    yield Remark((longest,), "the engine takes prompts of up to data.max_prompt_tokens")
    response = ROLLOUT + "response_length" if v[ROLLOUT + "response_length"] is not None else _RESPONSE
    yield Assignment(
        "rollout.max_response_tokens", v[response], (response, *([_RESPONSE] if response != _RESPONSE else []))
    )
    options = {**(v["data.apply_chat_template_kwargs"] or {}), **v.below("data.apply_chat_template_kwargs.")}
    keys = tuple(key for key in v.given if key.startswith("data.apply_chat_template_kwargs"))
    yield Assignment("data.chat_template_kwargs", options, keys)


def _first_rows(v: VerlSettings, key: str, here: str) -> Iterator[Converted]:
    """Convert a limit of rows; verl's are the first ones only without data.shuffle."""
    limited = v[key] > 0
    seed = "data.seed" if v["data.seed"] is not None else "chance, others in each run"
    drawn = f"the first rows; verl draws them by {seed}; shuffle the file where its order matters"
    yield Assignment(here, v[key] if limited else 0, (key,), drawn if limited and v["data.shuffle"] else "")


def _single(files: Any) -> Any:
    return files[0] if isinstance(files, list) and len(files) == 1 else files


def model(v: VerlSettings) -> Iterator[Converted]:
    """Convert the model's code and its adapters."""
    trusts = (MODEL + "trust_remote_code", "data.trust_remote_code")
    yield Assignment("model.trust_remote_code", any(v[key] for key in trusts), trusts)
    rank = MODEL + ("lora.rank" if v[MODEL + "lora.rank"] else "lora_rank")
    alpha = MODEL + ("lora.alpha" if v[MODEL + "lora.rank"] else "lora_alpha")
    targets = MODEL + ("lora.target_modules" if v.is_given(MODEL + "lora.target_modules") else "target_modules")
    dropout, adapter, enable = MODEL + "lora.dropout", MODEL + "lora_adapter_path", ACTOR + "lora.enable"
    keys = (
        MODEL + "lora_rank",
        alpha,
        targets,
        dropout,
        MODEL + "lora.rank",
        MODEL + "lora.alpha",
        MODEL + "lora_alpha",
    )
    if v[enable] and not v[rank] and not v[adapter]:
        yield Refusal(enable, True, "the rank of the adapters is missing", "actor_rollout_ref.model.lora_rank=16")
    if v[enable] is False or not (v[rank] or v[adapter]):
        yield Assignment("model.lora.rank", 0, (enable, MODEL + "lora_rank"))
        yield Remark((*keys, MODEL + "target_modules"), "all parameters are trained")
        return
    if v[adapter]:
        yield Remark((rank, alpha), "those of the adapter of lora_adapter_path")
    else:
        yield Assignment("model.lora.rank", v[rank], (rank, enable))
        yield Assignment("model.lora.alpha", float(v[alpha]), (alpha,))
    yield Remark(keys, "set by another key")
    yield from _targets(v, targets)
    yield Assignment("model.lora.dropout", v[dropout], (dropout,))


def _targets(v: VerlSettings, key: str) -> Iterator[Converted]:
    """Convert the modules that get adapters, of Hugging Face or of Megatron."""
    value = v[key]
    if not isinstance(value, list):
        value = ["all-linear" if known(value) == "all-linear" else joined("re:", value)]
    megatron = [name for name in map(str, known(value)) if name.rpartition(".")[2].startswith("linear_")]
    unknown = [name for name in megatron if name not in _MEGATRON]
    if unknown:
        yield Refusal(
            key, v[key], f"{unknown[0]} is Megatron's", ", ".join((*_MEGATRON, "names of the model's modules"))
        )
        return
    note = "Megatron's names are those of the model's modules here" if _MEGATRON.keys() & {*known(value)} else ""
    names = [name for each in value for name in _MEGATRON.get(known(each), (each,))]
    yield Assignment("model.lora.target_modules", names, (key,), note)


def batches(v: VerlSettings) -> Iterator[Converted]:
    """Convert the batch sizes, which count prompts in verl as here, and the size of micro-batches."""
    batch, mini = v[_BATCH], v[_MINI]
    if batch < mini or batch % mini:
        yours = "" if v.is_given(_MINI) and v.is_given(_BATCH) else " (a default of verl)"
        raise ConfigError(
            f"{_BATCH}={batch} must be a multiple of {_MINI}={mini}{yours}, as in verl: both count prompts; give "
            f"{_MINI}={batch} for one update per batch"
        )
    yield Assignment("trainer.prompts_per_step", batch, (_BATCH,))
    yield Assignment("trainer.prompts_per_update", None if mini == batch else mini, (_MINI,))
    yield Assignment("rollout.n", v[ROLLOUT + "n"], (ROLLOUT + "n",))
    yield from _micro_batches(v)


def _micro_batches(v: VerlSettings) -> Iterator[Converted]:
    dynamic, budget = ACTOR + "use_dynamic_bsz", ACTOR + "ppo_max_token_len_per_gpu"
    sizes = (ACTOR + "ppo_micro_batch_size_per_gpu", ACTOR + "ppo_micro_batch_size")
    shared = max([1, *(v[key] for key in (*SEQUENCE_PARALLEL, *TENSOR_PARALLEL))])
    response = v[ROLLOUT + "response_length"] or v[_RESPONSE]
    longest = -(-(v[_PROMPT] + response) // shared)
    if v[dynamic]:
        note = f"at least one sequence of {longest} tokens" if v[budget] < longest else ""
        yield Assignment("trainer.tokens_per_micro_batch", max(v[budget], longest), (budget, dynamic), note)
        yield Remark(sizes, "without effect beside use_dynamic_bsz=True")
        return
    yield Remark((budget,), "without effect beside use_dynamic_bsz=False")
    given = next((key for key in sizes if v[key] is not None), None)
    if given is None:
        yield Remark((dynamic, *sizes), "micro-batches are cut by tokens, here as many as the device's default")
        return
    count = v[given]
    if given == sizes[1]:  # of all ranks that have sequences of their own
        processes = v.launch().processes
        if processes is None:
            why = f"{given}={count} is shared by devices whose number is not known"
            yield Remark((dynamic, given), f"{why}; micro-batches are cut by tokens, here the device's default")
            return
        count = max(1, count // max(1, processes // shared))
    note = f"{count} sequences of {v[_PROMPT]} + {response} tokens" + (f" over {shared} ranks" if shared > 1 else "")
    yield Assignment("trainer.tokens_per_micro_batch", count * longest, (given, dynamic), note)
    yield Remark(sizes, "without effect beside the size per device")


def optimizer(v: VerlSettings) -> Iterator[Converted]:
    """Convert gradient clipping and the schedule of the learning rate."""
    clips = (ACTOR + "grad_clip", _OPTIM + "clip_grad")
    given = [key for key in clips if v.is_given(key)]
    if len(given) == 2 and v[given[0]] != v[given[1]]:
        yield Refusal(clips[1], v[clips[1]], f"grad_clip={v[clips[0]]:g} is the same setting", "one of both")
    yield Assignment("optim.grad_clip", v[(given or clips)[0]], clips)
    yield from _warmup(v)
    ratio, least = _OPTIM + "min_lr_ratio", _OPTIM + "min_lr"
    if v[least]:
        yield Assignment("optim.min_lr_ratio", v[least] / v[_OPTIM + "lr"], (least,))
        yield Remark((ratio,), "without effect beside min_lr")
    else:
        yield Assignment("optim.min_lr_ratio", v[ratio] or 0.0, (ratio, least))


def _warmup(v: VerlSettings) -> Iterator[Converted]:
    steps, share, total = _OPTIM + "lr_warmup_steps", _OPTIM + "lr_warmup_steps_ratio", "trainer.total_training_steps"
    updates = v[_EPOCHS] * v[_BATCH] // v[_MINI]
    counted = v[steps] or 0
    origins: tuple[str, ...] = (steps,)
    if counted <= 0:  # as in verl's engine
        origins = (share, steps)
        if v[share] and not v[total]:
            yield Assignment("optim.warmup_ratio", v[share], origins, "verl rounds it down to whole steps")
            return
        counted = int(v[share] * (v[total] or 0))
    else:
        yield Remark((share,), "without effect beside lr_warmup_steps")
    note = f"{counted} steps of {updates} updates" if updates > 1 and counted else ""
    yield Assignment("optim.warmup_steps", counted * updates, origins, note)
