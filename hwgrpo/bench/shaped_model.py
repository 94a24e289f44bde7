"""A randomly initialized model of a published shape, for measurements that no weights are needed for."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import transformers

from hwgrpo.data import tasks
from hwgrpo.models.tiny import character_tokenizer

REWARD = """
def noise(data_source, solution_str, ground_truth, extra_info):
    return sum(map(ord, solution_str)) % 11 / 10
"""
"""Random weights give no right response, and equal rewards have zero advantages: this reward differs by response."""
TINY = {
    "num_hidden_layers": 2, "vocab_size": 400, "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def shape_of(path: str | Path, *, tiny: bool = False) -> Any:
    """Return the configuration of a shape of configs/models/.

    Args:
        path: its JSON file, or a folder with a config.json.
        tiny: of the same architecture, with a few thousand parameters.
    """
    config = copy.deepcopy(transformers.AutoConfig.from_pretrained(path))
    if tiny:
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[: TINY["num_hidden_layers"]]
        for name, value in TINY.items():
            setattr(config, name, value)
        config.eos_token_id = config.bos_token_id = None  # of the full vocabulary
    return config


def random_model(config: Any, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return a causal LM in evaluation mode whose weights are drawn on the device: a CPU takes 20 s for 0.5B."""
    torch.manual_seed(0)
    with device:
        model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def save_shaped_model(shape: str | Path, folder: Path, device: torch.device, *, tiny: bool = False) -> None:
    """Save a random bf16 model with a character tokenizer in which each id is text, and `REWARD` as reward.py."""
    model = random_model(shape_of(shape, tiny=tiny), device)
    tokenizer = character_tokenizer(tasks.parse_task("task://sort").alphabet)
    tokenizer.add_tokens([f"<{i}>" for i in range(len(tokenizer), model.config.vocab_size)])
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.config.bos_token_id = model.generation_config.bos_token_id = tokenizer.bos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
