"""What a rollout engine is made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from hwgrpo_backends.device import Device

from hwgrpo.rollout.pause_gate import Gate
from hwgrpo.rollout.weights import PolicyWeights

if TYPE_CHECKING:
    from hwgrpo.config.schema import Config


@dataclass(frozen=True)
class EngineParts:
    """All that the maker of an engine may need, on one rank; see `EngineKind.make`."""

    config: Config
    """Checked settings of the run."""
    model: Any
    """The policy: a transformers causal LM, or one wrapped by peft."""
    weights: PolicyWeights
    """How to get them unsharded."""
    tokenizer: Any
    device: Device
    compute_dtype: torch.dtype
    """Dtype of the weights that sample."""
    replica: Any = None
    """A full copy of the model in the dtype of rollouts, where the policy's own weights are sharded, or in use while
    responses are sampled; None: the engine may sample with those."""
    run_id: str | None = None
    """Id of the run on rank 0, the same when it is resumed; None where nothing will be resumed."""
    gate: Gate | None = None
    """Where an engine that generates in a thread of its own makes way for new weights."""
