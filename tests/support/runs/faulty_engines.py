"""Local engines with a fault, to be put into a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from hwgrpo.rollout.local.engine import LocalEngine
from hwgrpo.rollout.local.frozen_copy import copy_frozen
from hwgrpo.training import setup

Fault = Callable[[LocalEngine], None]


def install(monkeypatch: Any, fault: Fault) -> None:
    """Have runs that are built from now on sample with a faulty engine."""
    plain = setup._engine

    def faulty(*arguments: Any) -> LocalEngine:
        engine = plain(*arguments)
        fault(engine)
        return engine

    monkeypatch.setattr(setup, "_engine", faulty)


def never_takes_new_weights(engine: LocalEngine) -> None:
    """Keep the weights of the start, and claim to have new ones."""
    engine._copy = copy_frozen(engine._model, torch.float32)
    engine.update_weights = lambda version: setattr(engine, "_version", version)


def samples_in_bf16(engine: LocalEngine) -> None:
    """Sample with rounded weights and activations."""
    engine._copy = copy_frozen(engine._model, torch.bfloat16)


def at_temperature(temperature: float) -> Fault:
    """Sample with another temperature than told, and report the log-probs under it."""

    def fault(engine: LocalEngine) -> None:
        plain = engine.generate
        engine.generate = lambda batch, sampling: plain(batch, replace(sampling, temperature=temperature))

    return fault


def damaged_layer(engine: LocalEngine) -> None:
    """Have a matrix of the first layer in another layout, at the start and with all new weights."""
    engine._copy = copy_frozen(engine._model, torch.float32)
    plain = engine.update_weights

    def update_weights(version: int) -> None:
        plain(version)
        damage()

    @torch.no_grad()
    def damage() -> None:
        value = engine._copy.model.layers[0].self_attn.v_proj.weight
        value.copy_(value.flip(0))

    engine.update_weights = update_weights
    damage()
