"""New adapters of the compared step: as large as trained ones, since a fresh adapter is the identity."""

from __future__ import annotations

import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hwgrpo.config import Config
from hwgrpo.models.lora import TRAINED_ADAPTER, apply_lora, without_weights

SHARE = 0.1
"""Size of an adapter's output as a share of its input's."""


def with_adapter(config: Config, model: Any, folder: Path) -> Config:
    """Return settings that train an existing adapter of random weights where they ask for a new one.

    Args:
        config: settings of the step.
        model: the causal LM on the meta device; it gets adapters.
        folder: gets the adapter.
    """
    lora = config.model.lora
    if lora.adapter is not None or not lora.rank:
        return config
    from peft import get_peft_model_state_dict

    with without_weights():
        wrapped = apply_lora(model, lora)
    factor = lora.alpha / (math.sqrt(lora.rank) if lora.rslora else lora.rank)
    generator = torch.Generator().manual_seed(config.trainer.seed)
    tensors = {}
    # from A to B, each [out, in], of every layer in the same order on every rank
    for name, empty in sorted(get_peft_model_state_dict(wrapped, adapter_name=TRAINED_ADAPTER).items()):
        size = SHARE / factor if "lora_B" in name else 1.0
        values = torch.randn(empty.shape, generator=generator)
        tensors[name] = values * size / math.sqrt(empty.shape[-1])
    folder.mkdir()
    wrapped.peft_config[TRAINED_ADAPTER].save_pretrained(str(folder))
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = deepcopy(config)
    config.model.lora.adapter, config.model.lora.rank = str(folder), 0
    return config
