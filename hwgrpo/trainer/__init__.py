"""Training from Python: `from hwgrpo import Trainer`. Importing it imports no torch.

grpo_trainer.py    `Trainer`: the run of `hwgrpo train` as an object
given_settings.py  settings with the prompts and reward functions that were given as objects
given_model.py     a model or tokenizer given as an object, written to a folder that the run loads
step_record.py     `Step`: what a step logged
process_state.py   what a run changes in its process, and its restoration
"""

from hwgrpo.trainer.grpo_trainer import Trainer
from hwgrpo.trainer.step_record import Step

__all__ = ["Step", "Trainer"]
