"""TRL's GRPOTrainer on this trainer: a TRL script runs after changing only the import.

early_environment.py  the backend's variables, set at the import
trl_trainer.py        `GRPOTrainer`: its constructor and `train`
trainer_arguments.py  its arguments that are renamed or refused
trainer_parts.py      what its parts share, and its log
trl_agents.py         `tools` and `environment_factory`
trl_steps.py          the steps of a run, and what is due after each
trl_evaluation.py     evaluations
script_methods.py     what scripts call beside training
script_accelerator.py `trainer.accelerator`
model_card.py         README.md of a trained model
grpo_config.py        `GRPOConfig`: TRL's arguments
trainer_callbacks.py  calls of transformers' callbacks, and TRL's RichProgressCallback
trl_checkpoints.py    `checkpoint-N` of scripts, and the state of a resumed run
trl_errors.py         errors with the names of TRL's arguments
trl_metrics.py        metrics under TRL's names
trl_datasets.py       datasets of a script
reward_callables.py   reward functions and models of a script
rewards.py            the reward functions of `trl.rewards`
script_arguments.py   ModelConfig, ScriptArguments, TrlParser and their helpers
peft_settings.py      LoraConfig, BitsAndBytesConfig
dataset_mixture.py    DatasetMixtureConfig, get_dataset
experimental.py       names of `trl.experimental`, with their counterparts
other_names.py        names of TRL that have no counterpart
vision_models.py      models that read images
wrapped_model.py      models that `get_peft_model` has wrapped
"""

from hwgrpo.trl.early_environment import set_before_torch

set_before_torch()

from hwgrpo.trl.dataset_mixture import DatasetConfig, DatasetMixtureConfig, get_dataset  # noqa: E402
from hwgrpo.trl.grpo_config import GRPOConfig  # noqa: E402
from hwgrpo.trl.other_names import add_modules  # noqa: E402
from hwgrpo.trl.other_names import attribute as __getattr__  # noqa: E402, F401
from hwgrpo.trl.script_arguments import (  # noqa: E402
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_kbit_device_map,
    get_peft_config,
    get_quantization_config,
)
from hwgrpo.trl.trainer_callbacks import RichProgressCallback  # noqa: E402
from hwgrpo.trl.trl_trainer import GRPOTrainer  # noqa: E402

__all__ = [
    "DatasetConfig",
    "DatasetMixtureConfig",
    "GRPOConfig",
    "GRPOTrainer",
    "ModelConfig",
    "RichProgressCallback",
    "ScriptArguments",
    "TrlParser",
    "get_dataset",
    "get_kbit_device_map",
    "get_peft_config",
    "get_quantization_config",
]

add_modules()
