"""Checkpoints of models without a run around them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from hwgrpo_backends.cpu import BACKEND
from hwgrpo_backends.device import Device
from torch import nn

from hwgrpo.training.checkpoint import checkpoint_files, restore
from hwgrpo.training.checkpoint.saver import Saver
from hwgrpo.training.policy.policy_model import HeadOptions, PolicyModel
from hwgrpo.training.strategies.single import Single
from hwgrpo.training.strategies.strategy import Strategy
from tests.support.models.tiny import settings


def policy_of(model: Any) -> PolicyModel:
    return PolicyModel(model, compute_dtype=torch.float32, options=HeadOptions())


def trained(policy: PolicyModel, strategy: Strategy | None = None, updates: int = 1) -> Any:
    """Wrap a policy and update it, with gradients of no meaning."""
    strategy = strategy or Single(torch.device("cpu"), "gloo")
    strategy.wrap(policy, settings())
    for _ in range(updates):
        update(strategy)
    return strategy


def update(strategy: Any) -> None:
    for parameter in strategy.policy.parameters():
        parameter.grad = torch.ones_like(parameter)
    strategy.step(1e-3)


def saver(
    root: Path,
    strategy: Strategy,
    *,
    keep: int = 2,
    asynchronous: bool = True,
    note: Callable[[str], None] = print,
    timeout: float = 60.0,
) -> Saver:
    sampler = {"size": 8, "seed": 0, "shuffle": True, "epoch": 0, "position": 4}
    state = {"sampler": sampler, "updates_done": 1, "config": "{}"}
    return Saver(
        root,
        strategy,
        Device(BACKEND),
        keep=keep,
        asynchronous=asynchronous,
        state=lambda: state,
        extra_files=dict,
        note=note,
        timeout=timeout,
    )


def saved(root: Path, strategy: Strategy, step: int = 5) -> Path:
    """Write a checkpoint; return its folder."""
    saver(root, strategy).save(step, last=True)
    return checkpoint_files.folder_of(root, step)


def load(folder: Path, strategy: Strategy, model: nn.Module) -> None:
    """Put a checkpoint into a wrapped policy."""
    checkpoint = restore.verify(folder, strategy)
    restore.restore(checkpoint, strategy.param_shards(), restore.trainable_shapes(model))
    strategy.refresh_from_shards()


@contextmanager
def flipped(path: Path, bit: int) -> Iterator[None]:
    """Flip one bit of a file within the block."""
    content = path.read_bytes()
    damaged = bytearray(content)
    damaged[bit // 8] ^= 1 << bit % 8
    path.write_bytes(damaged)
    try:
        yield
    finally:
        path.write_bytes(content)


class Gate:
    """Holds up every write of a checkpoint's files until it is opened, as a disk does that has hung."""

    def __init__(self, monkeypatch: Any) -> None:
        self.reached = threading.Event()
        """A write has begun."""
        self._open = threading.Event()
        plain = checkpoint_files.write_tensors

        def slow(*arguments: Any) -> Any:
            self.reached.set()
            assert self._open.wait(60), "nobody opened the gate"
            return plain(*arguments)

        monkeypatch.setattr(checkpoint_files, "write_tensors", slow)

    def open(self) -> None:
        self._open.set()
