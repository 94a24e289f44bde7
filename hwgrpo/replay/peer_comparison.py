"""Rewards and advantages of a peer's step against those of the settings, by this project's formulas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from hwgrpo.algorithms.advantages import group_advantages
from hwgrpo.algorithms.token_advantages import takes
from hwgrpo.config import Config
from hwgrpo.config.schema import AdvantageConfig
from hwgrpo.errors import ConfigError
from hwgrpo.ragged import offsets_of
from hwgrpo.replay.peer_dumps import PeerDump
from hwgrpo.replay.recomputed_rewards import OF_MODELS
from hwgrpo.rewards.combine import gated_sum
from hwgrpo.support.stage_differences import EPS, LEAST, Stage, compare_tensor, least_tolerance, worst_of
from hwgrpo.training.reward_setup import open_rewards
from hwgrpo.values import Completions, Prompt, PromptBatch

TRUTHS = ("gts", "ground_truth")
"""Columns with a ground truth, of which the first that every row has counts."""


@dataclass(frozen=True)
class PeerComparison:
    """A peer's step against this project's formulas."""

    stages: tuple[Stage, ...]
    groups: tuple[dict[str, Any], ...]
    """Per group: prompt, and of each response the peer's reward and advantage (`peer`) and those of here (`here`)."""
    notes: tuple[str, ...]


def compare_dump(dump: PeerDump, config: Config, tokenizer: Any) -> PeerComparison:
    """Compare the rewards by the reward functions of the settings, the advantages from the peer's rewards.

    Args:
        dump: the step.
        config: reward functions with weights, estimator, model with the tokenizer.
        tokenizer: makes the tokens that the file does not have.

    Raises:
        ConfigError: the estimator reads what the file does not have.
    """
    estimator = config.algorithm.advantage
    for argument in ("token_probs", "steps", "greedy_S"):
        if takes(estimator, argument):
            raise ConfigError(
                f"algorithm.advantage.name={estimator.name!r} reads {argument}, which a file of {dump.peer} does not "
                "have; use an estimator of rewards, e.g. grpo"
            )
    notes = ["tokens are those of the file"]
    if dump.tokens is None:
        notes = [
            f"tokens are those of model.path={config.model.path!r} for the file's texts, which need not be the peer's"
        ]
    completions = _completions(dump, tokenizer)
    valid = _valid(dump)
    rewards = _peer_rewards(dump, config)
    found, stages = None, []
    truths = next((name for name in TRUTHS if all(name in row for row in dump.rows)), None)
    models = [function.name for function in config.reward.functions if function.name in OF_MODELS]
    if truths is None or models:
        why = f"{models[0]} is computed by a model or a service" if models else "the file has no ground truths"
        notes.append(f"rewards are not recomputed: {why}")
    else:
        with open_rewards(config, None, 0, tokenizer) as pipeline:
            scored = pipeline.score(_prompts(dump, truths), completions, dump.step)
        found = scored.total
        stages.append(worst_of(_rewards(dump, rewards, scored.total)))
    advantages = group_advantages(
        rewards.where(valid, 0.0),
        dump.groups,
        valid,
        estimator,
        completions.loss_lengths,
        {
            name: (function.weight, values)
            for (name, values), function in zip(dump.rewards.items(), config.reward.functions, strict=True)
        }
        if dump.rewards
        else None,
    )
    if dump.advantages is None:
        notes.append(f"advantages are not compared: a file of {dump.peer} has none; --json has those of here")
    else:
        stages.append(worst_of(_advantages(dump, rewards, advantages, estimator)))
    return PeerComparison(tuple(stages), tuple(_groups(dump, rewards, found, advantages)), tuple(notes))


def _peer_rewards(dump: PeerDump, config: Config) -> torch.Tensor:
    """Return the peer's total rewards [S]."""
    if dump.total is not None:
        return dump.total
    return gated_sum([values.nan_to_num(0.0) for values in dump.rewards.values()], config.reward.functions)


def _valid(dump: PeerDump) -> torch.Tensor:
    """Return [S] bool: False where no function of the peer returned a reward, as for TRL."""
    if dump.total is not None:
        return dump.total.isfinite()
    return torch.stack([*dump.rewards.values()]).isfinite().any(0)


def _completions(dump: PeerDump, tokenizer: Any) -> Completions:
    tokens = dump.tokens or [tokenizer.encode(text, add_special_tokens=False) for text in dump.responses]
    joined = torch.tensor([token for each in tokens for token in each], dtype=torch.int64)
    sampled = None if dump.sampled is None else torch.tensor([each for row in dump.sampled for each in row])
    return Completions(
        prompt_index=dump.groups,
        tokens=joined,
        offsets=offsets_of(torch.tensor([len(each) for each in tokens])),
        logprobs=torch.zeros(len(joined)),
        finished=torch.ones(len(tokens), dtype=torch.bool),
        texts=dump.responses,
        loss_mask=sampled,
    )


def _prompts(dump: PeerDump, truths: str) -> PromptBatch:
    first = {group: row for row, group in reversed([*enumerate(dump.groups.tolist())])}
    prompts = []
    for group in range(len(first)):
        row = dump.rows[first[group]]
        source = str(row.get("data_source", ""))
        prompts.append(Prompt(f"0:{group}", dump.prompts[first[group]], (), row[truths], dict(row), source))
    return PromptBatch(tuple(prompts))


def _rewards(dump: PeerDump, expected: torch.Tensor, actual: torch.Tensor) -> Iterator[Stage]:
    for group in range(int(dump.groups.max()) + 1):
        of_group = dump.groups == group
        tolerance = least_tolerance(expected[of_group])
        yield _placed(compare_tensor("rewards", "reward", actual[of_group], expected[of_group], tolerance), group)


def _advantages(
    dump: PeerDump, rewards: torch.Tensor, actual: torch.Tensor, estimator: AdvantageConfig
) -> Iterator[Stage]:
    """Compare the advantages of each group: peers compute mean m and standard deviation s of its rewards in fp32.

    Of (r - m) / (s + eps) numerator and denominator round by up to eps(fp32) times the largest reward for each term.
    """
    assert dump.advantages is not None
    for group in range(int(dump.groups.max()) + 1):
        of_group = dump.groups == group
        values, expected = rewards[of_group], dump.advantages[of_group]
        deviation = {"none": torch.ones(()), "batch": rewards.std(), "group": values.std()}[estimator.std]
        scale = max(float(deviation.nan_to_num(1.0)) + estimator.eps, 1e-6)
        rounding = EPS * len(values) * float(values.abs().max()) / scale
        largest = float(expected.abs().max())
        tolerance = LEAST * (rounding * (1 + largest) + EPS * largest)
        yield _placed(compare_tensor("advantages", "advantage", actual[of_group], expected, tolerance), group)


def _placed(stage: Stage, group: int) -> Stage:
    return replace(stage, tensor=f"{stage.tensor} of group {group}, response ")


def _groups(
    dump: PeerDump, rewards: torch.Tensor, found: torch.Tensor | None, advantages: torch.Tensor
) -> Iterator[dict[str, Any]]:
    for group in range(int(dump.groups.max()) + 1):
        of_group = dump.groups == group
        first = int(of_group.nonzero()[0])
        yield {
            "prompt": dump.prompts[first],
            "rewards": {
                "peer": rewards[of_group].tolist(),
                "here": None if found is None else found[of_group].tolist(),
            },
            "advantages": {
                "peer": None if dump.advantages is None else dump.advantages[of_group].tolist(),
                "here": advantages[of_group].tolist(),
            },
        }
