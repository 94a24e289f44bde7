"""The reader of our sources finds every use, so that what the other files check is what the sources ask for."""

import pytest

from tests.torch_npu.torch_npu_uses import Use, uses_in, uses_of

FUSED = "npu_fused_linear_online_max_sum"


def found(source):
    return [(use.kind, use.name, use.positional, use.keywords) for use in uses_of(source, "planted.py")]


@pytest.mark.parametrize(
    "source",
    [
        "torch.ops.npu.npu_swiglu(x, dim=1)",
        "torch.ops.npu.npu_swiglu.default(x, dim=1)",
        "torch_npu.npu_swiglu(x, dim=1)",
        "ops = torch.ops.npu\nops.npu_swiglu(x, dim=1)",
        "OP = 'npu_swiglu'\ngetattr(torch.ops.npu, OP)(x, dim=1)",
        "getattr(torch.ops.npu, 'npu_swiglu')(x, dim=1)",
    ],
)
def test_an_operator_is_found_however_it_is_spelled(source):
    assert found(source) == [("op", "npu_swiglu", 1, ("dim",))]


def test_an_operator_that_is_bound_to_a_name_is_found_where_it_is_called_too():
    uses = found("def f(x):\n    swiglu = torch.ops.npu.npu_swiglu\n    return swiglu(x, dim=1)")
    assert ("op", "npu_swiglu", 1, ("dim",)) in uses


@pytest.mark.parametrize(
    "source",
    [
        "torch.npu.synchronize(d)",
        "torch.get_device_module(kind).synchronize(d)",
        "runtime(device).synchronize(d)",
        "npu = torch.get_device_module(kind)\nnpu.synchronize(d)",
        "self.npu: Any = Host() if host else torch.get_device_module(kind)\nself.npu.synchronize(d)",
    ],
)
def test_a_name_of_the_device_module_is_found_however_it_is_reached(source):
    assert found(source) == [("name", "synchronize", 1, ())]


def test_arguments_that_cannot_be_counted_are_not_counted():
    assert found("torch.ops.npu.npu_swiglu(*x, dim=1)") == [("op", "npu_swiglu", None, ("dim",))]
    assert found("torch.ops.npu.npu_swiglu(x, **more)") == [("op", "npu_swiglu", None, ())]


def test_keywords_in_a_dict_that_is_written_out_are_counted_whichever_branch_writes_it():
    source = "if a:\n    m = {'dim': 1}\nelse:\n    m = {'axis': 1}\ntorch.ops.npu.npu_swiglu(x, **m)"
    assert found(source) == [("op", "npu_swiglu", 1, ("axis", "dim"))]


def test_a_name_that_is_computed_is_refused_with_its_place():
    with pytest.raises(ValueError, match=r"planted.py:2: getattr\(torch.ops.npu, name\) asks for a name that is"):
        uses_of("for name in names:\n    getattr(torch.ops.npu, name)(x)", "planted.py")


def test_asking_whether_a_computed_name_is_there_is_no_use():
    assert found("for name in names:\n    hasattr(torch.ops.npu, name)") == []


def test_what_is_not_torch_npus_is_no_use():
    assert found("torch.ops.aten.mm(x, y)\nmodule = load()\nmodule.synchronize()\ntorch.cuda.synchronize()") == []


def test_our_sources_use_fused_operators_and_the_calls_a_trainer_makes():
    uses = uses_in()
    assert any(use.kind == "op" and use.name == FUSED and use.positional == 6 for use in uses)
    ops = {use.name: use.keywords for use in uses if use.kind == "op"}
    assert "epsilon" in ops["npu_rms_norm"]
    assert {"atten_mask", "sparse_mode", "scale", "keep_prob"} <= set(ops["npu_fusion_attention"])
    assert {"npu_rotary_mul", "npu_swiglu"} <= ops.keys()
    trainer = {"set_device", "synchronize", "empty_cache", "mem_get_info", "get_rng_state", "set_rng_state", "Stream"}
    assert trainer <= {use.name for use in uses if use.kind == "name"}
    assert all(isinstance(use, Use) and ":" in use.where for use in uses)
