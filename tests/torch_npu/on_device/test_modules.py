"""Our fused modules through torch-npu's own operators and formulas: in a model, and in a whole step of training."""

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import virtual_ascend
from hwgrpo_backends.cpu import BACKEND as CPU
from hwgrpo_backends.npu import BACKEND as NPU
from hwgrpo_kernels.module_replacement import MODULES, AppliedModules, apply
from transformers import Qwen2Config, Qwen2ForCausalLM

from hwgrpo.training import model_setup
from tests.support.numbers.rounding import GENTLE, STEP, assert_gradients_close, assert_metrics_close, drift
from tests.support.runs import runs

OPS = {
    "rms_norm": "npu_rms_norm",
    "rotary": "npu_rotary_mul",
    "swiglu": "npu_swiglu",
    "attention": "npu_fusion_attention",
}
BACKWARDS = {
    "rms_norm": "npu_rms_norm_backward",
    "rotary": "npu_rotary_mul_backward",
    "swiglu": "npu_swiglu_backward",
    "attention": "npu_fusion_attention_grad",
}
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIG = Qwen2Config(vocab_size=256, num_key_value_heads=2, max_position_embeddings=128, **SIZES)
ONE_STEP = ("model.dtype=float32", "trainer.max_steps=1", "algorithm.kl.coef=0.01", *GENTLE)


def fused_calls(before: dict[str, int]) -> dict[str, int]:
    """Return how often each of torch-npu's operators was called since."""
    names = (*OPS.values(), *BACKWARDS.values())
    return {name: virtual_ascend.calls[name] - before.get(name, 0) for name in names}


def loss_and_gradients(model: Any, batch: dict[str, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    batch = {name: each.to(model.device) for name, each in batch.items()}
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    named = {name: parameter.grad.cpu() for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return loss.item(), named


@pytest.mark.parametrize("padded", [False, True])
def test_loss_and_every_gradient_are_the_plain_models_through_each_of_the_four_operators(padded: bool):
    model = Qwen2ForCausalLM(CONFIG)
    model.set_attn_implementation("sdpa")
    here, there = model, copy.deepcopy(model).to("npu")
    ids = torch.randint(0, 256, (2, 24))
    mask = torch.ones_like(ids)
    if padded:
        mask[1, 15:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    before = dict(virtual_ascend.calls)
    plain = loss_and_gradients(there, batch)
    assert not any(fused_calls(before).values())
    applied = apply(there)
    assert set(applied.replaced) == set(MODULES)
    assert all(applied.replaced.values()), applied.line()
    before = dict(virtual_ascend.calls)
    fused = loss_and_gradients(there, batch)
    layers = CONFIG.num_hidden_layers
    expected = {"rms_norm": 2 * layers + 1, "rotary": 2 * layers, "swiglu": layers, "attention": layers}
    assert fused_calls(before) == {table[name]: n for table in (OPS, BACKWARDS) for name, n in expected.items()}
    for loss, gradients in (plain, loss_and_gradients(here, batch)):
        assert fused[0] == pytest.approx(loss, rel=STEP)
        assert_gradients_close(fused[1], gradients)
    applied.undo()
    before = dict(virtual_ascend.calls)
    again = loss_and_gradients(there, batch)
    assert not any(fused_calls(before).values())
    assert again[0] == plain[0]
    assert all(torch.equal(again[1][name], gradient) for name, gradient in plain[1].items())


def test_a_step_of_training_runs_through_them_and_trains_what_the_cpu_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HWGRPO_CACHE", os.environ.get("HWGRPO_CACHE", str(tmp_path / "cache")))
    runs.run(tmp_path / "cpu", *ONE_STEP, backend=CPU)
    taken: list[AppliedModules] = []
    plain = model_setup.load_policy

    def load_policy(*given: Any) -> Any:
        policy = plain(*given)
        taken.append(apply(policy.model))
        return policy

    monkeypatch.setattr(model_setup, "load_policy", load_policy)
    before = dict(virtual_ascend.calls)
    runs.run(tmp_path / "npu", *ONE_STEP, backend=NPU)
    [applied] = taken
    assert all(applied.replaced[name] for name in ("rms_norm", "rotary", "swiglu", "attention")), applied.line()
    assert all(fused_calls(before).values()), fused_calls(before)
    assert_metrics_close(runs.metrics(tmp_path / "npu"), runs.metrics(tmp_path / "cpu"), drift(1))
