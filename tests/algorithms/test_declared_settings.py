"""Every loss and estimator reads the settings that the catalog declares, and no others."""

import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hwgrpo.algorithms.advantages import group_advantages
from hwgrpo.algorithms.kl import build_kl
from hwgrpo.algorithms.policy_loss import build_loss
from hwgrpo.algorithms.token_advantages import ARGUMENTS_OF_STEP
from hwgrpo.algorithms.token_selection import UpdateTokens
from hwgrpo.catalog import ADVANTAGES, KL_ESTIMATORS, POLICY_LOSSES
from hwgrpo.config.bound_arguments import own_arguments
from hwgrpo.config.schema import AdvantageConfig, AlgorithmConfig, KlConfig, LossConfig
from hwgrpo.errors import ConfigError, DataError
from hwgrpo.registry import Registry
from hwgrpo.values import StepRewards
from tests.support.numbers.token_probs import token_probs

LOSS: dict[str, tuple[Any, ...]] = {
    "clip_low": (0.01,), "clip_high": (0.01,), "dual_clip": (1.01,), "delta": (1.01,), "log_ratio_clamp": (0.01,),
    "tau_pos": (3.0,), "tau_neg": (3.0,),
}  # fmt: skip
ADVANTAGE: dict[str, tuple[Any, ...]] = {
    "eps": (0.5,), "std": ("none", "batch"), "std_correction": (0,), "singleton": ("error",)
}  # fmt: skip
KL: dict[str, tuple[Any, ...]] = {"input_clamp": (0.01,), "output_clamp": (0.01,)}
"""Settings of a section that a function may read: values that show, unlike the default."""
SECTIONS: dict[str, tuple[type, Registry, dict[str, tuple[Any, ...]], set[str]]] = {
    "algorithm.loss.name": (LossConfig, POLICY_LOSSES, LOSS, {"name"}),
    "algorithm.advantage.name": (AdvantageConfig, ADVANTAGES, ADVANTAGE, {"name", "clip"}),
}
"""Setting of the name -> its section, the functions, the settings that they may read, those that apply to all."""
SEQUENCES, TOKENS = 8, 20
LENGTHS = torch.tensor([3, 1, 4, 2, 5, 2, 3])


def outcome_of_loss(config: LossConfig) -> Iterator[torch.Tensor]:
    """Yield selection, losses, metrics and gradient of some sequences, off policy and on policy."""
    generator = torch.Generator().manual_seed(0)
    logprob = -torch.rand(SEQUENCES * TOKENS, generator=generator).double() * 3
    advantage = torch.tensor([3.0, -2.0] * (SEQUENCES // 2)).double().repeat_interleave(TOKENS)
    moved = torch.rand(SEQUENCES * TOKENS, generator=generator).double() * 3 - 1.5
    moved += torch.linspace(-0.3, 0.3, SEQUENCES).double().repeat_interleave(TOKENS)
    loss = build_loss(AlgorithmConfig(loss=config))
    for old in (logprob + moved, None):
        before, order = logprob if old is None else old, torch.randperm(SEQUENCES * TOKENS, generator=generator)
        lengths = torch.full((SEQUENCES,), TOKENS)
        tokens = UpdateTokens(logprob, before, before, torch.ones_like(logprob), advantage, order, lengths)
        rows = {name: select(tokens).double() for name, select in loss.selections.items()}
        rows |= {"advantage": advantage, "weight": torch.ones_like(logprob)}
        rows |= {} if old is None else {"old_logprob": old}
        leaf = logprob.clone().requires_grad_()
        bounds = TOKENS * torch.arange(SEQUENCES + 1)
        stats = SimpleNamespace(logprob=leaf, entropy=None, full_kl=None, cu_seqlens=bounds)
        losses, metrics = loss(stats, rows)
        yield from (*rows.values(), losses.detach(), *metrics.values())
        yield torch.autograd.grad(losses.sum(), leaf)[0]


def two_steps(rewards: torch.Tensor) -> StepRewards:
    """Return responses of two steps, the second with a third of the reward, in two states."""
    each = torch.stack([rewards * 2 / 3, rewards / 3], 1).flatten()
    ends = torch.stack([torch.zeros(len(rewards)), LENGTHS[: len(rewards)] - 1], 1).flatten().long()
    return StepRewards(each, ends, 2 * torch.arange(len(rewards) + 1), torch.tensor([0, 1]).repeat(len(rewards)))


def outcome_of_estimator(config: AdvantageConfig) -> Iterator[torch.Tensor]:
    """Yield the advantages of two groups, and of a single response."""
    rewards = torch.tensor([1.0, 0.0, 0.3, 0.2, 5.0, 0.7, 2.0], dtype=torch.float64)
    groups = torch.tensor([0, 0, 0, 0, 1, 1, 1])
    for some in (slice(0, 7), slice(0, 1)):
        given = rewards[some], groups[some], torch.ones(7, dtype=torch.bool)[some], config, LENGTHS[some]
        for steps in (None, two_steps(rewards[some])):
            yield group_advantages(*given, None, steps, token_probs=token_probs(LENGTHS[some]))


def outcome_of_kl(config: KlConfig) -> Iterator[torch.Tensor]:
    logprob = -torch.rand(50, generator=torch.Generator().manual_seed(0)).double() * 3
    if config.estimator == "exact":
        yield build_kl(config)(logprob)
    else:
        yield build_kl(config)(logprob, logprob.flip(0))


def outcome(compute: Callable[[Any], Iterator[torch.Tensor]], config: Any) -> list[Any]:
    """Return the numbers that settings lead to, up to an error, which is a result, too."""
    found: list[Any] = []
    try:
        found += (each.tolist() for each in compute(config))
    except (ConfigError, DataError) as error:
        found.append(str(error))
    return found


def changed(compute: Callable[[Any], Iterator[torch.Tensor]], config: Any, setting: str, values: Any) -> bool:
    """Return whether one of the values of a setting leads to other numbers."""
    usual = outcome(compute, config)
    return any(outcome(compute, dataclasses.replace(config, **{setting: value})) != usual for value in values)


def check(
    registry: Registry, name: str, compute: Callable[[Any], Iterator[torch.Tensor]], config: Any, settings: Any
) -> None:
    """Assert that a function reads the settings that its line in the catalog declares, and no others."""
    reads = {*registry.built_in[name].reads}
    assert {each for each, values in settings.items() if changed(compute, config, each, values)} == reads - {"kwargs"}


def check_arguments(registry: Registry, name: str, compute: Callable[[Any], Iterator[torch.Tensor]], config: Any):
    """Assert that a function has arguments of its own iff it declares `kwargs`, and reads each."""
    loaded = registry.load(name)
    arguments = own_arguments(getattr(loaded, "function", loaded))
    arguments = {each: default for each, default in arguments.items() if each not in ARGUMENTS_OF_STEP}
    assert bool(arguments) == ("kwargs" in registry.built_in[name].reads)
    for each, default in arguments.items():
        values = [{each: value} for value in (default / 16, default * 16, 1, 0.25)]
        assert changed(compute, config, "kwargs", values), each


@pytest.mark.parametrize("name", POLICY_LOSSES.names())
def test_a_loss_reads_what_it_declares(name: str):
    check(POLICY_LOSSES, name, outcome_of_loss, LossConfig(name), LOSS)
    check_arguments(POLICY_LOSSES, name, outcome_of_loss, LossConfig(name))


@pytest.mark.parametrize("name", ADVANTAGES.names())
def test_an_estimator_reads_what_it_declares(name: str):
    check(ADVANTAGES, name, outcome_of_estimator, AdvantageConfig(name), ADVANTAGE)
    check_arguments(ADVANTAGES, name, outcome_of_estimator, AdvantageConfig(name))


@pytest.mark.parametrize("name", KL_ESTIMATORS.names())
def test_a_kl_estimator_reads_what_it_declares(name: str):
    check(KL_ESTIMATORS, name, outcome_of_kl, KlConfig(0.1, name), KL)


@pytest.mark.parametrize("key", SECTIONS)
def test_the_schema_asks_of_every_setting_whether_the_function_reads_it(key: str):
    section, registry, settings, of_all = SECTIONS[key]
    fields = {field.name: field.metadata.get("used_by", ()) for field in dataclasses.fields(section)}
    assert fields.keys() - of_all - {"kwargs"} == settings.keys()
    for setting in fields.keys() - of_all:
        [condition] = [uses for uses in fields[setting] if any(use.key == key for use in uses)]
        named = {name for name in registry.names() if any(use.fulfilled(name) for use in condition)}
        assert named == {*registry.readers(setting)}, setting
        assert any(use.fulfilled("mine.py:own") for use in condition), "one of the user's own may read it"
