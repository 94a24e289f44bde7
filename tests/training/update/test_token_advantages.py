"""One advantage per token: the gradient of an update, which sequences it trains, and estimators of one's own."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hwgrpo.algorithms.advantages import group_advantages
from hwgrpo.algorithms.token_advantages import check_token_level, mean_over_tokens, token_level
from hwgrpo.catalog import ADVANTAGES
from hwgrpo.config.schema import AdvantageConfig
from hwgrpo.errors import ConfigError
from hwgrpo.training.policy.layouts import BRANCHED, GROUPED, PACKED, PADDED, Layout
from hwgrpo.training.update.train_batch import assemble
from hwgrpo.values import Completions, Prompt, PromptBatch, TrainBatch
from tests.support.models.steps import gradients, reference_gradients, updater
from tests.support.models.tiny import ragged_batch, settings, tiny_qwen3
from tests.support.numbers.rounding import STEP, assert_gradients_close
from tests.support.processes import ranks
from tests.support.runs import runs

ESTIMATOR = """
import torch

from hwgrpo.algorithms.token_advantages import token_level


@token_level
def alternating(rewards_S, group_S, valid_S, config, lengths_S):
    return torch.cat([reward * (-1.0) ** torch.arange(length) for reward, length in zip(rewards_S, lengths_S.tolist())])


def undeclared(rewards_S, group_S, valid_S, config, lengths_S):
    return torch.ones(int(lengths_S.sum()))
"""


def with_token_advantages(batch: TrainBatch) -> TrainBatch:
    values = torch.randn(len(batch.tokens), generator=torch.Generator().manual_seed(7))
    return replace(batch, advantages=mean_over_tokens(values, batch.lengths), token_advantages=values)


@pytest.mark.parametrize("kinds", [{}, {"old": True}, {"old": True, "empty": True}], ids=["on policy", "off", "empty"])
def test_a_step_has_the_gradient_of_fp64_autograd_on_full_logits(kinds: dict[str, bool]):
    model, batch = tiny_qwen3(), with_token_advantages(ragged_batch(**kinds))
    update = updater(model)
    loss, ours, _ = gradients(update, batch)
    expected_loss, theirs = reference_gradients(model, update.config, batch)
    assert loss == pytest.approx(expected_loss, rel=STEP, abs=STEP)
    assert_gradients_close(ours, theirs)


@pytest.mark.parametrize("loss_name", ["ppo_clip", "gspo", "kl_cov"])
@pytest.mark.parametrize("budget", [32, 4096])
@pytest.mark.parametrize("layout", [PADDED, PACKED, GROUPED, BRANCHED], ids=lambda layout: layout.name)
def test_the_gradient_does_not_depend_on_layout_or_budget(layout: Layout, budget: int, loss_name: str):
    batch = with_token_advantages(ragged_batch(old=True, empty=True))
    words = [f"algorithm.loss.name={loss_name}"]
    loss, expected, _ = gradients(updater(tiny_qwen3(), *words), batch)
    other = updater(tiny_qwen3(), *words, f"trainer.tokens_per_micro_batch={budget}", layout=layout)
    again, ours, _ = gradients(other, batch)
    assert again == pytest.approx(loss, rel=STEP, abs=STEP)
    assert_gradients_close(ours, expected)


@pytest.mark.parametrize("words", [[], ["algorithm.loss.name=kl_cov"]], ids=["ppo_clip", "kl_cov"])
def test_equal_advantages_of_tokens_are_bit_for_bit_those_of_their_sequence(words: list[str]):
    batch = ragged_batch(old=True)
    repeated = torch.repeat_interleave(batch.advantages, batch.lengths)
    loss, expected, sums = gradients(updater(tiny_qwen3(), *words), batch)
    again, ours, again_sums = gradients(
        updater(tiny_qwen3(), *words), replace(batch, advantages=batch.advantages * 0, token_advantages=repeated)
    )
    assert again == loss
    assert again_sums == sums
    assert all(torch.equal(ours[name], expected[name]) for name in expected)


def test_a_sequence_is_skipped_only_if_the_advantages_of_all_its_tokens_are_0():
    batch = ragged_batch(old=True)
    values = torch.zeros(len(batch.tokens))
    start = int(batch.offsets[batch.lengths.argmax()])
    values[start : start + 2] = torch.tensor([1.0, -1.0])  # their mean is 0
    batch = replace(batch, advantages=mean_over_tokens(values, batch.lengths), token_advantages=values)
    assert not batch.advantages.any()
    update = updater(tiny_qwen3())
    assert update.trained_sequences(batch, range(len(batch))) == [int(batch.lengths.argmax())]
    _, ours, _ = gradients(update, batch)
    _, theirs = reference_gradients(update.policy.model, update.config, batch)
    assert_gradients_close(ours, theirs)


def test_invalid_responses_leave_with_the_advantages_of_their_tokens():
    completions = Completions(
        prompt_index=torch.tensor([0, 0, 1]),
        tokens=torch.arange(6),
        offsets=torch.tensor([0, 2, 3, 6]),
        logprobs=torch.zeros(6),
        finished=torch.ones(3).bool(),
        texts=("",) * 3,
    )
    prompts = PromptBatch(tuple(Prompt(str(i), "p", (1,), None, {}) for i in range(2)))
    valid = torch.tensor([True, False, True])
    batch = assemble(prompts, completions, torch.zeros(3), valid, torch.arange(6.0))
    assert batch.tokens.tolist() == batch.advantages_R.tolist() == [0, 1, 3, 4, 5]


def test_means_over_tokens_are_0_without_tokens():
    assert mean_over_tokens(torch.tensor([1.0, 2.0, 6.0]), torch.tensor([1, 0, 2])).tolist() == [1.0, 0.0, 4.0]


def advantages_of(name: str, clip: float | None = None) -> torch.Tensor:
    config = AdvantageConfig(name, clip=clip)
    rewards, valid = torch.tensor([2.0, 0.5]).double(), torch.ones(2).bool()
    return group_advantages(rewards, torch.zeros(2).long(), valid, config, torch.tensor([3, 1]))


def test_an_estimator_of_ones_own_declares_that_it_returns_one_advantage_per_token(tmp_path: Path):
    file = tmp_path / "own.py"
    file.write_text(ESTIMATOR)
    assert advantages_of(f"{file}:alternating").tolist() == [2.0, -2.0, 2.0, 0.5]
    assert advantages_of(f"{file}:alternating", clip=1).tolist() == [1.0, -1.0, 1.0, 0.5]
    with pytest.raises(ConfigError, match=r"shape \[4\] for 2 responses: return \[2\]; one per token needs"):
        advantages_of(f"{file}:undeclared")


@pytest.fixture
def registered():
    @token_level
    def per_token(rewards_S, group_S, valid_S, config, lengths_S=None):
        return torch.repeat_interleave(rewards_S, lengths_S)[1:].float()

    ADVANTAGES.register("per_token")(per_token)
    yield
    ADVANTAGES._entries.pop("per_token")


def test_another_number_of_advantages_than_tokens_is_refused(registered):
    with pytest.raises(ConfigError, match=r"shape \[3\] for 2 responses of 4 tokens: return \[4\]"):
        advantages_of("per_token")


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("algorithm.loss.name=gmpo", "algorithm.loss.name='gmpo' is the loss of a sequence with one advantage"),
        ("algorithm.loss.name=vespo", "algorithm.loss.name='vespo' is the loss of a sequence"),
        ("algorithm.off_policy_threshold=0.1", "off_policy_threshold masks sequences by the sign of theirs"),
    ],
)
def test_what_reads_one_advantage_per_sequence_refuses_one_per_token(word: str, said: str, tmp_path: Path):
    (tmp_path / "own.py").write_text(ESTIMATOR)
    check_token_level(settings(word).algorithm)
    own = f"algorithm.advantage.name={tmp_path / 'own.py'}:alternating"
    check_token_level(settings(own).algorithm)
    with pytest.raises(ConfigError, match=said):
        check_token_level(settings(word, own).algorithm)
    with pytest.raises(ConfigError, match=said):
        runs.run(tmp_path / "run", word, own)


def test_two_ranks_train_as_one(tmp_path: Path):
    (tmp_path / "own.py").write_text(ESTIMATOR)

    def train(processes: int) -> dict[str, float]:
        folder = tmp_path / str(processes)
        strategy = f"trainer.strategy={'ddp' if processes > 1 else 'single'}"
        own = f"algorithm.advantage.name={tmp_path / 'own.py'}:alternating"

        def body(rank: int) -> None:
            torch.set_num_threads(1)
            runs.run(folder, strategy, own, "trainer.max_steps=1", "trainer.validate_every=0")

        assert ranks.forked(processes, body) == [0] * processes
        return next(line for line in runs.metrics(folder) if "actor/loss" in line)

    one, two = train(1), train(2)
    assert one["critic/advantages/min"] == -one["critic/advantages/max"] < 0
    for name in ("actor/grad_norm", "actor/pg_loss", "critic/advantages/mean", "critic/advantages/min"):
        assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6)
