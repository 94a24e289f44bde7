"""What both sides read and do alike: the setting, the adapter that they start with, requests and gradients."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Sample = dict[str, Any]
"""A batch of responses to compare: prompts, tokens, rewards, loss, and a file with the loss's gradients."""
COMPARED_SCALE = 0.02
"""Standard deviation of `lora_B` where gradients are compared."""


@dataclass(frozen=True)
class Setting:
    """A model, a task and the sizes of a step."""

    model: str
    data: str
    """A task of hwgrpo, a recipe with data and instruction, or `random`: 64 random characters per prompt."""
    reward: str
    prompts: int
    n: int
    response_tokens: int
    lr: float
    beta2: float = 0.95
    dtype: str = "float32"
    lora_rank: int = 0
    """Rank of the adapters on all linear layers; 0 trains all parameters."""
    lora_alpha: float = 0.0
    trl_rows: int = 0
    """Sequences of one forward and backward pass of TRL; 0: all of a step."""


def requests() -> Iterator[Any]:
    """Yield the requests that come in at stdin."""
    for line in sys.stdin:
        yield json.loads(line)


def read_rows(file: Path) -> list[dict[str, Any]]:
    """Return the rows `{prompt, answer}` of a file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def adapters(setting: Setting) -> Any:
    """Return peft's settings of the adapters."""
    from peft import LoraConfig

    return LoraConfig(
        r=setting.lora_rank,
        lora_alpha=setting.lora_alpha,  # pyright: ignore[reportArgumentType]  (annotated int, used as a factor)
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )


def set_adapter(model: Any, *, scale_b: float) -> None:
    """Set a model's adapters to values that depend only on their names' order; `lora_B` is 0 with `scale_b=0`.

    A training starts with `lora_B` at 0, as every adapter does. `lora_A` then has no gradient, so that gradients are
    compared with another value.
    """
    import torch

    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if "lora_A" in name:
                bound = parameter.shape[1] ** -0.5  # peft's own initial values
                parameter.copy_(torch.empty(parameter.shape).uniform_(-bound, bound, generator=draw))
            elif "lora_B" in name:
                parameter.copy_(torch.empty(parameter.shape).normal_(generator=draw) * scale_b)


def save_gradients(model: Any, file: Path) -> None:
    """Write the gradients of a model's parameters."""
    from safetensors.torch import save_file

    # tied weights are one tensor with one gradient
    save_file({name: p.grad.float().clone() for name, p in model.named_parameters() if p.grad is not None}, file)


def versions(*names: str) -> dict[str, str]:
    """Return the versions of packages."""
    from importlib.metadata import version

    return {name: version(name) for name in names}


def parameter_counts(model: Any) -> dict[str, Any]:
    """Return how many parameters a model has, how many are trained, and the dtypes of these and of the rest."""
    trained = [p for p in model.parameters() if p.requires_grad]
    frozen = [p for p in model.parameters() if not p.requires_grad]
    dtypes = {"trained_dtypes": trained, "frozen_dtypes": frozen}
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "trained_parameters": sum(p.numel() for p in trained),
        **{key: sorted({str(p.dtype).removeprefix("torch.") for p in part}) for key, part in dtypes.items()},
    }
