"""Gradient checkpointing of the policy: the same gradients, and nothing that keeps the lean decode step away."""

from pathlib import Path

import pytest
import torch
import transformers
from hwgrpo_backends.cpu import BACKEND
from hwgrpo_backends.device import Device

from hwgrpo.models.tiny import character_tokenizer
from hwgrpo.rollout.local.architectures import unsupported_reason
from hwgrpo.training.policy.layouts import PADDED
from hwgrpo.training.shared_setup import load_policy
from hwgrpo.training.strategies.single import Single
from hwgrpo.training.update.policy_update import PolicyUpdate
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
    strategy = Single(torch.device("cpu"), "gloo")
    strategy.wrap(policy, config)
    update = PolicyUpdate(config, strategy, policy, torch.device("cpu"), PADDED, total_updates=1)
    batch = ragged_batch(old=True)
    update.accumulate_gradients(batch, range(len(batch)))
    return {n: p.grad.clone() for n, p in policy.model.named_parameters() if p.grad is not None}


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
