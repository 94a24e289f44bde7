"""GRPO post-training of language models on CUDA, ROCm, Ascend NPU and CPU. Importing it imports no torch.

api.py        the names that code of your own may import
trl/          TRL's GRPOTrainer, for scripts of TRL
migrate/      recipes from the settings of verl and TRL, and what their names are called here
trainer/      `Trainer`, for use from Python
cli/          one file per command; __main__.py runs them
report/ bench/ doctor/   the page of a run; measurements; diagnosis of a host
planning/     memory and time of a run: `--dry-run` and `hwgrpo plan`
training/     the loop, its set-up, policy, strategies, updates, checkpoints
rollout/      engines that sample responses
observe/      metrics, loggers, terminal, warnings, summary
algorithms/   what GRPO computes, as pure functions
models/       loading and changes of transformers models
data/         prompts
rewards/      reward functions
sandbox/      execution of programs that a model wrote, and the reward `code`
config/       the settings: schema, loading, checks
values.py     the values that flow through one step; step_rewards.py those of process supervision; ragged.py their
              columns: selecting, splitting, concatenating, storing
catalog.py    every name that a setting may choose; registry.py is how it is looked up
errors.py     errors with key, value, remedy
launched_ranks.py   the ranks of this host
user_code.py  functions of the user's own, from files; given_objects.py those given as Python objects; own_copies.py
              copies of what they are called with; torch_settings.py torch's settings, kept while they run
response_text.py   the text of responses that rewards and stop strings see
reasoning_gym_tasks.py   addresses of tasks of the package reasoning-gym
pretrained_tokenizer.py   a tokenizer as its tokenizer.json defines it
child_processes.py   child processes: their hash seed, their end; framed_messages.py   messages in a pipe
http_exchange.py   HTTP requests with limits on time and size
file_systems.py   locks, durable writes and copies; permissions.py; scratch.py   folders that end with their process
template_limit.py   a time limit for chat templates; template_clock.py   the date that those with a clock write
run_files.py   files of a run folder, written through no link and read in bounds
paths.py, text.py, jsonlines.py, terminal_width.py, waits.py, closing.py   small helpers
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from hwgrpo.config import Config
    from hwgrpo.trainer import Step, Trainer

__all__ = ["Config", "Step", "Trainer", "__version__"]


def __getattr__(name: str) -> Any:
    """Import `Config`, `Step` or `Trainer` at its first use."""
    homes = {"Config": "hwgrpo.config", "Step": "hwgrpo.trainer", "Trainer": "hwgrpo.trainer"}
    if name not in homes:
        raise AttributeError(f"module 'hwgrpo' has no attribute {name!r}")
    return getattr(importlib.import_module(homes[name]), name)
