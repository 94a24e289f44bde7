"""Trajectories of several turns that tests make for themselves, and the gradient of an update on them by formula."""

from __future__ import annotations

import copy
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from hwgrpo.config.schema import RewardFunctionConfig
from hwgrpo.rewards.combine import RewardPipeline
from hwgrpo.rewards.trajectory_outcomes import TurnFinder
from hwgrpo.training.strategies.strategy import Strategy
from hwgrpo.training.update.train_batch import advantages_over_ranks, assemble
from hwgrpo.values import Completions, Prompt, PromptBatch, Rewards, TrainBatch
from tests.support.models.tiny import VOCAB

UNREAD = 40.0
"""Log-prob of observed tokens, which nothing reads: a ratio against it would be e^40."""


def trajectories(prompts: int = 4, n: int = 3, seed: int = 0) -> tuple[PromptBatch, Completions]:
    """Return prompts and n trajectories to each, of one to four turns with observed tokens after most of them.

    Some end with observed tokens, as truncated ones do. Tokens are of three kinds, so that some begin alike. States
    recur within a group, and between groups, which must not be compared.
    """
    g = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=g))

    tokens, mask, lengths, outcomes = [], [], [], []
    for sample in range(prompts * n):
        turns = draw(1, 5)
        parts = [(draw(1, 5), draw(1, 4) if turn < turns - 1 or sample % 4 == 0 else 0) for turn in range(turns)]
        mask += [flag for sampled, observed in parts for flag in [True] * sampled + [False] * observed]
        lengths.append(sum(map(sum, parts)))
        rewards = [draw(0, 3) / 2 for _ in range(turns)]
        states = [None if draw(0, 5) == 0 else "ab"[draw(0, 2)] for _ in range(turns)]
        outcomes.append({"reward": sum(rewards), "turn_rewards": rewards, "states": states, "failure": ""})
    total = sum(lengths)
    tokens = torch.randint(3, (total,), generator=g)
    loss_mask = torch.tensor(mask)
    logprobs = torch.where(loss_mask, -3 + 0.5 * torch.randn(total, generator=g), UNREAD)
    made = [
        Prompt(f"0:{i}", f"prompt {i}", tuple(torch.randint(VOCAB, (draw(2, 6),), generator=g).tolist()), None, {})
        for i in range(prompts)
    ]
    completions = Completions(
        prompt_index=torch.arange(prompts).repeat_interleave(n),
        tokens=tokens,
        offsets=torch.tensor([0, *itertools.accumulate(lengths)]),
        logprobs=logprobs,
        loss_mask=loss_mask,
        finished=torch.ones(prompts * n, dtype=torch.bool),
        texts=("",) * (prompts * n),
        outcomes=tuple(outcomes),
    )
    return PromptBatch(tuple(made)), completions


def forked(prompts: PromptBatch, completions: Completions, seed: int = 0) -> Completions:
    """Return trajectories of which most observed tokens are a rewritten history, with which a further row begins.

    Some rows begin with a part of the prompt.
    """
    g = torch.Generator().manual_seed(seed)
    assert completions.loss_mask is not None
    mask, starts = completions.loss_mask.tolist(), [-1] * len(completions.tokens)
    for i, (first, end) in enumerate(itertools.pairwise(completions.offsets.tolist())):
        most = len(prompts.prompts[int(completions.prompt_index[i])].token_ids)
        for place in range(first + 1, end):
            if mask[place - 1] and not mask[place] and float(torch.rand((), generator=g)) < 0.75:
                part = int(torch.randint(1, most + 1, (1,), generator=g))
                starts[place] = most if float(torch.rand((), generator=g)) < 0.6 else part
    return replace(completions, row_starts=torch.tensor(starts))


def rows_of(prompts: PromptBatch, completions: Completions, i: int) -> list[tuple[list[int], int, int]]:
    """Return what the model reads before each row of a trajectory, and the bounds of the row's tokens."""
    prompt = [*prompts.prompts[int(completions.prompt_index[i])].token_ids]
    start, end = completions.offsets[i : i + 2].tolist()
    found = [(prompt, start, end)]
    for place in range(start, end):
        kept = -1 if completions.row_starts is None else int(completions.row_starts[place])
        if kept >= 0:
            before, first, _ = found.pop()
            found += [(before, first, place), (prompt[:kept], place, end)]
    return found


def environment_rewards(prompts: PromptBatch, completions: Completions, *, turns: bool) -> Rewards:
    """Score trajectories by the reward `environment`, as a run does."""
    config = SimpleNamespace(functions=[RewardFunctionConfig(name="environment")])
    with RewardPipeline(config, steps=TurnFinder(needs_lists=True) if turns else None) as pipeline:
        return pipeline.score(prompts, completions)


def share_of(prompts: PromptBatch, completions: Completions, first: int, stop: int) -> tuple[PromptBatch, Completions]:
    """Return the prompts [first, stop) with their trajectories."""
    wanted = (completions.prompt_index >= first) & (completions.prompt_index < stop)
    mine = completions.select(wanted)
    return PromptBatch(prompts.prompts[first:stop]), mine.__class__(
        **{**vars(mine), "prompt_index": mine.prompt_index - first}
    )


def train_batch(prompts: PromptBatch, completions: Completions, config: Any, strategy: Strategy) -> TrainBatch:
    """Return the batch that a run makes of trajectories, with log-probs of a reference."""
    advantage = config.algorithm.advantage
    rewards = environment_rewards(prompts, completions, turns=advantage.name in ("gigpo", "process"))
    advantages, of_tokens = advantages_over_ranks(
        advantage, config.reward.functions[:1], completions, rewards, strategy
    )
    batch = assemble(prompts, completions, advantages, rewards.valid, of_tokens)
    return TrainBatch(
        **{
            **vars(batch),
            "old_logprobs": batch.rollout_logprobs,
            "ref_logprobs": batch.rollout_logprobs + 0.25 * torch.cos(batch.tokens.float()),
        }
    )


def turns_of(mask: Sequence[bool]) -> list[list[int]]:
    """Return the places of the tokens of each run of True."""
    places = [i for i, sampled in enumerate(mask) if sampled]
    runs = itertools.groupby(places, key=lambda place: place - places.index(place))
    return [list(run) for _, run in runs]


def normalised(values: Sequence[float], std: str) -> list[float]:
    """Return (v - mean) / (std + 1e-6); all 0 where they are equal, or there is one."""
    if len(set(values)) < 2:
        return [0.0] * len(values)
    scale = statistics.stdev(values) + 1e-6 if std == "group" else 1.0
    return [(value - statistics.mean(values)) / scale for value in values]


def advantages_by_formula(completions: Completions, config: Any) -> list[list[float]]:
    """Return the advantages of each trajectory's tokens, None for observed ones, in plain Python."""
    advantage = config.algorithm.advantage
    std, options = advantage.std, {"gamma": 0.95, "episode_weight": 1.0, "step_weight": 1.0, **advantage.kwargs}
    groups: dict[int, list[int]] = {}
    for i, prompt in enumerate(completions.prompt_index.tolist()):
        groups.setdefault(prompt, []).append(i)
    bounds = [slice(*pair) for pair in itertools.pairwise(completions.offsets.tolist())]
    assert completions.loss_mask is not None
    masks = [completions.loss_mask[here].tolist() for here in bounds]
    rewards = [outcome["turn_rewards"] for outcome in completions.outcomes]
    result: list[list[float]] = [[0.0] * len(mask) for mask in masks]
    for members in groups.values():
        of_episode = dict(zip(members, normalised([sum(rewards[i]) for i in members], std), strict=True))
        of_turn = {(i, t): 0.0 for i in members for t in range(len(rewards[i]))}
        if advantage.name == "process":
            flat = normalised([rewards[i][t] for i, t in of_turn], std)
            of_step = dict(zip(of_turn, flat, strict=True))
            of_turn = {(i, t): sum(v for (j, u), v in of_step.items() if j == i and u >= t) for i, t in of_turn}
            of_episode = dict.fromkeys(members, 0.0)
        elif advantage.name == "gigpo":
            returns = {
                (i, t): sum(options["gamma"] ** (u - t) * rewards[i][u] for u in range(t, len(rewards[i])))
                for i, t in of_turn
            }
            for state in ("a", "b"):
                same = [(i, t) for i, t in of_turn if completions.outcomes[i]["states"][t] == state]
                of_turn |= dict(zip(same, normalised([returns[each] for each in same], std), strict=True))
        weights = (options["episode_weight"], options["step_weight"]) if advantage.name == "gigpo" else (1.0, 1.0)
        for i in members:
            turns = turns_of(masks[i])
            assert len(turns) == len(rewards[i])
            for t, places in enumerate(turns):
                for place in places:
                    result[i][place] = weights[0] * of_episode[i] + weights[1] * of_turn[i, t]
    return result


def gradient_by_formula(
    model: Any, config: Any, prompts: PromptBatch, completions: Completions
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradient of one update, fp64, by plain autograd on one row of a trajectory after another.

    The rows of all trajectories whose token was sampled are put into one table, with the number of the trajectory and
    of its prompt; the loss is a sum over them.
    """
    model, a = copy.deepcopy(model).double(), config.algorithm
    assert completions.loss_mask is not None
    rows: list[tuple[torch.Tensor, int, int]] = []
    advantages = advantages_by_formula(completions, config)
    of_rows = ((i, row) for i in range(len(completions)) for row in rows_of(prompts, completions, i))
    for i, (prompt, start, end) in of_rows:
        first = int(completions.offsets[i])
        ids = torch.tensor([[*prompt, *completions.tokens[start:end].tolist()]])
        log_p = model(input_ids=ids).logits[0].log_softmax(-1)
        for place in range(end - start):
            if not completions.loss_mask[start + place]:
                continue
            predicted = log_p[len(prompt) + place - 1]
            lp = predicted[completions.tokens[start + place]]
            advantage = advantages[i][start + place - first]
            old = float(completions.logprobs[start + place])
            reference = old + 0.25 * float(torch.cos(completions.tokens[start + place].float()))
            ratio = (lp - old).exp()
            term = torch.maximum(
                -advantage * ratio, -advantage * ratio.clamp(1 - a.loss.clip_low, 1 + a.loss.clip_high)
            )
            if advantage < 0 and a.loss.dual_clip is not None:
                term = torch.minimum(term, torch.tensor(-a.loss.dual_clip * advantage, dtype=torch.float64))
            x = reference - lp
            term = term + a.kl.coef * (x.exp() - x - 1) + a.entropy_coef * (predicted.exp() * predicted).sum()
            rows.append((term, i, int(completions.prompt_index[i])))
    tokens_of = [sum(1 for _, i, _ in rows if i == s) for s in range(len(completions))]
    tokens_of_prompt = {p: sum(1 for *_, q in rows if q == p) for *_, p in rows}
    sequences = sum(tokens > 0 for tokens in tokens_of)
    loss = torch.zeros((), dtype=torch.float64)
    for term, i, p in rows:
        divisor = {
            "token-mean": len(rows),
            "token-sum": 1,
            "seq-mean-token-sum": sequences,
            "seq-mean-token-sum-norm": sequences * config.rollout.max_response_tokens,
            "seq-mean-token-mean": sequences * tokens_of[i],
            "prompt-mean": len(tokens_of_prompt) * tokens_of_prompt[p],
        }[a.aggregation.name]
        loss = loss + term / divisor
    loss.backward()
    return float(loss.detach()), {name: p.grad for name, p in model.named_parameters()}
