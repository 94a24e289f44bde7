"""The measurement itself: updates do the same work in turns, and a layout that computes something else is out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hwgrpo_backends.cpu import BACKEND
from hwgrpo_backends.device import Device
from transformers import MixtralConfig, MixtralForCausalLM

from hwgrpo.bench.step import StepBench, measure_step
from hwgrpo.catalog import LAYOUTS
from hwgrpo.models.tiny import character_tokenizer
from hwgrpo.training.run_parts import Run
from hwgrpo.training.setup import build_run
from hwgrpo.training.update.policy_update import PolicyUpdate
from tests.bench import wrong_layouts
from tests.support.runs import runs

LAYOUT_NAMES = ("padded", "packed", "grouped")


@contextmanager
def built(folder: Path, *overrides: str) -> Iterator[Run]:
    run = build_run(runs.small(folder, *overrides), BACKEND, 0, 1)
    try:
        yield run
    finally:
        run.observer.close()
        run.engine.close()
        assert run.lock is not None
        run.lock.close()


def measured(run: Run, *names: str, repeat: int = 2) -> StepBench:
    return measure_step(run, Device(BACKEND), names or LAYOUT_NAMES, repeat)


def state(update: PolicyUpdate) -> list[torch.Tensor]:
    moments = [value for values in update.strategy.optimizer.state.values() for value in values.values()]
    return [tensor.detach().clone() for tensor in (*update.policy.parameters(), *moments)]


def add(monkeypatch: pytest.MonkeyPatch, *layouts) -> None:
    for layout in layouts:
        monkeypatch.setitem(LAYOUTS._entries, layout.name, layout)


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[torch.Tensor], list[torch.Tensor]]]:
    """Record the layout of every update, and parameters and moments before and after it."""
    seen = []
    original = PolicyUpdate.__call__

    def recorded(self: PolicyUpdate, batch):
        before = state(self)
        result = original(self, batch)
        seen.append((self.layout.name, before, state(self)))
        return result

    monkeypatch.setattr(PolicyUpdate, "__call__", recorded)
    return seen


def test_layouts_take_turns_and_each_round_begins_with_another(tmp_path: Path, updates):
    with built(tmp_path) as run:
        bench = measured(run, repeat=3)
    warm_up, *rounds = [[name for name, *_ in updates[-12:]][i : i + 3] for i in (0, 3, 6, 9)]
    assert set(warm_up) == set(LAYOUT_NAMES)
    assert rounds == [["packed", "grouped", "padded"], ["grouped", "padded", "packed"], ["padded", "packed", "grouped"]]
    for layout in bench.layouts:
        assert len(layout.times.wall_s) == len(layout.times.cpu_s) == 3, layout.name


def test_every_update_starts_from_the_same_weights_and_moments_which_are_put_back(tmp_path: Path, updates):
    with built(tmp_path) as run:
        weights = [parameter.detach().clone() for parameter in run.update.policy.parameters()]
        measured(run)
        left = list(run.update.policy.parameters())
        assert all(torch.equal(a, b) for a, b in zip(weights, left, strict=True))
        assert not run.update.strategy.optimizer.state
        assert all(parameter.grad is None for parameter in left)
        assert run.update.policy.training
    timed = updates[-9:]
    _, first, _ = timed[0]
    assert len(first) == 4 * len(weights), "parameters, and AdamW's two moments and count of steps"
    for name, before, after in timed:
        assert all(torch.equal(a, b) for a, b in zip(first, before, strict=True)), name
        assert not all(torch.equal(a, b) for a, b in zip(before, after, strict=True)), f"{name} trained nothing"
    assert all(torch.equal(a, b) for a, b in zip(weights, first, strict=False))


def test_responses_are_the_same_in_every_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with built(tmp_path) as run:
        generate, sampled = run.engine.generate, []

        def recorded(*args):
            sampled.append(generate(*args))
            return sampled[-1]

        monkeypatch.setattr(run.engine, "generate", recorded)
        bench = measured(run, repeat=3)
    assert len(sampled) == 4
    assert all(torch.equal(one.tokens, sampled[0].tokens) for one in sampled)
    assert bench.batch.response_tokens == len(sampled[0].tokens)
    assert (bench.batch.prompts, bench.batch.samples) == (4, 4)


def test_stages_are_those_that_the_recipe_needs(tmp_path: Path):
    with built(tmp_path / "plain") as run:
        plain = measured(run)
    with built(tmp_path / "more", "algorithm.kl.coef=0.1", "trainer.epochs_per_batch=2") as run:
        more = measured(run)
    for words in ((), ("trainer.epochs_per_batch=2",)):
        with built(tmp_path / f"{len(words)}", "algorithm.advantage.name=optimal_token_baseline", *words) as run:
            scored = measured(run)
        assert list(scored.stages) == ["gen", "reward", "old_log_prob", "adv", "sync"]
        assert all(len(times.wall_s) == 2 for times in scored.stages.values()), "one scoring pass a round"
    assert list(plain.stages) == ["gen", "reward", "adv", "sync"]
    assert list(more.stages) == ["gen", "reward", "adv", "old_log_prob", "ref", "sync"]
    assert all(len(times.wall_s) == 2 for times in more.stages.values())
    chosen = next(layout for layout in more.layouts if layout.name == more.chosen)
    parts = [*more.stages.values(), chosen.times]
    assert more.step is not None
    assert more.step.wall_s == pytest.approx([sum(times.wall_s[i] for times in parts) for i in range(2)])


def test_right_layouts_are_as_close_to_padded_as_rounding_allows(tmp_path: Path):
    with built(tmp_path) as run:
        bench = measured(run, *LAYOUTS.names())
    padded, *others = bench.layouts
    assert padded.name == "padded"
    assert padded.ratio == 1
    assert {layout.name for layout in others} == set(LAYOUTS.names()) - {"padded"}
    for layout in others:
        assert layout.state == "timed", layout.reason
        assert layout.apart is not None
        assert 0 < layout.apart.gradient < 1e-5
        assert layout.apart.loss < 1e-5
        assert layout.trained_tokens == padded.trained_tokens > 0
        assert layout.fed_tokens < padded.fed_tokens
        assert layout.ratio == pytest.approx(padded.times.median / layout.times.median)


@pytest.mark.parametrize("double", [wrong_layouts.FORGETFUL, wrong_layouts.CONFUSED])
def test_a_layout_that_computes_something_else_is_named_and_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, double, updates
):
    add(monkeypatch, double)
    with built(tmp_path) as run:
        bench = measured(run, "packed", double.name)
    _, packed, wrong, _ = bench.layouts
    assert packed.state == "timed"
    assert (wrong.name, wrong.state) == (double.name, "wrong")
    assert "its gradient differs" in wrong.reason
    assert ("it trains" in wrong.reason) == (double is wrong_layouts.FORGETFUL)
    assert wrong.times.wall_s == []
    assert bench.wrong == [double.name]
    assert double.name not in {name for name, *_ in updates}
    assert bench.step is not None


def test_a_step_whose_own_layout_is_wrong_has_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    add(monkeypatch, wrong_layouts.FORGETFUL)
    with built(tmp_path, "model.layout=forgetful") as run:
        bench = measured(run, "packed")
    assert [layout.name for layout in bench.layouts] == ["padded", "packed", "forgetful"], "its own is always there"
    assert bench.chosen == "forgetful"
    assert bench.step is None


def test_a_layout_that_the_model_cannot_have_is_listed_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    add(monkeypatch, wrong_layouts.GREEDY, wrong_layouts.UNPROVEN)
    with built(tmp_path) as run:
        bench = measured(run, "greedy", "unproven", "packed")
    _, greedy, unproven, packed, _ = bench.layouts
    assert (greedy.state, unproven.state, packed.state) == ("impossible", "impossible", "timed")
    assert "out of memory" in greedy.reason
    assert "hidden states would differ" in unproven.reason
    assert bench.wrong == []


def test_a_layout_that_becomes_another_is_not_measured_under_its_name(tmp_path: Path):
    with built(tmp_path, "model.attention=eager") as run:
        bench = measured(run, "grouped", "grouped_masked")
    _, grouped, masked = bench.layouts
    assert (grouped.state, masked.state) == ("impossible", "timed")
    assert "grouped_masked" in grouped.reason
    assert bench.chosen == "grouped_masked"


def test_a_router_loss_which_differs_by_layout_does_not_make_one_look_wrong(tmp_path: Path):
    folder = tmp_path / "model"
    tokenizer = character_tokenizer("")
    settings = MixtralConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, num_local_experts=4, num_experts_per_tok=2,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
    )  # fmt: skip
    MixtralForCausalLM(settings).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    with built(tmp_path / "run", f"model.path={folder}", "model.router_loss_coef=10") as run:
        bench = measured(run)
    assert bench.wrong == []
    timed = [layout for layout in bench.layouts if layout.state == "timed"]
    assert timed
    assert all(layout.flops for layout in timed), "experts count by the share of tokens that meet them"


def test_dropout_does_not_make_a_layout_look_wrong(tmp_path: Path):
    with built(tmp_path, "model.lora.rank=2", "model.lora.dropout=0.5") as run:
        dropouts = [m.p for m in run.update.policy.modules() if isinstance(m, torch.nn.Dropout)]
        bench = measured(run)
        assert [m.p for m in run.update.policy.modules() if isinstance(m, torch.nn.Dropout)] == dropouts
    assert 0.5 in dropouts
    assert bench.wrong == []
    assert "old_log_prob" in bench.stages


def test_a_batch_without_any_advantage_gets_some_and_says_so(tmp_path: Path):
    never = f"reward.functions=['{Path(__file__).parent}/no_reward.py:nothing']"
    for term in ("algorithm.kl.coef=0", "algorithm.kl.coef=0.1"):
        with built(tmp_path / term, never, term) as run:
            bench = measured(run)
        assert bench.batch.trained_tokens == bench.batch.response_tokens
        assert any("advantage" in note for note in bench.notes)
        assert bench.wrong == [], "at its start a KL term alone gives a gradient of rounding errors"
    with built(tmp_path / "usual") as run:
        assert not any("advantage" in note for note in measured(run).notes)


def test_the_layouts_of_a_run_in_bf16_are_held_to_what_bf16_can_do(tmp_path: Path):
    with built(tmp_path, "model.dtype=bfloat16") as run:
        bench = measured(run)
    assert bench.wrong == []
    assert bench.tolerance.gradient > 1e-3
    assert bench.model["dtype"] == "bfloat16"


def test_work_is_six_operations_per_trained_weight_and_token(tmp_path: Path):
    with built(tmp_path) as run:
        bench = measured(run, "packed")
        weights = {name: p.numel() for name, p in run.update.policy.base.named_parameters() if p.ndim == 2}
    table = weights.pop("model.embed_tokens.weight")  # tied: it is the head, too
    packed = bench.layouts[1]
    assert packed.flops == 6 * sum(weights.values()) * packed.fed_tokens + 6 * table * packed.trained_tokens
    with built(tmp_path / "lora", "model.lora.rank=2") as run:
        bench = measured(run, "packed")
        adapters = sum(p.numel() for p in run.update.policy.parameters() if p.requires_grad)
    packed = bench.layouts[1]
    expected = (4 * sum(weights.values()) + 6 * adapters) * packed.fed_tokens + 4 * table * packed.trained_tokens
    assert packed.flops == expected


def test_fed_tokens_count_every_epoch_of_a_batch(tmp_path: Path):
    with built(tmp_path) as run:
        once = measured(run, "padded", repeat=1)
    with built(tmp_path / "twice", "trainer.epochs_per_batch=2") as run:
        twice = measured(run, "padded", repeat=1)
    assert twice.layouts[0].fed_tokens == 2 * once.layouts[0].fed_tokens
    assert twice.batch == once.batch
