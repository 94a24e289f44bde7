"""The startup check of fused modules on the whole model: it sees what modules change forward or backward."""

from collections.abc import Callable
from typing import Any

import hwgrpo_backends
import pytest
import torch
from hwgrpo_kernels import fused_modules
from hwgrpo_kernels.module_replacement.fused_forwards import AppliedModules, replace_forward

from hwgrpo.errors import ConfigError
from hwgrpo.training import fusion_check
from hwgrpo.training.module_fusion import fuse
from hwgrpo.training.policy.auto_settings import AttentionSelection
from hwgrpo.training.policy.policy_model import HeadOptions, PolicyModel
from tests.support.models.tiny import settings
from tests.support.numbers.npu_module_cases import tiny
from tests.support.numbers.rounding import assert_gradients_close

CPU = torch.device("cpu")
NAME = "layers.0.post_attention_layernorm"
SDPA = AttentionSelection("sdpa")


class GradientTimes(torch.autograd.Function):
    """Identity whose gradient is multiplied."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0] * ctx.factor, None


def policy_of(dtype: torch.dtype = torch.float32, family: str = "qwen2") -> PolicyModel:
    return PolicyModel(tiny(family), compute_dtype=dtype, options=HeadOptions())


def changed(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a forward of a norm whose output a function changes."""

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        return change(type(self).forward(self, hidden_states))

    return forward


CHANGES = {
    "nothing": lambda x: x.clone(),
    "a unit in the last place": lambda x: x * (1 + torch.finfo(torch.float32).eps),
    "values": lambda x: x * 1.3,
    "gradients": lambda x: GradientTimes.apply(x, 1.5),
}


def test_its_gradients_are_those_of_one_backward_pass():
    policy = policy_of()
    found = fusion_check.run_passes(policy, CPU)
    layers = policy.base.model.layers
    inputs = []
    hook = layers[0].register_forward_pre_hook(lambda module, args: inputs.append(args[0].requires_grad_()))
    outputs = []
    after = layers[-1].register_forward_hook(lambda module, args, output: outputs.append(output))
    embeddings = policy.base.get_input_embeddings()
    embeddings.requires_grad_(False)
    ids = fusion_check.check_ids(61, 16).view(2, 8)
    policy.base.model(input_ids=ids, use_cache=False)
    hook.remove(), after.remove()
    vectors = {f"model.layers.{name}": each for name, each in layers.named_parameters() if each.ndim == 1}
    upstream = fusion_check._wave(outputs[0])
    expected = torch.autograd.grad(outputs[0], [inputs[0], *vectors.values()], upstream)
    whole = {"the embeddings": expected[0].flatten(0, 1)}
    whole |= {name: each[None] for name, each in zip(vectors, expected[1:], strict=True)}
    assert_gradients_close(found.gradients, whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("what", CHANGES)
def test_a_change_of_values_or_gradients_is_named_and_rounding_is_not(what, dtype):
    policy = policy_of(dtype)
    plain = fusion_check.run_passes(policy, CPU)
    undo = replace_forward(policy.base.model.get_submodule(NAME), changed(CHANGES[what]))
    fused = fusion_check.run_passes(policy, CPU)
    undo()
    reason = fusion_check.reason_against(policy, CPU, plain, fused)
    if what in ("nothing", "a unit in the last place"):
        assert reason is None
    else:
        named = "its hidden states" if what == "values" else "its gradient of"
        assert str(reason).startswith(f"of the whole model {named}")


def apply(model: Any, modules: Any, dtype: Any = None) -> AppliedModules:
    """Replace a norm by one whose gradients are wrong."""
    applied = AppliedModules(dict.fromkeys(modules, ()), {module: {} for module in modules})
    norm = model.model.get_submodule(NAME)
    applied._undo.append(replace_forward(norm, changed(CHANGES["gradients"])))
    applied.replaced["rms_norm"] = (NAME,)
    return applied


@pytest.mark.parametrize("passes", [1, 2])
def test_a_model_that_the_check_cannot_run_keeps_its_own_modules(monkeypatch, passes: int):
    monkeypatch.setattr(fused_modules, "apply", apply)
    original, calls = fusion_check.run_passes, []

    def failing(policy: PolicyModel, device: torch.device) -> Any:
        calls.append(device)
        if len(calls) == passes:
            raise TypeError("layer() missing 1 required argument: 'states'")
        return original(policy, device)

    monkeypatch.setattr(fusion_check, "run_passes", failing)
    policy = policy_of()
    fused = fuse(settings(), hwgrpo_backends.get("cuda"), policy, SDPA)
    assert not any(fused.record["replaced"].values())
    assert "the startup check of the whole model fails (TypeError: layer() missing 1" in fused.line
    assert not any("forward" in vars(each) for each in policy.modules())


def test_a_model_whose_fused_modules_fail_keeps_its_own_and_says_why(monkeypatch):
    monkeypatch.setattr(fused_modules, "apply", apply)
    policy, cuda = policy_of(), hwgrpo_backends.get("cuda")
    fused = fuse(settings(), cuda, policy, SDPA)
    assert not any(fused.record["replaced"].values())
    assert "of the whole model its gradient of" in fused.record["skipped"]["rms_norm"][""]
    assert "rms_norm: none (of the whole model its gradient" in fused.line
    assert not any("forward" in vars(each) for each in policy.modules())
    with pytest.raises(ConfigError, match="rms_norm replaces no module: of the whole model its gradient"):
        fuse(settings("model.fused_modules=[rms_norm]"), cuda, policy, SDPA)


def test_it_leaves_the_model_as_it_was():
    policy = policy_of().train()
    policy.base.model.layers[1].eval()
    modes = [each.training for each in policy.modules()]
    fusion_check.run_passes(policy, CPU)
    assert [each.training for each in policy.modules()] == modes
    assert all(each.grad is None for each in policy.parameters())
    assert not any(each._forward_pre_hooks for each in policy.modules())
