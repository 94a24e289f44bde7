"""docs/grpo.md names the functions that are called, and its worked numbers are what they compute."""

import re

import pytest
import torch
from hwgrpo_kernels import ReferenceHead, linear_token_loss

from hwgrpo.algorithms.advantages import group_advantages
from hwgrpo.algorithms.aggregation import token_weights, tokens_of_prompts
from hwgrpo.algorithms.kl import build_kl
from hwgrpo.algorithms.losses import SurrogateInput
from hwgrpo.algorithms.token_advantages import TokenProbs
from hwgrpo.algorithms.turn_advantages import discounted_returns
from hwgrpo.catalog import ADVANTAGES, AGGREGATIONS, CORRECTIONS, EXACT_KL, KL_ESTIMATORS, POLICY_LOSSES
from hwgrpo.config.document import entries
from hwgrpo.config.schema import AdvantageConfig, KlConfig, LossConfig
from hwgrpo.registry import import_target
from hwgrpo.training.stages.collect import Collect
from hwgrpo.training.stages.log_probs import OldLogprobs, RefLogprobs
from hwgrpo.training.stages.make_batch import Advantages
from hwgrpo.training.stages.score import Score
from hwgrpo.training.stages.update import SendWeights, Update
from hwgrpo.values import StepRewards
from tests.docs.pages import code, page, section, table

PAGE = page("grpo.md")
WIDE = torch.float64


def printed(value: float) -> float:
    """Return a number as the page shows it, to six decimals."""
    return round(float(value), 6)


@pytest.mark.parametrize(
    ("title", "registry"),
    [("Advantages", ADVANTAGES), ("Policy loss", POLICY_LOSSES), ("KL", KL_ESTIMATORS),
     ("Aggregation", AGGREGATIONS), ("Rollout correction", CORRECTIONS)],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_every_choice_stands_on_the_page_with_its_function(title: str, registry):
    rows = table(section(PAGE, title), "function")
    names = [code(next(iter(row.values())))[0] for row in rows]
    assert sorted(names) == sorted(registry.names())
    for name, row in zip(names, rows, strict=True):
        [place] = code(row["function"])
        file, _, function = place.partition(":")
        module = file.removesuffix(".py").replace("/", ".")
        assert import_target(f"{module}:{function}") is registry.load(name)


def test_the_first_settings_of_the_page_have_the_defaults_of_the_schema():
    known = {entry.key: entry.default for entry in entries()}
    rows = table(PAGE.split("\n## ")[0], "setting", "default")
    shown = {code(row["setting"])[0]: row["default"] for row in rows}
    assert len(shown) == 3
    assert shown.pop("reward.functions") == "none"
    assert all(float(known[key]) == float(value) for key, value in shown.items())


def test_the_stages_of_the_page_are_those_of_a_step():
    stages = (Collect, Score, Advantages, OldLogprobs, RefLogprobs, Update, SendWeights)
    listed = [code(row["metric"])[0] for row in table(section(PAGE, "The step"), "stage", "metric")]
    assert listed == [f"timing_s/{stage.timed}" for stage in stages]


def test_worked_advantages():
    rewards, lengths = torch.tensor([1, 0, 0, 0], dtype=WIDE), torch.tensor([10, 20, 30, 40])
    rows = table(PAGE, "estimator", "advantage of the first")
    assert len(rows) == 7
    for row in rows:
        name, *options = code(row["estimator"])
        config = AdvantageConfig(name=name, **dict(option.split("=") for option in options))
        group, valid = torch.zeros(4, dtype=torch.int64), torch.ones(4, dtype=torch.bool)
        found = group_advantages(rewards, group, valid, config, lengths).tolist()
        assert [printed(value) for value in found] == [
            float(row["advantage of the first"]), *[float(row["of the others"])] * 3
        ]  # fmt: skip


def test_worked_token_baselines():
    rows = table(PAGE, "position", "`sum_v p_v^2`")
    assert len(rows) == 3
    pairs = {
        name: torch.tensor([[float(each) for each in row[name].split(", ")] for row in rows], dtype=WIDE).T.flatten()
        for name in ("`p` of the first, of the second", "`sum_v p_v^2`", "`W`")
    }
    pi, squares, weights = pairs.values()
    lengths, group, valid = torch.tensor([3, 3]), torch.zeros(2, dtype=torch.int64), torch.ones(2, dtype=torch.bool)
    config, probs = AdvantageConfig("optimal_token_baseline"), TokenProbs(pi.log(), squares)
    found = group_advantages(torch.tensor([1, 0], dtype=WIDE), group, valid, config, lengths, token_probs=probs)
    baselines = torch.tensor([float(row["`B`"]) for row in rows])
    torch.testing.assert_close(found, torch.cat([1 - baselines, -baselines]), rtol=0, atol=6e-7)
    sums = (1 - 2 * pi + squares).view(2, 3).cumsum(1)
    torch.testing.assert_close(sums, weights.view(2, 3))


def test_worked_advantages_of_turns():
    rows = table(PAGE, "trajectory", "turn", "`R_t`")
    rewards = [[float(row["reward"]) for row in rows if row["trajectory"] == str(i)] for i in (1, 2, 3)]
    counts = torch.tensor([0, *map(len, rewards)]).cumsum(0)
    steps = StepRewards(
        torch.tensor([float(row["reward"]) for row in rows], dtype=WIDE),
        torch.tensor([int(row["turn"]) - 1 for row in rows]),  # a token each
        counts,
        torch.tensor(["abc".index(row["state"]) for row in rows]),
    )
    returns = discounted_returns(steps, 0.9)
    torch.testing.assert_close(returns, torch.tensor([float(row["`R_t`"]) for row in rows], dtype=WIDE))
    totals, everyone = torch.tensor([sum(each) for each in rewards], dtype=WIDE), torch.ones(3, dtype=torch.bool)
    found = []
    for weights in ({"step_weight": 0}, {"episode_weight": 0, "step_weight": 2}, {"step_weight": 2}):
        config = AdvantageConfig("gigpo", std="none", kwargs={"gamma": 0.9, **weights})
        found.append(group_advantages(totals, 0 * counts[1:], everyone, config, counts.diff(), None, steps))
    for column, values in zip(("first term", "second term", "advantage"), found, strict=True):
        expected = torch.tensor([float(row[column]) for row in rows])
        torch.testing.assert_close(values, expected, rtol=0, atol=6e-7)


def test_worked_policy_losses():
    rows = table(PAGE, "name", "`d`", "loss")
    assert len(rows) == 8
    for row in rows:
        [name] = code(row["name"])
        one = torch.tensor([float(row["`d`"])], dtype=WIDE)
        given = SurrogateInput(one, one, False, torch.tensor([float(row["`A`"])], dtype=WIDE), torch.tensor([0, 1]))
        loss, _ = POLICY_LOSSES.load(name)(given, LossConfig(name=name, clip_low=0.2, clip_high=0.28))
        assert printed(loss) == float(row["loss"]), row


def test_worked_kl():
    rows = table(PAGE, "`lp`", "`ref`", "`k3`")
    assert len(rows) == 3
    for row in rows:
        logprob, reference = (torch.tensor([float(row[f"`{name}`"])], dtype=WIDE) for name in ("lp", "ref"))
        for name in ("k1", "k2", "k3"):
            assert printed(build_kl(KlConfig(estimator=name))(logprob, reference)) == float(row[f"`{name}`"])


def test_the_gradients_of_the_kl_estimators_are_those_of_the_page():
    for x in (0.5, -0.5):
        expected = {
            "1": 1.0,
            "the sign of `-x`": -x / abs(x),
            "`-x`": -x,
            "`1 - e^x`": 1 - float(torch.tensor(x).exp()),
        }
        for row in table(PAGE, "`algorithm.kl.estimator`"):
            logprob = torch.tensor([-1.0], dtype=WIDE, requires_grad=True)
            [name] = code(row["`algorithm.kl.estimator`"])
            if name == EXACT_KL:
                continue
            build_kl(KlConfig(estimator=name))(logprob, torch.tensor([x - 1], dtype=WIDE)).sum().backward()
            written = re.split("[:;,]", row["gradient with respect to `lp`"])[0]
            assert float(logprob.grad) == pytest.approx(expected[written], abs=1e-6), name


def test_the_exact_kl_and_its_gradient_are_those_of_the_page():
    [row] = [
        row for row in table(PAGE, "`algorithm.kl.estimator`") if code(row["`algorithm.kl.estimator`"]) == [EXACT_KL]
    ]
    [value], [_, slope] = code(row["estimate"]), code(row["gradient with respect to `lp`"])
    z, others = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    z.requires_grad_()
    head = torch.eye(5)  # hidden states are the logits
    result = linear_token_loss(
        z,
        head,
        torch.zeros(3).long(),
        lambda stats, _: (stats.full_kl, {}),
        rows={},
        reference=ReferenceHead(others, head),
    )
    result.loss.backward()

    def written(formula: str, kl: torch.Tensor | None = None) -> torch.Tensor:
        log_p, log_q = (logits.detach().log_softmax(-1) for logits in (z, others))
        python = formula.replace("log p_ref", "log_q").replace("log p", "log_p").replace("p (", "p * (")
        return eval(python, {"p": log_p.exp(), "log_p": log_p, "log_q": log_q, "KL": kl})

    kl = written(value).sum(-1, keepdim=True)
    torch.testing.assert_close(result.kl_N, kl[:, 0])
    torch.testing.assert_close(z.grad, written(slope, kl))


def test_k3_has_no_gradient_where_the_page_says_so():
    [bound] = re.findall(r"the gradient of `k3` is 0 for `x > ([\d.]+)`", " ".join(PAGE.split()))
    for step, flat in ((-0.001, False), (0.001, True)):
        logprob = torch.zeros(1, dtype=WIDE, requires_grad=True)
        build_kl(KlConfig())(logprob, torch.tensor([float(bound) + step], dtype=WIDE)).sum().backward()
        assert (float(logprob.grad) == 0) == flat


def test_worked_aggregation():
    losses = torch.tensor([1, 2, 3, 4, 5, 6], dtype=WIDE)
    rows = table(PAGE, "mode", "loss")
    assert [code(row["mode"])[0] for row in rows] == [
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm", "prompt-mean", "token-sum"
    ]  # fmt: skip
    lengths = torch.tensor([4, 2])
    for row in rows:
        of_prompts, prompts = tokens_of_prompts(lengths, torch.tensor([0, 0]))
        totals = {"total_tokens": 6, "total_sequences": 2, "total_prompts": prompts}
        mode = code(row["mode"])[0]
        weights = token_weights(mode, lengths, norm_length=4, prompt_tokens_S=of_prompts, **totals)
        assert printed((weights.repeat_interleave(lengths) * losses).sum()) == float(row["loss"])
