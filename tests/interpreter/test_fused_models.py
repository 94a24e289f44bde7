"""Whole models with the fused modules in Triton: what each family takes, and that its numbers stay."""

import pytest
import torch
from hwgrpo_kernels import module_replacement
from hwgrpo_kernels.module_replacement import fused_forwards, replace_modules, rms_norm, rotary, swiglu

from tests.support.numbers.npu_module_cases import FAMILIES, batch, losses_and_gradients, tiny
from tests.support.numbers.row_cases import DEVICE

MODULES = ("rms_norm", "rotary", "swiglu")


@pytest.fixture(autouse=True)
def _a_cpu_takes_the_modules_of_gpus(monkeypatch):
    if DEVICE == "cpu":
        for each in (replace_modules, rms_norm, rotary, swiglu):
            monkeypatch.setattr(each, "in_triton", lambda device_type: True)
    assert replace_modules.in_triton(DEVICE)


CASES = [("qwen2", False), ("glm4", False), ("gemma", False), ("cohere", False)]
if DEVICE != "cpu":
    CASES.append(("qwen3", True))  # interpreted, test_compute_dtype.py has it


@pytest.mark.parametrize("family,autocast", CASES)
def test_a_model_takes_what_it_computes_and_keeps_its_numbers(family, autocast):
    with torch.device("cpu"):
        model, inputs = tiny(family), batch("right")
    model, inputs = model.to(DEVICE), {name: each.to(DEVICE) for name, each in inputs.items()}
    with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=autocast):
        plain, plain_gradients = losses_and_gradients(model, inputs)
        applied = module_replacement.apply(model, MODULES, torch.bfloat16 if autocast else None)
        fused, gradients = losses_and_gradients(model, inputs)
    adds = {"add_rms_norm"} if family.startswith("qwen") else set()
    taken = {name for name, of in applied.replaced.items() if of}
    assert taken == FAMILIES[family][2] - {"attention"} | adds, applied.line()
    assert any(fused_forwards.is_fused(each) for each in model.modules())
    allowed = 2e-2 if autocast else 1e-4  # of the whole: products round to bf16, or sums of fp32 change their order
    assert (fused - plain).norm() <= allowed * plain.norm()
    for name, gradient in gradients.items():
        gap = (gradient - plain_gradients[name]).norm()
        assert gap <= 5 * allowed * plain_gradients[name].norm() + 1e-6, name


def test_attention_is_left_to_torch():
    applied = module_replacement.apply(tiny("qwen3").to(DEVICE), ["attention"])
    assert applied.skipped["attention"] == {"": f"{DEVICE} has none here: torch's is fused"}
