"""Inputs of the factory of a rollout engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from hwgrpo_backends.device import Device

from hwgrpo.models.lm_head import causal_lm
from hwgrpo.rollout.pause_gate import Gate
from hwgrpo.rollout.policy_weights import PolicyWeights

if TYPE_CHECKING:
    from hwgrpo.config import Config
    from hwgrpo.values import Prompt


@dataclass(frozen=True)
class EngineParts:
    """Inputs of an engine's factory on one rank; see `EngineKind.make`."""

    config: Config
    """Checked settings of the run."""
    model: Any
    """The policy: a transformers causal LM, or one wrapped by peft."""
    weights: PolicyWeights
    """Yields the unsharded weights."""
    tokenizer: Any
    device: Device
    compute_dtype: torch.dtype
    """Dtype of the weights used for sampling."""
    replica: Any = None
    """Rollout replica: a full copy of the model in the rollout dtype, where the policy's own weights are sharded, or in
    use while responses are sampled; None: the engine may sample with the policy's."""
    run_id: str | None = None
    """Id of the run on rank 0, kept when it resumes; None for a run that cannot resume."""
    gate: Gate | None = None
    """Gate at which an engine that generates in a thread of its own pauses for new weights."""

    image_sample: Prompt | None = None
    """A prompt with an image, for startup checks; None: the model reads text alone."""

    def different_settings(self, *, adapted: bool) -> dict[str, Any]:
        """Return the values of the model's configuration that an engine must not take from the model's folder.

        Args:
            adapted: the engine reads the frozen weights below an adapter from the folder, in the format that they have.
        """
        found: dict[str, Any] = getattr(causal_lm(self.model), "differs_from_folder", {})
        return {key: value for key, value in found.items() if not (adapted and key == "quantization_config")}
