"""TRL's GRPOTrainer on this trainer: a TRL script runs after changing only the import.

grpo_config.py   `GRPOConfig`: TRL's arguments
"""

from hwgrpo.trl.grpo_config import GRPOConfig

__all__ = ["GRPOConfig"]
