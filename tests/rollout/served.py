"""What engines on servers are made from in tests: a tiny policy, and prompts for it."""

from __future__ import annotations

from pathlib import Path

import torch
from hwgrpo_backends.cpu import BACKEND
from hwgrpo_backends.device import Device

from hwgrpo.models.tiny import character_tokenizer
from hwgrpo.rollout.engine_parts import EngineParts
from hwgrpo.rollout.policy_weights import ModuleWeights
from hwgrpo.values import Prompt, PromptBatch, Sampling
from tests.support.models.tiny import settings, tiny_qwen3

TOKENIZER = character_tokenizer("")
SAMPLING = Sampling(n=2, max_response_tokens=3)


def batch(*texts: str) -> PromptBatch:
    """Return prompts of these texts."""
    return PromptBatch(
        tuple(
            Prompt(uid=text, text=text, token_ids=tuple(TOKENIZER(text).input_ids), ground_truth=None, columns={})
            for text in texts
        )
    )


def parts_for(url: str | None, tmp_path: Path, *overrides: str) -> EngineParts:
    """Return what an engine on a server is made from; the token is in THE_TOKEN."""
    address = [f"rollout.server.url={url}"] if url else []
    config = settings(
        "rollout.engine=vllm_server",
        "rollout.server.start_timeout=8",
        "rollout.server.request_timeout=5",
        "rollout.server.token_variable=THE_TOKEN",
        f"rollout.server.weights_dir={tmp_path / 'weights'}",
        f"trainer.output_dir={tmp_path / 'run'}",
        *address,
        *overrides,
    )
    model = tiny_qwen3(vocab=len(TOKENIZER))
    return EngineParts(config, model, ModuleWeights(model), TOKENIZER, Device(BACKEND), torch.float32)
