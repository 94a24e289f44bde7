"""Errors of the run underneath, with the names of TRL's arguments."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from hwgrpo.errors import CheckpointError, ConfigError, DataError, RewardError, RunError
from hwgrpo.migrate.tables.trl_names import ROWS

_ARGUMENTS = {
    **{
        row.here: key
        for key, row in ROWS.items()
        if row.kind == "same" and row.here and "," not in row.here and not row.values and not row.replaces
    },
    "trainer.output_dir": "output_dir",
    "trainer.max_steps": "max_steps",
    "trainer.epochs": "num_train_epochs",
    "trainer.resume=auto": "train(resume_from_checkpoint=True)",
    "trainer.resume='never'": "train()",
    "trainer.resume": "resume_from_checkpoint",
    "model.path": "model",
    "model.tokenizer": "processing_class",
    "model.lora": "peft_config",
    "model.lora.rank": "peft_config",
    "model.lora.target_modules": "peft_config.target_modules",
    "model.attention": "model_init_kwargs['attn_implementation']",
    "rollout.n": "num_generations",
    "trainer.epochs_per_batch": "num_iterations",
    "trainer.process_group_timeout": "ddp_timeout",
    "observe.log_every": "logging_steps",
    "optim.betas.0": "adam_beta1",
    "optim.betas.1": "adam_beta2",
    "algorithm.kl.coef": "beta",
    "algorithm.loss.clip_low": "epsilon",
    "algorithm.loss.clip_high": "epsilon_high",
    **{f"algorithm.loss.name='{name}'": "this loss_type" for name in ("ppo_clip", "gspo")},
    "data.max_prompt_tokens": "max_prompt_length",
    "rollout.max_model_len": "vllm_max_model_length",
    "rollout.gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "rollout.tensor_parallel_size": "vllm_tensor_parallel_size",
    "trainer.save_every": "save_steps",
    "trainer.validate_every": "eval_steps",
    "optim.warmup_steps": "warmup_steps",
    "optim.warmup_ratio": "warmup_steps",
    "optim.schedule": "lr_scheduler_type",
    "backend.name=cpu": "use_cpu=True",
    "model.quantize": "quantization_config",
    "data.train": "train_dataset",
    "data.validation": "eval_dataset",
    "reward.functions": "reward_funcs",
    "rollout.engine='vllm'": "use_vllm=True",
    "rollout.engine=vllm_server": "vllm_mode='server'",
}
"""Setting here, or what an error says to do with it -> the argument of TRL."""
_LONGEST_FIRST = "|".join(map(re.escape, sorted(_ARGUMENTS, key=len, reverse=True)))
_SETTING = re.compile(rf"(?<![\w.])({_LONGEST_FIRST})(?!\w)(?!\.\w)")
_COMMAND_LINE = ", or pass --allow-finished"
_FAILURE_POLICY = re.compile(
    r"mend it(?:, give it more time with timeout)? or, to continue without it, set its .*", re.S
)
_OWN_FAILURE = "mend it; a reward of None leaves a response out"
"""A script has no entries of reward.functions with policies for failures."""


class MissingName(AttributeError):
    """A name that TRL has and `hwgrpo.trl` has not. The message has the remedy."""


@contextmanager
def trl_names() -> Iterator[None]:
    """Name TRL's arguments in the errors of the block."""
    try:
        yield
    except (CheckpointError, ConfigError, DataError, RewardError, RunError) as error:
        error.args = (in_trl_names(str(error)),)
        raise


def in_trl_names(text: str) -> str:
    """Return a message with the names of TRL's arguments."""
    text = _FAILURE_POLICY.sub(_OWN_FAILURE, text.replace(_COMMAND_LINE, ""))
    return _SETTING.sub(lambda match: _ARGUMENTS[match[1]], text)
