"""What a rollout engine is made from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from hwgrpo_backends.device import Device

from hwgrpo.rollout.pause_gate import Gate
from hwgrpo.rollout.weights import PolicyWeights

if TYPE_CHECKING:
    from hwgrpo.config.schema import Config


@dataclass(frozen=True)
class Apart:
    """A whole copy of a model whose own weights are in shards, or in use while responses are sampled."""

    replica: Any
    """The copy, in the dtype of rollouts."""
    trainable: Callable[[], Iterator[tuple[str, torch.Tensor]]]
    """Yields the policy's trainable weights whole, by their names in the model; every rank runs through it."""


@dataclass(frozen=True)
class EngineParts:
    """All that the maker of an engine may need, on one rank; see `EngineKind.make`."""

    config: Config
    """Checked settings of the run."""
    model: Any
    """The policy: a transformers causal LM, or one wrapped by peft."""
    weights: PolicyWeights
    """How to get them whole."""
    tokenizer: Any
    device: Device
    compute_dtype: torch.dtype
    """Dtype of the weights that sample."""
    apart: Apart | None = None
    """Where the policy's own weights cannot be sampled with; None: they can."""
    run_id: str | None = None
    """Id of the run on rank 0, the same when it is resumed; None where nothing will be resumed."""
    gate: Gate | None = None
    """Where an engine that generates in a thread of its own makes way for new weights."""
