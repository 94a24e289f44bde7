"""Settings of a policy loss that do nothing where every ratio is 1: those that are named, and no others."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hwgrpo_backends.cpu import BACKEND

from hwgrpo.algorithms.policy_loss import build_loss
from hwgrpo.algorithms.settings_of_ratio import of_ratio, ratio_note, settings_of_ratio
from hwgrpo.catalog import POLICY_LOSSES
from hwgrpo.config.schema import AlgorithmConfig, LossConfig
from hwgrpo.training.setup import build_run
from tests.support.runs import runs

OTHER: dict[str, float] = {
    "clip_low": 0.01, "clip_high": 0.01, "dual_clip": 1.01, "delta": 1.01, "log_ratio_clamp": 0.01, "tau_pos": 3.0,
    "tau_neg": 3.0,
}  # fmt: skip
"""Values that would show if a ratio were not 1."""
SEQUENCES, TOKENS = 8, 40
OFF = {"dual_clip": None}
"""So that delta binds."""


def gradient(loss: LossConfig, old: torch.Tensor | None = None) -> torch.Tensor:
    """Return the gradient of the loss with respect to the log-probs of some sequences."""
    generator = torch.Generator().manual_seed(0)
    logprob = -torch.rand(SEQUENCES * TOKENS, generator=generator) * 3
    rows = {
        "advantage": torch.tensor([1.0, -0.7] * (SEQUENCES // 2)).repeat_interleave(TOKENS),
        "weight": torch.rand(SEQUENCES * TOKENS, generator=generator),
        "selected": torch.tensor([0.0, 1.0]).repeat(SEQUENCES * TOKENS // 2),
    }
    if old is not None:
        rows["old_logprob"] = logprob + old
    leaf = logprob.clone().requires_grad_()
    stats = SimpleNamespace(logprob=leaf, entropy=None, full_kl=None, cu_seqlens=TOKENS * torch.arange(SEQUENCES + 1))
    losses, _ = build_loss(AlgorithmConfig(loss=loss))(stats, rows)
    return torch.autograd.grad(losses.sum(), leaf)[0]


def own_arguments(name: str) -> dict[str, float]:
    """Return the arguments of a loss itself, each with another value than the default, without those of a selection."""
    loss: Any = POLICY_LOSSES.load(name)
    selected = inspect.signature(loss.selects).parameters if loss.selects else {}
    keywords = inspect.signature(loss.function).parameters.values()
    own = [each for each in keywords if each.kind is each.KEYWORD_ONLY]
    return {each.name: each.default / 16 for each in own if each.name not in selected}


@pytest.mark.parametrize("name", POLICY_LOSSES.names())
def test_on_policy_the_settings_that_are_named_change_no_bit_and_all_others_do(name):
    named = of_ratio(name)
    moved = torch.rand(SEQUENCES * TOKENS, generator=torch.Generator().manual_seed(1)) * 2 - 1
    moved += torch.linspace(-0.3, 0.3, SEQUENCES).repeat_interleave(TOKENS)
    changes = [
        ({setting: value}, setting) for setting, value in OTHER.items() if setting in POLICY_LOSSES.built_in[name].reads
    ]
    changes += [({"kwargs": {argument: value}}, argument) for argument, value in own_arguments(name).items()]
    for change, setting in changes:
        on_policy, off_policy = (
            not torch.equal(gradient(LossConfig(name, **OFF | change), old), gradient(LossConfig(name, **OFF), old))
            for old in (None, moved)
        )
        assert on_policy == (off_policy and setting not in named), setting
        assert off_policy or setting not in named, setting


def test_a_cap_below_1_has_an_effect_on_policy_too_and_is_not_named():
    loss = LossConfig("cispo", clip_high=-0.5, log_ratio_clamp=5.0)
    assert not torch.equal(gradient(loss), gradient(LossConfig("cispo")))
    assert settings_of_ratio(loss) == ["algorithm.loss.log_ratio_clamp=5"]


def test_tokens_that_kl_cov_selects_have_the_gradient_of_others_on_policy_and_those_of_clip_cov_none():
    for name, same in (("kl_cov", True), ("clip_cov", False)):
        assert torch.equal(gradient(LossConfig(name)), gradient(LossConfig("gpg"))) == same


def test_defaults_and_what_is_off_are_not_named_and_own_arguments_always_are():
    assert ratio_note(LossConfig()) is None
    assert ratio_note(LossConfig(dual_clip=None, log_ratio_clamp=None)) is None
    assert ratio_note(LossConfig("sapo", tau_pos=2.0)) is None
    assert settings_of_ratio(LossConfig(clip_high=0.28, dual_clip=2.0)) == [
        "algorithm.loss.clip_high=0.28",
        "algorithm.loss.dual_clip=2",
    ]
    assert settings_of_ratio(LossConfig("kl_cov", kwargs={"coef": 0.5})) == [
        "algorithm.loss.kwargs.share=0.0002",
        "algorithm.loss.kwargs.coef=0.5",
    ]
    note = ratio_note(LossConfig("kl_cov")) or ""
    assert "every ratio is 1" in note
    assert "scoring pass that selects tokens changes nothing" in note
    assert "scoring pass" not in (ratio_note(LossConfig("clip_cov", clip_low=0.1)) or "")


@pytest.mark.parametrize(
    ("overrides", "named"),
    [((), True), (("trainer.epochs_per_batch=2",), False), (("algorithm.old_logprobs=rollout",), False)],
)
def test_a_run_names_them_at_its_start_if_every_ratio_is_1(overrides, named, tmp_path, capfd):
    torch.set_num_threads(1)
    run = build_run(
        runs.small(tmp_path / "run", "algorithm.loss.name=dro", "observe.progress=plain", *overrides), BACKEND, 0, 1
    )
    run.close()
    assert ("algorithm.loss.kwargs.beta=0.1 has no effect" in "".join(capfd.readouterr())) == named
