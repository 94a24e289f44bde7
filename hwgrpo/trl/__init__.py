"""TRL's GRPOTrainer on this trainer: a TRL script runs after changing only the import.

trl_trainer.py        `GRPOTrainer`
grpo_config.py        `GRPOConfig`: TRL's arguments
trainer_callbacks.py  calls of transformers' callbacks
trl_metrics.py        metrics under TRL's names
trl_datasets.py       datasets of a script
reward_callables.py   reward functions and models of a script
script_arguments.py   ModelConfig, ScriptArguments, TrlParser and their helpers
peft_settings.py      LoraConfig, BitsAndBytesConfig
"""

from hwgrpo.trl.grpo_config import GRPOConfig
from hwgrpo.trl.script_arguments import (
    ModelConfig,
    ScriptArguments,
    TrlParser,
    get_kbit_device_map,
    get_peft_config,
    get_quantization_config,
)
from hwgrpo.trl.trl_trainer import GRPOTrainer

__all__ = [
    "GRPOConfig",
    "GRPOTrainer",
    "ModelConfig",
    "ScriptArguments",
    "TrlParser",
    "get_kbit_device_map",
    "get_peft_config",
    "get_quantization_config",
]
