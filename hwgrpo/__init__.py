"""GRPO post-training of language models on CUDA, ROCm, Ascend NPU and CPU. Importing it imports no torch.

api.py        the names that code of your own may import
trl/          TRL's GRPOTrainer, for scripts of TRL
migrate/      recipes from the settings of verl and TRL, and what their names are called here
trainer/      `Trainer`, for use from Python
cli/          one file per command; __main__.py runs them
replay/       a captured step, run again and compared
report/ bench/ doctor/ parity/   the page of a run; measurements; diagnosis of a host; a step against fp64
planning/     memory and time of a run: `--dry-run` and `hwgrpo plan`
training/     the loop, its set-up, policy, strategies, updates, checkpoints
agents/       trajectories of several turns, with tools and in environments
rollout/      engines that sample responses
observe/      metrics, loggers, terminal, warnings, summary
algorithms/   what GRPO computes, as pure functions
models/       loading and changes of transformers models
data/         prompts
rewards/      reward functions
research/     process and online reward models, and their training
sandbox/      execution of programs that a model wrote, and the reward `code`
config/       the settings: schema, loading, checks
values.py     the values that flow through one step; ragged.py their columns: select, split, concatenate, store
catalog.py    every name that a setting may choose; registry.py is how it is looked up
user_code.py  functions of the user's own, from files; own_copies.py copies of what they are called with
errors.py     errors with key, value, remedy
support/      files, processes, texts and waits
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
