"""`GRPOConfig`: TRL's arguments with TRL's defaults, which become settings here."""

from __future__ import annotations

import dataclasses
import enum
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from transformers import TrainingArguments
from transformers.trainer_utils import IntervalStrategy, SaveStrategy, SchedulerType
from transformers.training_args import OptimizerNames, ParallelMode

from hwgrpo.errors import ConfigError, choice_error, nearest, shown
from hwgrpo.migrate.imports.trl_reader import trl_settings
from hwgrpo.migrate.imports.trl_settings import TrlSettings
from hwgrpo.migrate.tables.trl_names import TRL
from hwgrpo.support.launched_ranks import launched_rank

_ENUMERATIONS: dict[str, type[enum.Enum]] = {
    "eval_strategy": IntervalStrategy,
    "logging_strategy": IntervalStrategy,
    "save_strategy": SaveStrategy,
    "lr_scheduler_type": SchedulerType,
    "optim": OptimizerNames,
}


def argument(name: str, default: Any) -> Any:
    """Return a field with its default, and help from its row in the tables."""
    row = TRL.row_of(TRL.current_name(name)[0])
    assert row is not None, name
    becomes = f"{row.kind if row.kind in ('ignored', 'refused') else 'becomes'} {row.here}".strip()
    text = f"{becomes}: {row.note}" if row.note else becomes
    return field(default=default, metadata={"help": text.replace("%", "%%")})


@dataclass
class _Arguments(TrainingArguments):
    """Fields of TRL 1.16's GRPOConfig."""

    _VALID_DICT_FIELDS: ClassVar = [
        *TrainingArguments._VALID_DICT_FIELDS,
        *("model_init_kwargs", "generation_kwargs", "chat_template_kwargs", "transformers_continuous_batching_config"),
    ]

    learning_rate: float = argument("learning_rate", 1e-6)
    logging_steps: float = argument("logging_steps", 10)
    gradient_checkpointing: bool = argument("gradient_checkpointing", True)
    bf16: bool | None = argument("bf16", None)  # pyright: ignore[reportIncompatibleVariableOverride]
    lr_scheduler_kwargs: dict | str | None = argument("lr_scheduler_kwargs", None)
    use_liger_kernel: bool = argument("use_liger_kernel", False)
    torch_empty_cache_steps: int | None = argument("torch_empty_cache_steps", None)
    remove_unused_columns: bool | None = argument("remove_unused_columns", False)  # pyright: ignore[reportIncompatibleVariableOverride]

    model_init_kwargs: dict | str | None = argument("model_init_kwargs", None)
    trust_remote_code: bool = argument("trust_remote_code", False)
    router_aux_loss_coef: float | None = argument("router_aux_loss_coef", None)
    disable_dropout: bool = argument("disable_dropout", False)
    cast_lm_head_to_fp32: bool = argument("cast_lm_head_to_fp32", False)

    num_generations: int | None = argument("num_generations", 8)
    num_generations_eval: int | None = argument("num_generations_eval", None)
    max_prompt_length: int | None = argument("max_prompt_length", None)
    max_completion_length: int | None = argument("max_completion_length", 512)
    ds3_gather_for_generation: bool = argument("ds3_gather_for_generation", True)
    shuffle_dataset: bool | None = argument("shuffle_dataset", True)
    pad_to_multiple_of: int | str | None = argument("pad_to_multiple_of", "auto")

    generation_batch_size: int | None = argument("generation_batch_size", None)
    steps_per_generation: int | None = argument("steps_per_generation", None)
    temperature: float = argument("temperature", 1.0)
    top_p: float = argument("top_p", 1.0)
    top_k: int = argument("top_k", 0)
    min_p: float | None = argument("min_p", None)
    generation_kwargs: dict | str | None = argument("generation_kwargs", None)
    chat_template_kwargs: dict | str | None = argument("chat_template_kwargs", None)
    repetition_penalty: float = argument("repetition_penalty", 1.0)
    cache_implementation: str | None = argument("cache_implementation", None)

    use_vllm: bool = argument("use_vllm", False)
    vllm_mode: str = argument("vllm_mode", "colocate")
    vllm_model_impl: str = argument("vllm_model_impl", "vllm")
    vllm_enable_sleep_mode: bool = argument("vllm_enable_sleep_mode", False)
    vllm_structured_outputs_regex: str | None = argument("vllm_structured_outputs_regex", None)
    vllm_server_base_url: str | None = argument("vllm_server_base_url", None)
    vllm_server_host: str = argument("vllm_server_host", "0.0.0.0")
    vllm_server_port: int = argument("vllm_server_port", 8000)
    vllm_server_timeout: float = argument("vllm_server_timeout", 240.0)
    vllm_group_port: int = argument("vllm_group_port", 51216)
    vllm_gpu_memory_utilization: float = argument("vllm_gpu_memory_utilization", 0.3)
    vllm_max_model_length: int | None = argument("vllm_max_model_length", None)
    vllm_tensor_parallel_size: int = argument("vllm_tensor_parallel_size", 1)

    beta: float = argument("beta", 0.0)
    num_iterations: int = argument("num_iterations", 1)
    epsilon: float = argument("epsilon", 0.2)
    delta: float | None = argument("delta", None)
    epsilon_high: float | None = argument("epsilon_high", None)
    sapo_temperature_neg: float = argument("sapo_temperature_neg", 1.05)
    sapo_temperature_pos: float = argument("sapo_temperature_pos", 1.0)
    vespo_k_pos: float = argument("vespo_k_pos", 2.0)
    vespo_lambda_pos: float = argument("vespo_lambda_pos", 3.0)
    vespo_k_neg: float = argument("vespo_k_neg", 3.0)
    vespo_lambda_neg: float = argument("vespo_lambda_neg", 2.0)
    importance_sampling_level: str = argument("importance_sampling_level", "token")
    reward_weights: list[float] | None = argument("reward_weights", None)
    multi_objective_aggregation: str = argument("multi_objective_aggregation", "sum_then_normalize")
    scale_rewards: str = argument("scale_rewards", "group")
    loss_type: str = argument("loss_type", "dapo")
    mask_truncated_completions: bool = argument("mask_truncated_completions", False)
    sync_ref_model: bool = argument("sync_ref_model", False)
    ref_model_mixup_alpha: float = argument("ref_model_mixup_alpha", 0.6)
    ref_model_sync_steps: int = argument("ref_model_sync_steps", 512)
    top_entropy_quantile: float = argument("top_entropy_quantile", 1.0)
    entropy_coef: float = argument("entropy_coef", 0.0)
    use_adaptive_entropy: bool = argument("use_adaptive_entropy", False)
    entropy_coef_min: float = argument("entropy_coef_min", 0.0)
    entropy_coef_max: float = argument("entropy_coef_max", 1.0)
    entropy_coef_delta: float = argument("entropy_coef_delta", 0.005)
    entropy_target: float = argument("entropy_target", 0.2)
    max_tool_calling_iterations: int | None = argument("max_tool_calling_iterations", None)
    vllm_importance_sampling_correction: bool = argument("vllm_importance_sampling_correction", True)
    vllm_importance_sampling_mode: str = argument("vllm_importance_sampling_mode", "sequence_mask")
    vllm_importance_sampling_clip_max: float | None = argument("vllm_importance_sampling_clip_max", 3.0)
    vllm_importance_sampling_clip_min: float | None = argument("vllm_importance_sampling_clip_min", None)
    off_policy_mask_threshold: float | None = argument("off_policy_mask_threshold", None)
    use_bias_correction_kl: bool = argument("use_bias_correction_kl", True)

    log_completions: bool = argument("log_completions", False)
    log_multimodal: bool = argument("log_multimodal", True)
    num_completions_to_print: int | None = argument("num_completions_to_print", None)
    log_unique_prompts: bool = argument("log_unique_prompts", False)
    log_completions_hub_repo: str | None = argument("log_completions_hub_repo", None)

    use_transformers_continuous_batching: bool = argument("use_transformers_continuous_batching", False)
    transformers_continuous_batching_config: dict | str | None = argument(
        "transformers_continuous_batching_config", None
    )
    use_transformers_paged: bool = argument("use_transformers_paged", False)
    vllm_importance_sampling_cap: float | None = argument("vllm_importance_sampling_cap", None)

    def __post_init__(self) -> None:
        """Normalize values as transformers and TRL do. The trainer selects the device, not the arguments."""
        if self.vllm_importance_sampling_cap is not None:
            key = "vllm_importance_sampling_clip_max"
            if getattr(self, key) not in (_DEFAULTS[key], self.vllm_importance_sampling_cap):
                raise ConfigError(f"vllm_importance_sampling_cap and {key} are one argument; leave one of them out")
            self.vllm_importance_sampling_clip_max = self.vllm_importance_sampling_cap
        self.output_dir = os.path.expanduser(self.output_dir or "trainer_output")
        self.bf16 = not self.fp16 if self.bf16 is None else self.bf16  # pyright: ignore[reportIncompatibleVariableOverride]
        self.scale_rewards = {"True": "group", "False": "none"}.get(str(self.scale_rewards), self.scale_rewards)
        for name, kind in _ENUMERATIONS.items():
            try:
                setattr(self, name, kind(getattr(self, name)))
            except ValueError:
                raise choice_error(name, getattr(self, name), [each.value for each in kind]) from None
        if self.report_to in ("none", None, ["none"]):
            self.report_to = []
        elif isinstance(self.report_to, str):
            self.report_to = [self.report_to]
        if self.greater_is_better is None and self.metric_for_best_model is not None:
            self.greater_is_better = not self.metric_for_best_model.endswith("loss")
        self.do_eval = self.do_eval or self.eval_strategy != IntervalStrategy.NO


@dataclass(init=False)
class GRPOConfig(_Arguments):
    """Arguments of `GRPOTrainer`, as in TRL 1.16, with TRL's defaults.

    Names that tutorials teach and TRL does not have (`kl_coef`, `max_new_tokens`, ...) are read with a notice.
    `docs/from-trl.md` has what becomes of each.

    Args:
        output_dir: folder of the run; None: trainer_output.
        **arguments: fields of TRL's GRPOConfig.

    Raises:
        ConfigError: an unknown argument, with the nearest known one; an illegal value; batch sizes that are no whole
            groups, with the nearest legal ones.
    """

    def __init__(self, output_dir: str | None = None, **arguments: Any) -> None:
        super().__init__(output_dir=output_dir, **_renamed(arguments))

    def __post_init__(self) -> None:
        """Check the values; a dataclass that adds fields comes here without `__init__` above."""
        given = {name: getattr(self, name) for name in FIELDS}
        super().__post_init__()
        self._given = {name for name in FIELDS if given[name] not in _ABSENT.get(name, (_DEFAULTS[name],))}
        self._made = {name: getattr(self, name) for name in FIELDS}
        if self.warmup_steps is None:
            raise ConfigError("warmup_steps=None must be a number of updates, or a share of them below 1; leave it out")
        if self.beta is None:
            raise ConfigError("beta=None must be a number; 0.0 leaves the KL term out")
        settings = self.settings()
        if settings["learning_rate"] <= 0:
            raise ConfigError(f"learning_rate={self.learning_rate} must be above 0, e.g. 1e-6")
        settings.batches()

    def settings(self, **known: Any) -> TrlSettings:
        """Return the arguments that were given, or set later, as the settings of a TRL run.

        Args:
            **known: `prompts`, `longest_prompt`, `evaluates` and `agents` of `trl_settings`.

        Raises:
            ConfigError: an illegal value, or a field of this transformers version that has no counterpart.
        """
        values = {name: _plain(getattr(self, name)) for name in self.given_names()}
        values["output_dir"] = self.output_dir
        unknown = [name for name in values if TRL.row_of(TRL.current_name(name)[0]) is None]
        if unknown:
            raise ConfigError(
                f"{unknown[0]}={shown(values[unknown[0]])}: TRL 1.16 has no such field, which this version of "
                "transformers added; leave it at its default"
            )
        return trl_settings(values, os.environ, **known)

    def given_names(self) -> list[str]:
        """Return the names of the arguments that were given a value other than the default, or set later."""
        return [name for name in FIELDS if name in self._given or getattr(self, name) != self._made[name]]

    @property
    def world_size(self) -> int:
        """Return the number of processes that torchrun or `accelerate launch` started."""
        return launched_rank().world_size

    @property
    def process_index(self) -> int:
        """Return this process's rank."""
        return launched_rank().rank

    @property
    def local_process_index(self) -> int:
        """Return this process's rank on its host."""
        return launched_rank().local_rank

    @property
    def parallel_mode(self) -> ParallelMode:
        """Return whether there are several processes."""
        return ParallelMode.DISTRIBUTED if self.world_size > 1 else ParallelMode.NOT_PARALLEL

    @property
    def n_gpu(self) -> int:
        """Return the devices of this process: one, as always here."""
        return 1

    @property
    def device(self) -> torch.device:
        """Return the CPU, where tensors of arguments are; `trainer.model.device` is the run's."""
        return torch.device("cpu")


FIELDS = tuple(each.name for each in dataclasses.fields(_Arguments) if each.init)
_DEFAULTS = {
    each.name: each.default if each.default_factory is dataclasses.MISSING else each.default_factory()
    for each in dataclasses.fields(_Arguments)
}
_ABSENT = {"include_num_input_tokens_seen": ("no", False), "debug": ("", None)}
"""Values that HfArgumentParser makes of a default, and the default."""


def _renamed(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments under the names of the fields, with a notice of each that was renamed or dropped.

    Raises:
        ConfigError: an unknown name.
    """
    result, unknown = {}, []
    for name, value in arguments.items():
        key, why = TRL.current_name(name)
        row = TRL.row_of(key)
        if name in FIELDS:
            result[name] = value
        elif key in FIELDS and key not in arguments:
            result[key] = value
            note(f"{name}={shown(value)}: {why} {key}")
        elif key in FIELDS:
            raise ConfigError(f"{name} and {key} are one argument; leave one of them out")
        elif row is not None and row.kind == "ignored":
            note(f"{name}={shown(value)} has no meaning here: {row.note}")
        else:
            near = nearest(name, [*FIELDS, *TRL.older, *TRL.tutorials])
            unknown.append(f"unknown argument {name}" + (f": did you mean {near}?" if near else ""))
    if unknown:
        raise ConfigError("GRPOConfig: " + "; ".join(unknown))
    return result


def note(text: str) -> None:
    """Print a notice on rank 0."""
    if launched_rank().rank == 0:
        print(f"hwgrpo: note: {text}", file=sys.stderr)


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
