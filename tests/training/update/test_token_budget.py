"""What a run does by itself: less memory than thought, and gradients that are not finite."""

import json

import pytest
import torch
from hwgrpo_backends import registry
from hwgrpo_backends.device import Device

from hwgrpo.errors import RunError
from hwgrpo.support.jsonlines import read_lines
from hwgrpo.training.policy.policy_model import PolicyModel
from hwgrpo.training.strategies.single import Single
from hwgrpo.training.update.policy_update import PolicyUpdate
from hwgrpo.training.update.token_budget import TokenBudget
from tests.support.runs import starved_train
from tests.support.runs.runs import metrics, run

CPU = registry.get("cpu")
SHORT = ("trainer.max_steps=3", "trainer.validate_at_start=false", "observe.progress=plain")
DROPOUT = ("model.lora.rank=2", "model.lora.dropout=0.3", "algorithm.kl.coef=0.01", "optim.lr=1e-2")


@pytest.fixture
def starved(monkeypatch):
    """Give forwards of more than so many tokens no memory, from now on; the list fills with what they asked for."""

    def limit(tokens: int) -> list[int]:
        monkeypatch.setattr(PolicyModel, "forward", PolicyModel.forward)  # put back after the test
        return starved_train.starve(tokens)

    return limit


@pytest.mark.parametrize("words", [(), DROPOUT], ids=["all parameters", "adapters with dropout and KL"])
def test_a_full_memory_makes_micro_batches_smaller_and_the_numbers_are_those_of_smaller_ones(
    tmp_path, starved, capsys, words
):
    run(tmp_path / "small", *SHORT, *words, "trainer.tokens_per_micro_batch=24")
    refused = starved(30)
    run(tmp_path / "large", *SHORT, *words, "trainer.tokens_per_micro_batch=96")
    assert max(refused) > 48 >= min(refused), "it ran out at 96 tokens, and then at 48"
    assert metrics(tmp_path / "large") == metrics(tmp_path / "small"), "bit for bit, dropout too"
    told = capsys.readouterr().out
    assert "with 96 tokens per micro-batch: repeated with 48, and so from here on" in told
    assert "with 48 tokens per micro-batch: repeated with 24, and so from here on" in told
    restarts = [line.get("perf/oom_restarts") for line in read_lines(tmp_path / "large/metrics.jsonl")]
    assert sum(filter(None, restarts)) == 2, "later steps begin with what was found"


def test_memory_that_runs_out_amid_an_update_leaves_no_gradient_of_the_first_try(tmp_path, monkeypatch):
    run(tmp_path / "small", *SHORT, "trainer.tokens_per_micro_batch=24")
    plain, calls = PolicyModel.forward, []

    def forward(self, batch, *arguments, **options):
        calls.append(len(arguments) > 0)
        if sum(calls) == 2 and arguments:  # the second micro-batch of the first update
            torch.empty(10**15, dtype=torch.uint8)
        return plain(self, batch, *arguments, **options)

    monkeypatch.setattr(PolicyModel, "forward", forward)
    run(tmp_path / "large", *SHORT, "trainer.tokens_per_micro_batch=48")
    assert sum(calls) > 4
    assert metrics(tmp_path / "large") == metrics(tmp_path / "small")


def test_a_run_started_again_begins_with_what_it_has_found(tmp_path, starved, capsys):
    refused = starved(30)
    run(tmp_path / "run", *SHORT, "trainer.tokens_per_micro_batch=96")
    assert json.loads((tmp_path / "run/micro_batch.json").read_text())["tokens_per_micro_batch"] == 24
    refused.clear()
    capsys.readouterr()
    run(tmp_path / "run", *SHORT, "trainer.tokens_per_micro_batch=96", "trainer.max_steps=4")
    assert not refused
    told = capsys.readouterr().out
    assert "memory ran out before at 96 tokens per micro-batch: now 24" in told
    assert "remove it to use trainer.tokens_per_micro_batch again" in told


def test_a_memory_that_holds_not_one_sequence_ends_the_run_with_what_to_lower(tmp_path, starved):
    starved(8)
    with pytest.raises(RunError, match="out of memory while updating the policy") as caught:
        run(tmp_path / "run", *SHORT, "trainer.tokens_per_micro_batch=64")
    assert "model.gradient_checkpointing=true" in str(caught.value)


def test_any_other_error_of_a_pass_ends_the_run_at_once(tmp_path, monkeypatch):
    def broken(*_):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(Single, "backward", broken)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        run(tmp_path / "run", *SHORT)


def spoil(monkeypatch, updates: set[int]) -> None:
    """Make the loss of these updates, counted from 1, and so their gradients, not a number."""
    plain = PolicyUpdate._passes

    def passes(self, *arguments):
        loss, sums = plain(self, *arguments)
        if self.updates_done + 1 in updates:
            for parameter in self.policy.parameters():
                if parameter.grad is not None:
                    parameter.grad.fill_(torch.nan)
            loss = loss * torch.nan
        return loss, sums

    monkeypatch.setattr(PolicyUpdate, "_passes", passes)


def test_an_update_whose_gradient_is_not_finite_is_left_out_counted_and_told(tmp_path, monkeypatch, capsys):
    spoil(monkeypatch, {2})
    weights: list[list[torch.Tensor]] = []
    plain = PolicyUpdate._update

    def update(self, *arguments):
        result = plain(self, *arguments)
        moments = [state["exp_avg"] for state in self.strategy.optimizer.state.values()]
        weights.append([tensor.detach().clone() for tensor in (*self.policy.parameters(), *moments)])
        return result

    monkeypatch.setattr(PolicyUpdate, "_update", update)
    assert run(tmp_path / "run", *SHORT) == "completed"
    first, second, third = weights
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(second, third, strict=True))
    lines = [line for line in read_lines(tmp_path / "run/metrics.jsonl") if "actor/loss" in line]
    assert [line["actor/skipped_updates"] for line in lines] == [0, 1, 0]
    assert [line["actor/loss"] for line in lines][1] == "NaN"
    told = capsys.readouterr().out
    assert "the gradient of update 2 is not finite (loss nan): the update is skipped and the weights are" in told
    assert "lower optim.lr" in told


def test_too_many_such_updates_in_a_row_end_the_run_and_one_in_between_starts_the_count_anew(tmp_path, monkeypatch):
    many = ("trainer.max_steps=8", "trainer.max_skipped_updates=2", *SHORT[1:])
    with monkeypatch.context() as patch:
        spoil(patch, {1, 2, 4, 5, 7})
        assert run(tmp_path / "apart", *many) == "completed"
    spoil(monkeypatch, {4, 5, 6})
    with pytest.raises(RunError, match=r"update 6 is not finite.*number 3 in a row.*max_skipped_updates=2"):
        run(tmp_path / "row", *many)


def test_the_count_of_updates_left_out_in_a_row_outlives_a_restart(tmp_path, monkeypatch):
    words = ("trainer.save_every=1", "trainer.max_skipped_updates=2", *SHORT[1:])
    spoil(monkeypatch, {2, 3, 4})
    run(tmp_path / "run", *words, "trainer.max_steps=3")
    with pytest.raises(RunError, match=r"update 4 is not finite.*number 3 in a row"):
        run(tmp_path / "run", *words, "trainer.max_steps=5")


@pytest.mark.parametrize(
    "content",
    [b'{"tokens_per_micro_batch": 1e999}', b'{"tokens_per_micro_batch": -5}', b'{"tokens_per_micro_batch": true}',
     b'{"tokens_per_micro_batch": "12"}', b'{"tokens_per_micro_batch": 0}', b"[]", b"{}", b"\xff", b"", b"[" * 100_000],
)  # fmt: skip
def test_a_remembered_budget_that_is_none_is_named_and_not_used(tmp_path, content):
    (tmp_path / "micro_batch.json").write_bytes(content)
    budget = TokenBudget(100, least=10, folder=tmp_path)
    assert budget.tokens == 100
    (note,) = budget.notes
    assert "micro_batch.json" in note
    assert "remove it; trainer.tokens_per_micro_batch is used: 100" in note


def test_a_budget_that_cannot_be_remembered_is_used_with_a_note(tmp_path):
    (tmp_path / "micro_batch.json").mkdir()
    budget = TokenBudget(100, least=10, device=Device(CPU), folder=tmp_path)
    assert "cannot be read" in budget.notes.pop()
    budget._shrink(0, "updating")
    assert budget.tokens == 50
    assert "cannot be written" in budget.notes[-1]
