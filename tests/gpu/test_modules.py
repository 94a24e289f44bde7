"""The fused modules in Triton, launched: the interpreter's tests on the device, and whole models."""

import pytest
import torch
from hwgrpo_kernels import fused_modules

from tests.interpreter.test_module_kernels import *  # noqa: F403
from tests.support.numbers.npu_module_cases import FAMILIES, batch, losses_and_gradients, tiny
from tests.support.numbers.row_cases import DEVICE

MODULES = fused_modules.modules(DEVICE)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("autocast", [False, True])
def test_a_model_of_the_family_takes_what_it_computes_and_keeps_its_numbers(family, autocast):
    with torch.device("cpu"):
        model, inputs = tiny(family), batch("right")
    model, inputs = model.to(DEVICE), {name: each.to(DEVICE) for name, each in inputs.items()}
    with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=autocast):
        plain, plain_gradients = losses_and_gradients(model, inputs)
        applied = fused_modules.apply(model, MODULES, torch.bfloat16 if autocast else None)
        fused, gradients = losses_and_gradients(model, inputs)
    assert {name for name, of in applied.replaced.items() if of} == FAMILIES[family][2] - {"attention"}, applied.line()
    allowed = 2e-2 if autocast else 1e-4  # relative to the whole: rounding to bf16 at every product, or to fp32
    assert (fused - plain).norm() <= allowed * plain.norm()
    for name, gradient in gradients.items():
        assert (gradient - plain_gradients[name]).norm() <= 5 * allowed * plain_gradients[name].norm() + 1e-6, name
