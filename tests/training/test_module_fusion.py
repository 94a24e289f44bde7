"""The setting `model.fused_modules`: what it may name, and what it means on each backend."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hwgrpo_backends
import pytest
import torch
from hwgrpo_kernels import fused_modules, module_replacement

from hwgrpo.errors import ConfigError, RunError
from hwgrpo.rollout.local.architectures import unsupported_reason
from hwgrpo.training.module_fusion import Fused, check_ranks_agree, choose_modules
from hwgrpo.training.policy.auto_settings import AttentionSelection
from tests.support.models.tiny import settings
from tests.support.numbers import npu_module_cases, npu_reference_ops
from tests.support.runs import runs


@pytest.mark.parametrize(
    "backend,words,modules",
    [
        ("cpu", (), ()),
        ("cuda", (), ("rms_norm", "rotary", "swiglu")),
        ("rocm", (), ()),
        ("cuda", ("model.fused_modules=[swiglu,rms_norm]",), ("swiglu", "rms_norm")),
        ("rocm", ("model.fused_modules=[rotary]",), ("rotary",)),
        ("npu", (), ("rms_norm", "rotary", "swiglu")),
        ("npu", ("model.fused_modules=[none]",), ()),
        ("npu", ("model.fused_modules=[swiglu,rotary]",), ("swiglu", "rotary")),
    ],
)
def test_auto_is_what_the_backend_lists(backend: str, words: tuple[str, ...], modules: tuple[str, ...]):
    assert choose_modules(settings(*words).model, hwgrpo_backends.get(backend)) == modules


def test_a_module_named_on_a_backend_without_it_ends_the_run_before_the_model_is_loaded(tmp_path: Path):
    says = (
        r"model.fused_modules=\['rms_norm'\]: the backend cpu has no fused rms_norm \(but: none\); "
        r"use model.fused_modules=\[auto\]"
    )
    with pytest.raises(ConfigError, match=says):
        runs.run(tmp_path / "run", "model.fused_modules=[rms_norm]")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("words", ["[]", "[auto,swiglu]", "[none,swiglu]", "[auto,none]"])
def test_auto_and_none_stand_alone(words: str):
    with pytest.raises(ConfigError, match=r"must be \[auto\], \[none\], or some of: rms_norm, rotary, swiglu"):
        settings(f"model.fused_modules={words}")


def test_an_unknown_module_is_named_with_the_nearest():
    with pytest.raises(ConfigError, match=r"model.fused_modules='rmsnorm' is not known.*Did you mean 'rms_norm'"):
        settings("model.fused_modules=[rmsnorm]")


def test_what_backends_list_is_what_the_kernels_have():
    for backend in hwgrpo_backends.load_all().backends.values():
        named = [name for name in backend.attention if name == fused_modules.attention(backend.device_type)]
        known = fused_modules.modules(backend.device_type)
        assert backend.modules in ((), tuple(each for each in known if each != fused_modules.ATTENTION_MODULE))
        if fused_modules.attention(backend.device_type) is None:
            assert fused_modules.ATTENTION_MODULE not in known
        else:
            assert known == module_replacement.MODULES
            assert named == list(backend.attention[:1])


def test_a_gpu_has_the_modules_in_triton_and_no_attention():
    assert fused_modules.modules("cuda") == ("rms_norm", "rotary", "swiglu")
    assert fused_modules.reason_against("cuda", "attention") == (
        "cuda has no fused module of that name, but rms_norm, rotary, swiglu"
    )


def test_a_device_without_fused_modules_is_refused_with_its_name():
    with pytest.raises(ValueError, match=r"modules=\['swiglu'\]: the model is on cpu, which has no fused modules"):
        fused_modules.apply(torch.nn.Linear(2, 2), ["swiglu"])
    assert fused_modules.reason_against("cpu", "swiglu") == "cpu has no fused modules"


def test_fused_modules_do_not_keep_the_lean_step_away():
    model = npu_module_cases.tiny("qwen3")
    with npu_reference_ops.registered():
        applied = module_replacement.apply(model)
        assert all(applied.replaced.values()), applied.line()
    assert unsupported_reason(model, 20) is None


def test_ranks_that_took_different_modules_end_the_run():
    def strategy(*records: dict[str, Any]) -> Any:
        return SimpleNamespace(gather_objects=lambda mine: list(records))

    attention = AttentionSelection("sdpa")
    mine, less = {"replaced": {"swiglu": ("a", "b")}}, {"replaced": {"swiglu": ("a",)}}
    check_ranks_agree(Fused(attention), strategy({}, {}))
    check_ranks_agree(Fused(attention, mine), strategy(mine, mine))
    with pytest.raises(RunError, match=r"rank 1 uses the fused module swiglu in 1 places and rank 0 in 2"):
        check_ranks_agree(Fused(attention, mine), strategy(mine, less, mine))
