"""Which attention implementation a run takes on each backend, and why those preferred to it were not taken."""

import hwgrpo_backends
import pytest
import torch
import transformers.utils
from hwgrpo_kernels import fused_modules
from transformers import Gemma2Config, Qwen3Config

from hwgrpo.errors import ConfigError
from hwgrpo.training.policy.auto_settings import AttentionSelection, choose_attention
from tests.support.models.tiny import settings

MISSING = "its package is not installed or does not support this device"
NO_OP = "this torch-npu has no npu_fusion_attention, or is not imported"
ASK = "kernels-community/aiter-flash-attn"
NO_KERNELS = "it is a kernel from the hub, which needs the package `kernels` (not installed)"


def choose(backend: str, *words: str, arch: str | None = None, dtype=torch.bfloat16, model=None) -> AttentionSelection:
    model = model or Qwen3Config()
    return choose_attention(settings(*words), hwgrpo_backends.get(backend), dtype, model, arch)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch):
    """Both flash-attention packages, as far as transformers tells."""
    for name in ("is_flash_attn_2_available", "is_flash_attn_3_available"):
        monkeypatch.setattr(transformers.utils, name, lambda: True)


@pytest.fixture
def fused_attention(monkeypatch: pytest.MonkeyPatch):
    """A torch-npu that has the op."""
    monkeypatch.setattr(fused_modules, "reason_against", lambda device_type, module: None)


@pytest.mark.parametrize(
    "backend,skipped",
    [
        ("cpu", ()),
        ("cuda", (("flash_attention_3", MISSING), ("flash_attention_2", MISSING))),
        ("rocm", ((ASK, NO_KERNELS), ("flash_attention_2", MISSING))),
        ("npu", (("npu_fusion_attention", NO_OP), ("flash_attention_2", NO_OP))),
    ],
)
def test_without_packages_every_backend_takes_sdpa_and_says_why(backend: str, skipped: tuple[tuple[str, str], ...]):
    choice = choose(backend, arch="sm_90")
    kernels = ("flash", "mem_efficient", "math", "cudnn") if backend == "cuda" else ()
    assert choice == AttentionSelection("sdpa", skipped=skipped, kernels=kernels)
    notes = "; ".join(f"{name}: {reason}" for name, reason in skipped)
    line = "attention sdpa by flash or mem_efficient or math or cudnn" if kernels else "attention sdpa"
    assert choice.line == line + (f" ({notes})" if notes else "")
    assert choose(backend).kernels == (), "of a device that is not here"


def test_hopper_takes_flash_attention_3(packages: None):
    assert choose("cuda", arch="sm_90") == AttentionSelection("flash_attention_3")


@pytest.mark.parametrize("arch,told", [("sm_80", "sm_80"), ("sm_100", "sm_100"), (None, "an unknown device")])
def test_other_chips_take_flash_attention_2(packages: None, arch: str | None, told: str):
    choice = choose("cuda", arch=arch)
    assert choice.name == "flash_attention_2"
    assert choice.skipped == (("flash_attention_3", f"it is for sm_90, and this is {told}"),)


def test_flash_attention_is_for_16_bits(packages: None):
    choice = choose("cuda", arch="sm_90", dtype=torch.float32)
    assert choice.name == "sdpa"
    assert {reason for _, reason in choice.skipped} == {"it computes in 16 bits only, not in torch.float32"}


def test_flash_attention_is_not_taken_for_a_layout_that_needs_masks(packages: None):
    choice = choose("cuda", "model.layout=packed", arch="sm_90")
    assert choice.name == "sdpa"
    assert {reason for _, reason in choice.skipped} == {"the packed layout needs an attention that accepts a mask"}


def test_a_kernel_of_the_hub_is_taken_only_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(transformers.utils, "is_kernels_available", lambda: True)
    choice = choose("rocm", arch="gfx942")
    assert f"fetched only with model.attention={ASK}" in dict(choice.skipped)[ASK]
    assert choose("rocm", f"model.attention={ASK}", arch="gfx942") == AttentionSelection(ASK)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fusion_attention_is_taken_where_it_is_offered_in_every_dtype(fused_attention: None, dtype: torch.dtype):
    choice = choose("npu", dtype=dtype)
    assert choice == AttentionSelection("npu_fusion_attention", is_fused=True)
    assert choice.loaded_as == "sdpa"


def test_fusion_attention_leaves_a_model_that_caps_its_scores(fused_attention: None):
    choice = choose("npu", model=Gemma2Config(), dtype=torch.float32)
    assert choice.name == "eager"
    assert "soft-caps attention scores" in dict(choice.skipped)["npu_fusion_attention"]


@pytest.mark.parametrize(
    "backend,name,says",
    [
        ("cpu", "npu_fusion_attention", "the backend cpu does not have it; use model.attention=sdpa"),
        ("npu", "npu_fusion_attention", f"{NO_OP}; use model.attention=sdpa"),
        ("cuda", "flash_attention_3", "it is for sm_90, and this is sm_80; use model.attention=sdpa"),
    ],
)
def test_one_asked_for_that_cannot_be_had_is_an_error_with_the_reason(backend: str, name: str, says: str):
    with pytest.raises(ConfigError, match=f"^model.attention='{name}': {says}$"):
        choose(backend, f"model.attention={name}", arch="sm_80")


def test_a_name_that_no_backend_has_is_not_known():
    with pytest.raises(ConfigError, match=r"model.attention='flash_atention_2' is not known.*Did you mean"):
        settings("model.attention=flash_atention_2")
