"""What 8 bits cost: the updates of 100 steps of a small model with 8-bit states, beside those with fp32 states.

As a program, it prints the error of bitsandbytes' AdamW8bit, which this process alone imports: peft would find it in
others.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config

from hwgrpo.training.strategies.optimizer import build_optimizer
from tests.support.models.tiny import settings

LR, STEPS, VOCABULARY, LENGTH = 1e-3, 100, 128, 24

Optimizer = Callable[[nn.Module], torch.optim.Optimizer]


def maker_of(name: str) -> Optimizer:
    """Return the maker of our optimizer of that name."""
    return lambda model: build_optimizer(model, settings(f"optim.name={name}", f"optim.lr={LR}").optim)


def error_of_updates(make: Optimizer) -> float:
    """Return the norm of an optimizer's total update minus that of fp32 AdamW, relative to the latter.

    Both step with the same gradients, those of a model that learns arithmetic sequences with fp32 AdamW.
    """
    exact, rounded, start = _model(), _model(), _model()
    optimizers = maker_of("adamw")(exact), make(rounded)
    draw = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        first, difference = (
            torch.randint(low, high, (8, 1), generator=draw) for low, high in ((0, VOCABULARY), (1, 4))
        )
        ids = (first + difference * torch.arange(LENGTH)) % VOCABULARY
        exact(input_ids=ids, labels=ids).loss.backward()
        for own, other in zip(rounded.parameters(), exact.parameters(), strict=True):
            own.grad = None if other.grad is None else other.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    update, expected = (_flat(model) - _flat(start) for model in (rounded, exact))
    return float((update - expected).norm() / expected.norm())


def _model() -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=VOCABULARY,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config).float()


def _flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def main() -> None:
    """Print the error of bitsandbytes' optimizer."""
    from bitsandbytes.optim import AdamW8bit  # pyright: ignore[reportMissingImports]

    options = {"lr": LR, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    print(error_of_updates(lambda model: AdamW8bit(model.parameters(), **options)))


if __name__ == "__main__":
    main()
