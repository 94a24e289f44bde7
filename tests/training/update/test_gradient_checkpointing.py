"""Gradient checkpointing of the policy: the same gradients, and nothing that keeps the lean decode step away."""

from pathlib import Path

import pytest
import torch
import transformers
from hwgrpo_backends.cpu import BACKEND
from hwgrpo_backends.device import Device

from hwgrpo.models.tiny import character_tokenizer
from hwgrpo.rollout.local.architectures import unsupported_reason
from hwgrpo.training.shared_setup import load_policy
from tests.support.models import steps
from tests.support.models.steps import update_of
from tests.support.models.tiny import VOCAB, ragged_batch, settings, tiny_qwen3
from tests.support.numbers.rounding import assert_gradients_close

TOKENIZER = character_tokenizer("")


def gradients(folder: Path, *words: str) -> dict[str, torch.Tensor]:
    config = settings(f"model.path={folder}", *words)
    torch.manual_seed(5)  # of new adapters
    policy = load_policy(config, Device(BACKEND), TOKENIZER)
    assert unsupported_reason(policy.model.eval(), 32) is None
    for name, parameter in policy.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    policy.model.train()
    return steps.gradients(update_of(policy, config), ragged_batch(old=True))[1]


@pytest.mark.parametrize("lora", [[], ["model.lora.rank=2"]], ids=["all parameters", "adapters"])
def test_checkpointed_gradients_are_the_same_and_the_lean_step_may_sample(lora, tmp_path, monkeypatch):
    tiny_qwen3(vocab=len(TOKENIZER)).save_pretrained(tmp_path)
    assert len(TOKENIZER) >= VOCAB
    plain = gradients(tmp_path, *lora)
    calls = []
    real = torch.utils.checkpoint.checkpoint
    monkeypatch.setattr(transformers.modeling_utils, "checkpoint", lambda *a, **k: calls.append(1) or real(*a, **k))
    saved = gradients(tmp_path, "model.gradient_checkpointing=true", *lora)
    assert calls, "layers really were checkpointed"
    assert plain.keys() == saved.keys()
    assert len(plain) == (28 if lora else 24), "of every weight that is trained"
    for name, gradient in plain.items():
        assert gradient.abs().max() > 0, name
    assert_gradients_close(saved, plain)
