"""Fused modules with one thing wrong in their source: the self-test must skip each, so that no number changes."""

import importlib
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from hwgrpo_kernels.module_replacement import apply, attention, rms_norm, rotary, swiglu

from tests.support.numbers import npu_reference_ops
from tests.support.numbers.npu_module_cases import batch, losses_and_gradients, tiny

REPLACE = importlib.import_module("hwgrpo_kernels.module_replacement.replace_modules")


class Fault(NamedTuple):
    """Where, what is replaced by what, and what the reason must say."""

    module: ModuleType
    before: str
    after: str
    says: str
    family: str = "qwen3"


FAULTS = {
    "a keyword that the op does not have": Fault(
        rms_norm, "epsilon=epsilon(self)", "eps=epsilon(self)", "Unknown keyword argument 'eps'"
    ),
    "the op's own epsilon": Fault(rms_norm, ", epsilon=epsilon(self)", "", "its outputs differ", "llama"),
    "the second output": Fault(rms_norm, "epsilon=epsilon(self))[0]", "epsilon=epsilon(self))[1]", "other shapes"),
    "no gamma": Fault(rms_norm, "self.weight.to(dtype), ", "torch.ones_like(self.weight), ", "its outputs differ"),
    "interleaved": Fault(
        rotary, 'k.to(dtype), cos, sin, rotary_mode="half"', 'k.to(dtype), cos, sin, rotary_mode="interleave"', "differ"
    ),
    "sines for cosines": Fault(
        rotary, "npu_rotary_mul(q.to(dtype), cos, sin", "npu_rotary_mul(q.to(dtype), sin, cos", "differ"
    ),
    "keys not rotated": Fault(
        rotary,
        'torch.ops.npu.npu_rotary_mul(k.to(dtype), cos, sin, rotary_mode="half")',
        "k.to(dtype)",
        "its outputs differ",
    ),
    "gate and up swapped": Fault(
        swiglu, "[self.gate_proj(x), self.up_proj(x)]", "[self.up_proj(x), self.gate_proj(x)]", "its outputs differ"
    ),
    "halves of another dimension": Fault(swiglu, "dim=-1), dim=-1)", "dim=-1), dim=1)", "its outputs|it fails"),
    "unscaled": Fault(
        attention, "        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,\n", "", "its outputs differ"
    ),
    "an un-inverted mask": Fault(
        attention, "hidden = ~attention_mask if", "hidden = attention_mask if", "its outputs differ"
    ),
    "not causal": Fault(
        attention, '{"atten_mask": _triangle(query.device), "sparse_mode": 3}', "{}", "its outputs differ"
    ),
    "a triangle of the rows' own size": Fault(
        attention,
        '_triangle(query.device), "sparse_mode": 3',
        '_triangle(query.device)[:8, :8], "sparse_mode": 3',
        "2048",
    ),
    "the triangle the other way": Fault(attention, ".triu(1)", ".tril(-1)", "masked OUT"),
    "the layout of torch": Fault(attention, '"BSND"', '"BNSD"', "head_num=4"),
    "one query that sees the first key alone": Fault(
        attention, "elif is_causal and queries > 1:", "elif is_causal:", "its outputs differ"
    ),
    "key heads for heads": Fault(attention, "        query.shape[1],\n", "        key.shape[1],\n", "head_num=2"),
}


@pytest.fixture(autouse=True)
def _ops():
    with npu_reference_ops.registered():
        yield
    attention._triangle.cache_clear()


def plant(patch: pytest.MonkeyPatch, fault: Fault) -> None:
    """Have `apply` use the module with the fault in it."""
    path = Path(str(fault.module.__file__))
    source = path.read_text()
    assert source.count(fault.before) == 1, f"{fault.before!r} must be once in {path.name}: write it as it is there now"
    wrong = ModuleType(fault.module.__name__)
    wrong.__package__, wrong.__file__ = fault.module.__package__, str(path)
    exec(compile(source.replace(fault.before, fault.after), str(path), "exec"), vars(wrong))
    patch.setitem(REPLACE.KINDS, fault.module.NAME, wrong)
    patch.setattr(REPLACE, path.stem, wrong)


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_module_is_left_with_the_reason(monkeypatch: pytest.MonkeyPatch, name: str):
    fault = FAULTS[name]
    kind = fault.module.NAME
    model = tiny(fault.family, rms_norm_eps=1e-3)
    before = losses_and_gradients(model, batch("right"))
    plant(monkeypatch, fault)
    applied = apply(model)
    assert not applied.replaced[kind]
    assert all(of for other, of in applied.replaced.items() if other != kind), applied.line()
    assert applied.skipped[kind]
    for reason in applied.skipped[kind].values():
        assert any(each in reason for each in fault.says.split("|")), reason
    applied.undo()
    after = losses_and_gradients(model, batch("right"))
    assert torch.equal(after[0], before[0])


def test_a_wrong_gradient_is_left_too(monkeypatch: pytest.MonkeyPatch):
    model = tiny("qwen3")
    plant(monkeypatch, Fault(rms_norm, "self.weight.to(dtype), ", "self.weight.detach().to(dtype), ", ""))
    applied = apply(model)
    assert not applied.replaced["rms_norm"]
    assert set(applied.skipped["rms_norm"].values())
