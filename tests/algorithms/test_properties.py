"""Properties of loss and gradient of an update, for drawn batches and settings, and every legal combination once.

They depend on neither micro-batches, layout, order of the responses nor ranks, and are those of docs/grpo.md's formulas
by fp64 autograd on full logits. Draws are the same in every run.
"""

import copy
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, strategies
from hypothesis import settings as limits

from hwgrpo.algorithms.aggregation import token_weights, tokens_of_prompts
from hwgrpo.algorithms.policy_loss import build_loss
from hwgrpo.algorithms.token_selection import UpdateTokens
from hwgrpo.catalog import ADVANTAGES, AGGREGATIONS, CORRECTIONS, EXACT_KL, KL_ESTIMATORS, POLICY_LOSSES
from hwgrpo.config import Config
from hwgrpo.config.schema import AggregationConfig, AlgorithmConfig, CorrectionConfig, KlConfig, LossConfig
from hwgrpo.config.validate import check_config
from hwgrpo.training.policy.layouts import BRANCHED, GROUPED, GROUPED_MASKED, PACKED, PADDED
from hwgrpo.training.policy.policy_model import PolicyModel
from hwgrpo.training.policy.reference_model import Reference
from hwgrpo.training.strategies.strategy import Strategy
from hwgrpo.training.update.policy_update import PolicyUpdate
from hwgrpo.training.update.train_batch import advantages_over_ranks, assemble
from hwgrpo.values import Completions, Prompt, PromptBatch, Rewards, TrainBatch
from tests.support.models.exact_kl import moved
from tests.support.models.steps import updater
from tests.support.models.tiny import VOCAB, settings, tiny_qwen3
from tests.support.numbers.page_formulas import Response, bonus_weights, kl_term, policy_terms, update_loss
from tests.support.numbers.page_formulas import token_weights as page_weights
from tests.support.numbers.rounding import STEP, assert_gradients_close
from tests.support.numbers.thread_ranks import on_ranks

LOSSES: dict[str, dict[str, Any]] = {
    "ppo_clip": {"clip_high": 0.28},
    "gspo": {"clip_low": 0.1, "clip_high": 0.1, "delta": 1.2},
    "dppo_tv": {"clip_low": 0.05, "kwargs": {"cap": 1.3}},
    "dppo_kl": {"clip_low": 0.02, "clip_high": 0.05},
    "kl_cov": {"kwargs": {"share": 0.3, "coef": 0.7}},
    "clip_cov": {"kwargs": {"share": 1.0, "low": 0.05, "high": 2.0}},
    "dro": {"kwargs": {"beta": 0.6}},
}
"""Settings that make the special cases of a loss frequent; those of the others are their defaults."""
SELECTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"top_entropy_share": 0.37},
    {"m2po_threshold": 0.02},
    {"off_policy_threshold": 0.05},
    {"reject": {"token_k1": [0.8, 1.3], "seq_mean_k3": 0.04}},
)
LAYOUTS = (PADDED, PACKED, GROUPED, GROUPED_MASKED, BRANCHED)
LONGEST_PROMPT, LONGEST_RESPONSE = 5, 6
SMALLEST = LONGEST_PROMPT + LONGEST_RESPONSE
"""Tokens of the longest sequence, which a micro-batch must hold."""
ROUNDING = 4 * STEP
"""Losses raise the rounding of log-probs to the exponent, and terms of both signs cancel."""
DRAWS = limits(derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def algorithm_of(
    loss: str, estimator: str, aggregation: str, correction: str, selection: dict[str, Any], **more: Any
) -> AlgorithmConfig:
    """Return the settings of a combination; `more` are others of the section, `kl.coef` and `kl.times_ratio`."""
    rest = {key: value for key, value in {**selection, **more}.items() if key not in ("reject", "coef", "times_ratio")}
    coef = more.get("coef", 0.1)
    return AlgorithmConfig(
        loss=LossConfig(loss, **LOSSES.get(loss, {})),
        kl=KlConfig(coef, estimator if coef else "k3", times_ratio=more.get("times_ratio", False)),
        aggregation=AggregationConfig(aggregation),
        correction=CorrectionConfig(correction, reject=selection.get("reject", {})),
        **rest,
    )


# Every legal combination once, on log-probs


LENGTHS = torch.tensor([4, 1, 0, 6, 3, 5])
PROMPTS = torch.tensor([0, 0, 1, 1, 2, 2])
ADVANTAGES_S = torch.tensor([1.2, -0.7, 0.4, -1.5, 0.0, 0.9], dtype=torch.float64)
OTHER_ORDER = [4, 5, 1, 0, 3, 2]
"""Another order of groups and of the responses in them."""


def some_responses() -> list[Response]:
    """Return responses whose log-probs, entropies and KLs are leaves."""
    g = torch.Generator().manual_seed(11)
    found = []
    for prompt, advantage, length in zip(PROMPTS.tolist(), ADVANTAGES_S.tolist(), LENGTHS.tolist(), strict=True):

        def noise(scale: float, length: int = length) -> torch.Tensor:
            return scale * torch.randn(length, generator=g, dtype=torch.float64)

        old = -2 * torch.rand(length, generator=g, dtype=torch.float64) - 0.3
        entropy = torch.rand(length, generator=g, dtype=torch.float64)
        lp = (old + noise(0.35)).clamp(max=-0.01).requires_grad_()
        ref, roll, kl = old + noise(0.4), old + noise(0.2), noise(0.3).abs().requires_grad_()
        found.append(Response(prompt, advantage, lp, entropy.requires_grad_(), old, ref, roll, kl))
    return found


def loss_rows(algorithm: AlgorithmConfig, responses: Sequence[Response], weight_S: torch.Tensor) -> dict[str, Any]:
    """Return the rows of all responses, concatenated, with what the loss selects of them."""
    lengths = torch.tensor([len(each.lp) for each in responses])
    columns = {
        "logprob": [each.lp for each in responses],
        "old_logprob": [each.old for each in responses],
        "ref_logprob": [each.ref for each in responses],
        "rollout_logprob": [each.roll for each in responses],
        "entropy": [each.entropy for each in responses],
        "full_kl": [each.full_kl for each in responses],
    }
    rows = {name: torch.cat(values).detach() for name, values in columns.items()}
    advantages = torch.tensor([each.advantage for each in responses], dtype=torch.float64)
    rows |= {"advantage": advantages.repeat_interleave(lengths), "weight": weight_S.repeat_interleave(lengths)}
    tokens = UpdateTokens(
        rows["logprob"],
        rows["old_logprob"],
        rows["rollout_logprob"],
        rows["entropy"],
        rows["advantage"],
        torch.arange(int(lengths.sum())),
        lengths,
    )
    return rows | {name: select(tokens).double() for name, select in build_loss(algorithm).selections.items()}


def test_every_legal_combination_has_the_formulas_of_the_page_in_any_split_and_order():
    responses = some_responses()
    config = settings()
    aggregations = AGGREGATIONS.names()
    prompt_tokens, prompts = tokens_of_prompts(LENGTHS, PROMPTS)
    counts = {
        "total_tokens": int(LENGTHS.sum()),
        "total_sequences": int((LENGTHS > 0).sum()),
        "norm_length": 16,
        "total_prompts": prompts,
        "prompt_tokens_S": prompt_tokens,
    }
    weights_S = {mode: token_weights(mode, LENGTHS, **counts).double() for mode in aggregations}
    filled = [each for each in responses if len(each.lp)]
    page = {mode: page_weights(AggregationConfig(mode), filled, 16) for mode in aggregations}
    leaves = [leaf for each in filled for leaf in (each.lp, each.entropy, each.full_kl)]
    kl_terms = {name: [kl_term(KlConfig(0.1, name), each) for each in filled] for name in KL_ESTIMATORS.names()}

    def expected(terms: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return token losses [R], and their gradients [3, R] by log-prob, entropy and KL, without weights."""
        found = torch.autograd.grad(torch.cat(list(terms)).sum(), leaves, retain_graph=True, materialize_grads=True)
        return torch.cat(list(terms)).detach(), torch.stack([torch.cat(found[i::3]) for i in range(3)])

    estimates = {name: expected(terms) for name, terms in kl_terms.items()}
    page_rows = torch.tensor([page[mode] for mode in aggregations]).double()
    page_rows = page_rows.repeat_interleave(torch.tensor([len(each.lp) for each in filled]), 1)
    order = torch.tensor(OTHER_ORDER)
    again = [responses[i] for i in OTHER_ORDER]
    places = torch.arange(len(page_rows[0])).split([len(each.lp) for each in again])
    back = torch.cat([places[OTHER_ORDER.index(i)] for i in range(len(responses))])
    covered = 0
    for loss, correction, selection in itertools.product(POLICY_LOSSES.names(), CORRECTIONS.names(), SELECTIONS):
        plain = algorithm_of(loss, "k3", "token-mean", correction, selection, coef=0.0)
        check_config(replace(config, algorithm=plain))
        policy, policy_gradient = expected(policy_terms(plain, filled))
        weighed = zip(bonus_weights(plain, filled), filled, strict=True)
        bonus, bonus_gradient = expected([weight * each.entropy for weight, each in weighed])
        rows = loss_rows(replace(plain, entropy_coef=0.02), again, torch.ones(len(again), dtype=torch.float64))
        for estimator in KL_ESTIMATORS.names():
            algorithm = algorithm_of(loss, estimator, "token-mean", correction, selection, entropy_coef=0.02)
            loss_fn = build_loss(algorithm)
            value, gradient = torch.zeros(len(aggregations), dtype=torch.float64), []
            for part in (range(2), range(2, 6)):  # of the responses in the other order, as if in two micro-batches
                bounds = [sum(len(each.lp) for each in again[: part.start])]
                for i in part:
                    bounds.append(bounds[-1] + len(again[i].lp))
                here = {name: values[bounds[0] : bounds[-1]] for name, values in rows.items()}
                found, slopes = all_aggregations(loss_fn, here, bounds, [weights_S[m][order][part] for m in weights_S])
                value += found
                gradient.append(slopes)
            expected_rows = policy + 0.1 * estimates[estimator][0] - 0.02 * bonus
            expected_gradient = policy_gradient + 0.1 * estimates[estimator][1] - 0.02 * bonus_gradient
            what = f"{loss}, {estimator}, {correction}, {selection}: "
            torch.testing.assert_close(
                value, (page_rows * expected_rows).sum(1), rtol=2e-7, atol=2e-7, msg=lambda m, what=what: what + m
            )
            torch.testing.assert_close(
                torch.cat(gradient, -1)[..., back],
                page_rows[:, None] * expected_gradient,
                rtol=2e-7,
                atol=1e-9,
                msg=lambda m, what=what: what + m,
            )  # weights are fp32
            covered += len(aggregations)
    names = (POLICY_LOSSES, CORRECTIONS, KL_ESTIMATORS, AGGREGATIONS)
    assert covered == math.prod(len(registry.names()) for registry in names) * len(SELECTIONS)


def all_aggregations(
    loss_fn: Any, rows: dict[str, torch.Tensor], bounds: list[int], weights: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss [M] and its gradients [M, 3, R] by log-prob, entropy and KL, under each of M aggregations.

    The loss is called once, with a copy of the responses for each: it sees responses apart from each other.
    """
    copies, cu = len(weights), torch.tensor(bounds) - bounds[0]
    lengths, total = cu.diff(), int(cu[-1])
    repeated = {name: values.repeat(copies) for name, values in rows.items()}
    repeated["weight"] = torch.cat([weight_S.repeat_interleave(lengths) for weight_S in weights])
    lp, entropy, kl = (repeated.pop(name).requires_grad_() for name in ("logprob", "entropy", "full_kl"))
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.repeat(copies).cumsum(0)])
    loss, _ = loss_fn(SimpleNamespace(logprob=lp, entropy=entropy, full_kl=kl, cu_seqlens=cu_seqlens), repeated)
    slopes = torch.autograd.grad(loss.sum(), [lp, entropy, kl], materialize_grads=True)
    return loss.detach().view(copies, total).sum(1), torch.stack([each.view(copies, total) for each in slopes], 1)


# Drawn batches and settings, by whole updates of a model


@dataclass(frozen=True)
class Sample:
    """A response to a prompt, its reward, and log-probs [T] as differences from those of the policy."""

    tokens: torch.Tensor
    reward: float
    valid: bool
    old: torch.Tensor
    ref: torch.Tensor
    roll: torch.Tensor


@dataclass(frozen=True)
class Case:
    """Settings, and groups: a prompt's tokens and its samples."""

    config: Config
    groups: list[tuple[tuple[int, ...], list[Sample]]]
    on_policy: bool

    def __repr__(self) -> str:
        groups = [[(len(s.tokens), s.reward, s.valid) for s in samples] for _, samples in self.groups]
        return f"(length, reward, valid) by group: {groups}, on policy: {self.on_policy}, {self.config.algorithm}"

    def batch(self, groups: Sequence[int], strategy: Strategy) -> TrainBatch:
        """Return the TrainBatch of a rank that has these groups."""
        chosen = [self.groups[i] for i in groups]
        samples = [sample for _, group in chosen for sample in group]
        lengths = torch.tensor([len(each.tokens) for each in samples], dtype=torch.int64)
        valid = torch.tensor([each.valid for each in samples], dtype=torch.bool)

        def joined(name: str, of: Sequence[Sample] = samples) -> torch.Tensor:
            none = getattr(self.groups[0][1][0], name)[:0]
            return torch.cat([none, *(getattr(each, name) for each in of)])

        completions = Completions(
            prompt_index=torch.arange(len(chosen)).repeat_interleave(torch.tensor([len(s) for _, s in chosen]).long()),
            tokens=joined("tokens"),
            offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
            logprobs=joined("roll").float(),
            finished=torch.ones_like(valid),
            texts=("",) * len(samples),
        )
        total = torch.tensor([each.reward for each in samples], dtype=torch.float64)
        rewards = Rewards(total, valid, {"exact_match": total})
        prompts = PromptBatch(tuple(Prompt(str(i), "", self.groups[i][0], None, {}) for i in groups))
        estimator, functions = self.config.algorithm.advantage, self.config.reward.functions
        advantages, of_tokens = advantages_over_ranks(estimator, functions, completions, rewards, strategy)
        batch = assemble(prompts, completions, advantages, valid, of_tokens)
        kept = [each for each in samples if each.valid]
        old = None if self.on_policy else joined("old", kept).float()
        ref = joined("ref", kept).float() if self.config.algorithm.kl.coef else None
        return replace(batch, old_logprobs=old, ref_logprobs=ref)


MODEL = tiny_qwen3()
EXACT_MODEL = copy.deepcopy(MODEL).double()
OTHER_MODEL = moved(copy.deepcopy(MODEL))
"""The reference of a KL over the full vocabulary."""
EXACT_OTHER_MODEL = copy.deepcopy(OTHER_MODEL).double()


def exact(prompt: Sequence[int], tokens: torch.Tensor, temperature: float) -> tuple[torch.Tensor, ...]:
    """Return log-probs, entropies and KLs [T] of a response from full logits in fp64, with gradient."""
    ids = torch.cat([torch.tensor(prompt), tokens])[None]
    log_p, log_q = (
        (model(input_ids=ids).logits[0, len(prompt) - 1 : -1] / temperature).log_softmax(-1)
        for model in (EXACT_MODEL, EXACT_OTHER_MODEL)
    )
    kl = (log_p.exp() * (log_p - log_q.detach())).sum(-1)
    return log_p.gather(1, tokens[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1), kl


@strategies.composite
def cases(draw: Any) -> Case:
    def one(names: Sequence[Any]) -> Any:
        return draw(strategies.sampled_from(names))

    coef = one([0.1, 0.0])
    estimator = one(KL_ESTIMATORS.names())
    more: dict[str, Any] = {"coef": coef, "entropy_coef": one([0.0, 0.02])}
    if coef and estimator != EXACT_KL and not estimator.endswith("+"):
        more["times_ratio"] = one([False, True])
    names = (POLICY_LOSSES, AGGREGATIONS, CORRECTIONS)
    loss, aggregation, correction = (one(registry.names()) for registry in names)
    algorithm = algorithm_of(loss, estimator, aggregation, correction, one(SELECTIONS), **more)
    algorithm.advantage.name = one([name for name in ADVANTAGES.names() if name != "optimal_token_baseline"])
    config = settings(
        f"data.max_prompt_tokens={LONGEST_PROMPT}",
        f"rollout.max_response_tokens={LONGEST_RESPONSE}",
        f"rollout.temperature={one([1.0, 0.7])}",
        "trainer.tokens_per_micro_batch=10000",
    )
    config = replace(config, algorithm=algorithm)
    check_config(config)
    g = torch.Generator().manual_seed(draw(strategies.integers(0, 2**31)))

    def sample(prompt: Sequence[int], length: int) -> Sample:
        tokens = torch.randint(VOCAB, (length,), generator=g)
        reward, valid = one([0.0, 1.0, 0.25]), one([True, True, True, False])
        old, ref, roll = (scale * torch.randn(length, generator=g).double() for scale in (0.35, 0.4, 0.2))
        with torch.no_grad():
            lp = exact(prompt, tokens, config.rollout.temperature)[0]
        # of fp32 values, which both sides read; a log-prob is at most 0
        old = (lp + old).clamp(max=-1e-3).float().double()
        return Sample(tokens, reward, valid, old, (lp + ref).float().double(), (old + roll).float().double())

    groups = []
    for _ in range(draw(strategies.integers(1, 4))):
        prompt = tuple(torch.randint(VOCAB, (draw(strategies.integers(1, LONGEST_PROMPT)),), generator=g).tolist())
        lengths = draw(strategies.lists(strategies.integers(0, LONGEST_RESPONSE), min_size=1, max_size=4))
        groups.append((prompt, [sample(prompt, length) for length in lengths]))
    return Case(config, groups, on_policy=one([False, False, True]))


Outcome = tuple[float, dict[str, torch.Tensor]]


def outcome(update: PolicyUpdate, case: Case, groups: Sequence[int]) -> Outcome:
    """Return loss and gradient of one update, over all ranks."""
    batch = case.batch(groups, update.strategy)
    loss, _ = update.accumulate_gradients(batch, range(len(batch)))
    return loss, {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in update.policy.named_parameters()
    }


def update_of(case: Case, layout: Any = PADDED, budget: int = 10_000) -> PolicyUpdate:
    config = replace(case.config, trainer=replace(case.config.trainer, tokens_per_micro_batch=budget))
    update = updater(copy.deepcopy(MODEL), f"rollout.temperature={config.rollout.temperature}", layout=layout)
    exact_kl = config.algorithm.kl.coef and config.algorithm.kl.estimator == EXACT_KL
    other = PolicyModel(OTHER_MODEL, compute_dtype=torch.float32, options=update.policy.options)
    return replace(update, config=config, reference=Reference(other, "copy") if exact_kl else None)


def assert_same(found: Outcome, expected: Outcome, what: str) -> None:
    assert found[0] == pytest.approx(expected[0], rel=ROUNDING, abs=ROUNDING), what
    if any(bool(each.any()) for pair in (found, expected) for each in pair[1].values()):
        assert_gradients_close(found[1], expected[1], ROUNDING, what)


@limits(DRAWS, max_examples=40)
@given(cases(), strategies.sampled_from(LAYOUTS), strategies.integers(SMALLEST, 3 * SMALLEST))
def test_loss_and_gradient_do_not_depend_on_micro_batches_and_layout(case: Case, layout: Any, budget: int):
    everything = range(len(case.groups))
    expected = outcome(update_of(case), case, everything)
    assert_same(outcome(update_of(case, layout, budget), case, everything), expected, f"{case.config.algorithm}: ")


@limits(DRAWS, max_examples=40)
@given(cases(), strategies.randoms(use_true_random=False))
def test_loss_and_gradient_do_not_depend_on_the_order_of_groups_and_responses(case: Case, random: Any):
    everything = range(len(case.groups))
    update = update_of(case)
    expected = outcome(update, case, everything)
    update.strategy.discard_gradients()
    groups = [(prompt, random.sample(samples, len(samples))) for prompt, samples in case.groups]
    other = replace(case, groups=groups)
    tokens = case.batch(everything, update.strategy)
    tied = case.config.algorithm.loss.name == "kl_cov" and len(tokens.advantages.unique()) < 2
    if not tied:  # all covariances are 0, of which the first are selected
        found = outcome(update, other, random.sample(everything, len(everything)))
        assert_same(found, expected, f"{case.config.algorithm}: ")


@limits(DRAWS, max_examples=30)
@given(cases(), strategies.sampled_from([2, 3]), strategies.data())
def test_loss_and_gradient_do_not_depend_on_the_number_of_ranks(case: Case, world_size: int, data: Any):
    groups = list(range(len(case.groups)))
    cut = strategies.integers(0, len(groups))
    cuts = sorted(data.draw(strategies.lists(cut, min_size=world_size - 1, max_size=world_size - 1)))
    shares = [groups[a:b] for a, b in itertools.pairwise([0, *cuts, len(groups)])]
    expected = outcome(update_of(case), case, groups)
    update = update_of(case, GROUPED, SMALLEST)
    for found in on_ranks(update, world_size, lambda own: outcome(own, case, shares[own.strategy.rank])):
        assert_same(found, expected, f"{case.config.algorithm}: ")


@pytest.mark.parametrize("loss", POLICY_LOSSES.names())
def test_responses_without_advantage_have_the_gradient_of_the_formulas(loss: str):
    config = settings("trainer.tokens_per_micro_batch=10000")
    config = replace(config, algorithm=algorithm_of(loss, "k3", "token-mean", "none", {}, coef=0.0))
    g = torch.Generator().manual_seed(5)

    def sample(reward: float) -> Sample:
        tokens = torch.randint(VOCAB, (4,), generator=g)
        with torch.no_grad():
            lp = exact((3, 4), tokens, 1.0)[0]
        old = (lp + 0.35 * torch.randn(4, generator=g).double()).clamp(max=-1e-3).float().double()
        return Sample(tokens, reward, True, old, old, old)

    groups = [((3, 4), [sample(1.0), sample(1.0)]), ((3, 4), [sample(1.0), sample(0.0)])]
    assert_formulas(Case(config, groups, on_policy=False))


@limits(DRAWS, max_examples=60)
@given(cases())
def test_loss_and_gradient_are_those_of_fp64_autograd_on_full_logits(case: Case):
    assert_formulas(case)


def assert_formulas(case: Case) -> None:
    """Compare an update with the page's formulas on full logits."""
    update = update_of(case)
    found = outcome(update, case, range(len(case.groups)))
    advantages = iter(case.batch(range(len(case.groups)), update.strategy).advantages.double().tolist())
    responses = []
    for i, (prompt, samples) in enumerate(case.groups):
        for each in samples:
            if each.valid:
                lp, entropy, kl = exact(prompt, each.tokens, case.config.rollout.temperature)
                old = lp.detach() if case.on_policy else each.old
                responses.append(Response(i, next(advantages), lp, entropy, old, each.ref, each.roll, kl))
    EXACT_MODEL.zero_grad()
    loss = update_loss(case.config.algorithm, responses, LONGEST_RESPONSE)
    if loss.requires_grad:
        loss.backward()
    expected = {
        f"model.{name}": torch.zeros_like(p) if p.grad is None else p.grad for name, p in EXACT_MODEL.named_parameters()
    }
    assert_same(found, (float(loss.detach()), expected), f"{case.config.algorithm}: ")
