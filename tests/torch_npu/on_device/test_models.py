"""Whole calls on the virtual NPU against the CPU: a model of transformers, our optimizer, scoring by the fused head."""

import copy

import pytest
import torch
import virtual_ascend
from hwgrpo_kernels import Key, default_registry, npu_scoring
from hwgrpo_kernels.op import Shape
from transformers import Qwen2Config, Qwen2ForCausalLM

from tests.support.numbers.op_agreement import assert_agrees
from tests.support.numbers.rounding import STEP, assert_gradients_close

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIG = Qwen2Config(vocab_size=256, num_key_value_heads=2, max_position_embeddings=128, **SIZES)


def qwen2(attention: str) -> tuple[Qwen2ForCausalLM, Qwen2ForCausalLM]:
    """Return the same model on the CPU and on the NPU."""
    model = Qwen2ForCausalLM(CONFIG)
    model.set_attn_implementation(attention)
    return model, copy.deepcopy(model).to("npu")


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_loss_gradients_and_generation_equal_the_cpus(attention: str):
    here, there = qwen2(attention)
    ids = torch.randint(0, 256, (2, 32))
    losses = [model(ids.to(model.device), labels=ids.to(model.device)).loss for model in (here, there)]
    for loss in losses:
        loss.backward()
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=STEP)
    gradients = ({name: each.grad.cpu() for name, each in model.named_parameters()} for model in (there, here))
    assert_gradients_close(*gradients)
    prompts = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(there.generate(ids[:, :8].npu(), **prompts).cpu(), here.generate(ids[:, :8], **prompts))


@pytest.mark.parametrize("mask", [None, "causal", "bool", "added"])
def test_attention_of_torch_equals_the_cpus_with_every_kind_of_mask(mask: str | None):
    q, k, v = torch.randn(3, 2, 4, 6, 8)
    visible = torch.ones(6, 6, dtype=torch.bool).tril() ^ torch.eye(6, dtype=torch.bool).roll(-1, 0)
    given = {"bool": visible, "added": torch.zeros(6, 6).masked_fill(~visible, -1e9)}.get(mask or "")
    attend = torch.nn.functional.scaled_dot_product_attention
    here = attend(q, k, v, given, is_causal=mask == "causal")
    there = attend(q.npu(), k.npu(), v.npu(), None if given is None else given.npu(), is_causal=mask == "causal")
    torch.testing.assert_close(there.cpu(), here)


def test_adamw_in_bf16_learns_what_the_cpu_learns():
    here, there = (model.to(torch.bfloat16) for model in qwen2("sdpa"))
    ids = torch.randint(0, 256, (2, 32))
    losses = {"cpu": [], "npu": []}
    for model in (here, there):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(5):
            loss = model(ids.to(model.device), labels=ids.to(model.device)).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses[model.device.type].append(loss.item())
    assert losses["npu"] == pytest.approx(losses["cpu"], rel=0.02)
    assert losses["npu"][-1] < losses["npu"][0] - 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scoring_by_the_fused_head_equals_the_definition(dtype: torch.dtype):
    assert npu_scoring.reason_against(Key("linear_logprob", "npu", dtype, 517)) is None
    [op] = [each for each in default_registry.ops() if each.name == "linear_logprob"]
    inputs = op.inputs(Shape(40, 70, 517), dtype, "npu", "scaled")
    assert npu_scoring.declines(**inputs) is None
    before = virtual_ascend.calls[npu_scoring.OP]
    assert_agrees(op, npu_scoring.linear_logprob, inputs, dtype)
    assert virtual_ascend.calls[npu_scoring.OP] > before
