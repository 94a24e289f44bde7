"""Groups are filtered, prompts rated and greedy responses sampled beside the training as they are in the step."""

import json
import random
from pathlib import Path

import numpy
import pytest
import torch
from hwgrpo_backends.cpu import BACKEND

from hwgrpo.config.validate import check_world_size
from hwgrpo.errors import ConfigError
from hwgrpo.training import setup
from hwgrpo.training.feed.on_demand import OnDemand, on_demand
from hwgrpo.training.loop import train
from tests.support.runs import runs

CORRECTED = "algorithm.correction.name=token_truncate"
AHEAD = ("rollout.max_staleness=1", CORRECTED)
FILTER = ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.max_rounds=2")
STRICT = (*FILTER, "algorithm.filter_groups.min_std=0.05")
RATED = ("data.difficulty.easy_threshold=0.9", "data.difficulty.hard_threshold=0.1", "data.difficulty.revisit=0.2")
REMAX = ("algorithm.preset=remax",)
KINDS = {
    "filtered": FILTER,
    "surplus": (*STRICT, "algorithm.filter_groups.keep_surplus=true", "algorithm.filter_groups.max_rounds=6"),
    "replayed": (*STRICT, "algorithm.filter_groups.replay_groups=6", "algorithm.filter_groups.max_rounds=1"),
    "rated": RATED,
    "rated, shuffled": (*RATED, "reward.shuffle=true"),
    "rated, filtered": (*RATED, *FILTER),
    "greedy": REMAX,
    "greedy, filtered": (*REMAX, *FILTER),
}
RUN = ("trainer.validate_every=3", "observe.completions_per_step=64", "trainer.max_steps=5", "optim.lr=5e-3")


class Lagging(OnDemand):
    """The order of a bound of 1 without a thread: the next step's responses are collected before a step is trained."""

    next_one = None

    def next(self, step):
        batch = self.next_one or super().next(step)
        self.next_one = super().next(step + 1)
        return batch


def compared(lines: list[dict]) -> list[dict]:
    """Return metrics without what the thread adds."""
    return [{key: value for key, value in line.items() if not key.startswith("rollout/staleness")} for line in lines]


@pytest.mark.parametrize("kind", KINDS)
def test_beside_the_training_is_what_the_same_order_gives_without_a_thread(kind, tmp_path, monkeypatch):
    words = (*KINDS[kind], *AHEAD, *RUN)
    runs.run(tmp_path / "ahead", *words)
    monkeypatch.setattr(setup, "make_source", lambda parts: Lagging(**vars(on_demand(parts))))
    runs.run(tmp_path / "lagging", *words)
    ahead, lagging = runs.everything(tmp_path / "ahead"), runs.everything(tmp_path / "lagging")
    assert compared(runs.metrics(tmp_path / "ahead")) == compared(runs.metrics(tmp_path / "lagging"))
    assert ahead["weights"] == lagging["weights"]
    assert ahead["completions"] == lagging["completions"]


class Broken(Exception):
    pass


def cut(output: Path, *words: str, after: int) -> list[str]:
    """Run until a step is saved with the next batch in its checkpoint; return the names of the stored responses."""
    run = setup.build_run(runs.small(output, *words, "trainer.save_every=1"), BACKEND, 0, 1)
    plain, names = run.saver.save, []

    def save(step: int, **options) -> None:
        if step == after:
            with run.responses.exclusive_engine():  # the batch in flight is finished
                names.extend(f"{file}/{name}" for file, tensors in run.responses.files().items() for name in tensors)
                plain(step, **options)
            run.saver.wait()
            raise Broken
        plain(step, **options)

    run.saver.save = save
    with pytest.raises(Broken):
        train(run)
    run.close()
    return names


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_uninterrupted_one(kind, tmp_path):
    words = (*KINDS[kind], *AHEAD, *RUN, "trainer.save_every=1")
    runs.run(tmp_path / "whole", *words)
    names = cut(tmp_path / "cut", *words, after=2)
    assert "ahead-rank0.safetensors/0.tokens" in names
    assert ("ahead-rank0.safetensors/group.0.tokens" in names) == (kind in ("surplus", "replayed"))
    runs.run(tmp_path / "cut", *words)
    assert runs.everything(tmp_path / "cut") == runs.everything(tmp_path / "whole")


@pytest.mark.parametrize(
    ("then", "now", "reason"),
    [
        (KINDS["surplus"], (), "algorithm.filter_groups.enable=false"),
        ((), FILTER, "algorithm.filter_groups.enable=true"),
        ((), RATED, "data.difficulty"),
        ((), REMAX, "algorithm.advantage.name=remax"),
        (FILTER, (*FILTER, "reward.functions.0.weight=2"), "the reward functions or their settings have changed"),
    ],
)
def test_batches_of_other_settings_are_sampled_again(then, now, reason, tmp_path, capsys):
    cut(tmp_path / "run", *then, *AHEAD, *RUN, after=2)
    assert runs.run(tmp_path / "run", *now, *AHEAD, *RUN, "observe.progress=plain") == "completed"
    assert f"prefetched responses are sampled again from step 3 on: {reason}" in capsys.readouterr().out


def test_a_longer_lead_trains_groups_within_the_bound(tmp_path):
    words = (*KINDS["replayed"], *RUN, CORRECTED, "rollout.max_staleness=2")
    assert runs.run(tmp_path / "run", *words) == "completed"
    steps = [line for line in runs.metrics(tmp_path / "run") if "rollout/staleness_max" in line]
    assert len(steps) == 5
    assert all(0 <= line["rollout/staleness_max"] <= 2 for line in steps)
    assert max(line["filter_groups/staleness_max"] for line in steps) > 0


COUNTING = """
class Counting:
    def __init__(self):
        self.calls = 0

    def __call__(self, completions):
        self.calls += len(completions)
        return [float(len(text)) for text in completions]

    def counts(self):
        calls, self.calls = self.calls, 0
        return {"calls": calls}
"""


def test_rewards_that_count_per_step_are_refused(tmp_path):
    (tmp_path / "rewards.py").write_text(COUNTING)
    function = {"name": f"{tmp_path}/rewards.py:Counting"}
    config = runs.small(tmp_path / "run", *FILTER, *AHEAD, f"reward.functions={json.dumps([function])}")
    with pytest.raises(ConfigError, match=r"scores responses before their step, .*: Counting; leave one of them out"):
        setup.build_run(config, BACKEND, 0, 1)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ((*FILTER, "rollout.max_staleness=2"), "filter_groups.enable=true .* on 2 ranks, .* rollout.max_staleness=1"),
        ((*RATED, "rollout.max_staleness=2"), "data.difficulty with rollout.max_staleness=2 on 2 ranks"),
        ((*FILTER, "rollout.max_staleness=1", "rollout.partial=true"), "on 2 ranks, .* leave rollout.partial out"),
    ],
)
def test_what_several_ranks_cannot_do_together_is_refused(overrides, message, tmp_path):
    config = runs.small(tmp_path, *overrides, CORRECTED)
    check_world_size(config, 1)
    with pytest.raises(ConfigError, match=message):
        check_world_size(config, 2)


@pytest.mark.parametrize("words", [FILTER, RATED], ids=["filtered", "rated"])
def test_dropout_beside_rewards_that_draw_torchs_random_numbers_is_refused(words, tmp_path):
    config = runs.small(tmp_path / "run", *words, *AHEAD, "model.lora.rank=4", "model.lora.dropout=0.1")
    with pytest.raises(ConfigError, match=r"set model.lora.dropout=0 or .*, or leave rollout.max_staleness out"):
        setup.build_run(config, BACKEND, 0, 1)


DRAWING = """
import random

def drawn(completions):
    return [random.random() for _ in completions]
"""


def test_scoring_beside_the_training_leaves_random_numbers_alone(tmp_path):
    (tmp_path / "rewards.py").write_text(DRAWING)
    function = {"name": f"{tmp_path}/rewards.py:drawn"}
    words = (*FILTER, *AHEAD, f"reward.functions={json.dumps([function])}")
    run = setup.build_run(runs.small(tmp_path / "run", *words), BACKEND, 0, 1)
    random.seed(7)
    numpy.random.seed(7)
    before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state()
    run.responses.next(1)
    with run.responses.exclusive_engine():  # the next batch is scored, too
        after = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state()
    assert after[:2] == before[:2]
    assert torch.equal(after[2], before[2])
    run.close()


@pytest.mark.parametrize(
    ("then", "now", "kept"),
    [
        ("surplus", (*STRICT, "algorithm.filter_groups.max_rounds=6"), (0, 0)),
        ("replayed", (*FILTER, "algorithm.filter_groups.replay_groups=2"), (0, 2)),
    ],
)
def test_kept_groups_of_prefetched_batches_follow_the_settings_now(then, now, kept, tmp_path):
    cut(tmp_path / "run", *KINDS[then], *AHEAD, *RUN, after=2)
    run = setup.build_run(runs.small(tmp_path / "run", *now, *AHEAD, *RUN), BACKEND, 0, 1)
    groups = run.responses._collector.kept
    assert (len(groups.surplus), len(groups.replay)) == kept
    run.close()
