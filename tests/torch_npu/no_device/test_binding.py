"""What our sources call binds to the operators and functions of the loaded torch-npu."""

import inspect
from pathlib import Path

import pytest
import torch
import torch_npu
from hwgrpo_kernels import npu_scoring

from tests.support.numbers.torch_npu_schema import SCHEMA
from tests.torch_npu.torch_npu_uses import Use, uses_in
from tests.torch_npu.torch_npu_wheel import takes

KERNELS = Path(npu_scoring.__file__).parent
LACKING = {"get_arch_list"}  # asked of CUDA and ROCm only


def problem(use: Use) -> str | None:
    """Return why a use does not bind, or None."""
    if use.kind == "name":
        function = getattr(torch.npu, use.name, None)
        if function is None:
            return f"torch.npu has no {use.name}"
        if use.positional is None:
            return None
        try:
            inspect.signature(function).bind(*range(use.positional), **dict.fromkeys(use.keywords))
        except TypeError as error:
            return f"torch.npu.{use.name}: {error}"
        return None
    packet = getattr(torch.ops.npu, use.name, None)
    if packet is None:
        return f"there is no operator {use.name}"
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads()]
    return None if any(takes(schema, use) for schema in schemas) else f"{use} does not bind to {schemas}"


def test_it_is_loaded_and_says_that_there_is_no_device():
    assert torch_npu.__version__ == "2.13.0"
    assert not torch.npu.is_available()
    assert torch.npu.device_count() == 0


def test_every_use_in_our_sources_binds():
    problems = {use.name: f"{use.where}: {said}" for use in uses_in() if (said := problem(use))}
    assert problems.keys() == LACKING, problems


@pytest.mark.parametrize(
    ("file", "right", "wrong"),
    [
        ("npu_scoring.py", "targets, 0, vocab, False", "targets, 0, vocab, return_logit=False"),
        ("npu_scoring.py", "targets, 0, vocab, False", "targets, 0, vocab, False, False"),
        ("npu_scoring.py", 'OP = "npu_fused_linear_online_max_sum"', 'OP = "npu_fused_linear_online_maxsum"'),
        ("npu_scoring.py", "npu.get_device_name()", "npu.get_device_names()"),
        ("npu_scoring.py", "npu.is_available()", "npu.is_available(0)"),
        ("module_replacement/rms_norm.py", "epsilon=epsilon(self)", "eps=epsilon(self)"),
        ("module_replacement/rotary.py", 'rotary_mode="half"', 'mode="half"'),
        ("module_replacement/swiglu.py", "dim=-1), dim=-1", "dim=-1), axis=-1"),
        ("module_replacement/attention.py", "scale=query", "scale_value=query"),
        ("module_replacement/attention.py", '"sparse_mode": 3', '"sparse": 3'),
    ],
)
def test_a_wrong_call_in_a_copy_of_our_module_does_not_bind(tmp_path, file, right, wrong):
    source = (KERNELS / file).read_text()
    assert right in source
    (tmp_path / "copy.py").write_text(source.replace(right, wrong))
    assert any(problem(use) for use in uses_in([tmp_path]))
    (tmp_path / "copy.py").write_text(source)
    assert not any(problem(use) for use in uses_in([tmp_path]))


def test_a_keyword_that_torch_npu_does_not_know_raises_when_it_is_called():
    rows, gamma = torch.empty(8, 16, device="meta"), torch.empty(16, device="meta")
    torch.ops.npu.npu_rms_norm(rows, gamma, epsilon=1e-6)
    with pytest.raises(RuntimeError, match="Unknown keyword argument 'eps'"):
        torch.ops.npu.npu_rms_norm(rows, gamma, eps=1e-6)


def test_the_fused_head_is_loaded_with_the_schema_our_tests_call_it_by():
    [overload] = torch.ops.npu.npu_fused_linear_online_max_sum.overloads()
    loaded = getattr(torch.ops.npu.npu_fused_linear_online_max_sum, overload)._schema
    assert str(loaded) == str(torch._C.parse_schema(f"npu::{SCHEMA}"))


def test_computing_on_the_device_raises():
    with pytest.raises(RuntimeError):
        torch.ones(2, device="npu")
