"""What a run does without the groups that its engine dropped for being late: as if their rewards had been dropped."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hwgrpo.algorithms.advantages import group_advantages
from hwgrpo.catalog import ADVANTAGES
from hwgrpo.cli.main import main
from hwgrpo.config.schema import AdvantageConfig
from hwgrpo.report.compact_completions import read_completions
from hwgrpo.rollout.deadlines import GroupDeadlines
from hwgrpo.rollout.local.engine import LocalEngine
from hwgrpo.rollout.requests import Sample, make_completions
from hwgrpo.support.jsonlines import read_lines
from hwgrpo.training.evaluate import scores
from hwgrpo.training.feed import prefetched_batches
from hwgrpo.training.feed.response_source import Batch, PrefetchedBatch
from hwgrpo.training.update.step_metrics import sample_metrics
from hwgrpo.values import Completions, Prompt, PromptBatch, Rewards, Sampling
from tests.rollout.served import TOKENIZER
from tests.support.numbers.token_probs import token_probs
from tests.support.runs import runs

WORDS = ("trainer.max_steps=3", "observe.completions_per_step=64")
DEADLINE = "rollout.group_timeout=1000"
REASON = "no responses within rollout.group_timeout=1000 s, twice"
FILTERED = (
    *("algorithm.filter_groups.enable=true", "algorithm.filter_groups.replay_groups=8"),
    "algorithm.correction.name=token_truncate",
)
REWARD = """
import json
from pathlib import Path
from tests.support.runs.dense_reward import share_right

def picky(data_source, solution_str, ground_truth, extra_info=None):
    if ground_truth in json.loads(Path(__file__).with_name("dropped.json").read_text()):
        raise ValueError("one of those")
    return share_right(data_source, solution_str, ground_truth)
"""


def drop(monkeypatch, dropped: Callable[[Prompt, Sampling], bool]) -> None:
    """Have the local engine miss both deadlines of some prompts."""
    plain = LocalEngine.generate

    def generate(self: LocalEngine, batch: PromptBatch, sampling: Sampling) -> Completions:
        deadlines = GroupDeadlines(len(batch), sampling.group_timeout)
        for group, prompt in enumerate(batch.prompts):
            if dropped(prompt, sampling):
                assert deadlines.miss(group)
                assert not deadlines.miss(group)
        return deadlines.apply(plain(self, batch, sampling))

    monkeypatch.setattr(LocalEngine, "generate", generate)


def trained(output: Path) -> list[dict[str, Any]]:
    """Return the metrics of steps, without those of validations."""
    return [line for line in runs.metrics(output) if "reward" in line]


def same(line: dict[str, Any], other: dict[str, Any]) -> None:
    """Check the metrics that a dropped group must not enter, and the share of what was dropped."""
    names = [name for name in line if name.startswith(("actor/", "critic/", "reward", "rollout_corr/", "training/"))]
    names = [name for name in names if not name.startswith(("reward_failures/", "rewards/"))]
    assert {"reward", "actor/loss", "actor/grad_norm"} <= {*names}
    assert {name: line[name] for name in names} == pytest.approx(
        {name: other[name] for name in names}, abs=0, nan_ok=True
    )
    assert line["response/aborted_ratio"] == other["response/aborted_ratio"]
    assert line["frac_reward_zero_std"] == other["frac_reward_zero_std"]


@pytest.fixture
def rewards(tmp_path: Path) -> Callable[[list[str]], str]:
    """Return a function that writes which answers' rewards are dropped, and returns the setting of that reward."""
    (tmp_path / "rewards.py").write_text(REWARD)

    def write(answers: list[str]) -> str:
        (tmp_path / "dropped.json").write_text(json.dumps(answers))
        return f"reward.functions=[{{name: '{tmp_path}/rewards.py:picky', on_error: drop_group}}]"

    return write


def test_a_deadline_that_nobody_misses_leaves_a_run_bit_for_bit_as_it_is(tmp_path: Path):
    for name, words in (("with", (DEADLINE,)), ("without", ())):
        assert runs.run(tmp_path / name, *WORDS, *words) == "completed"
    found, expected = runs.everything(tmp_path / "with"), runs.everything(tmp_path / "without")
    for line in found["metrics"]:
        counts = [line.pop(name) for name in ("rollout/groups_late", "rollout/groups_dropped") if "reward" in line]
        counts += [line.pop("val-aux/groups_dropped") for _ in range(1) if "reward" not in line]
        assert set(counts) == {0}
    assert found == expected


def test_a_dropped_group_has_the_effect_of_a_dropped_reward_and_is_recorded(tmp_path: Path, monkeypatch, rewards):
    plain = rewards([])
    assert runs.run(tmp_path / "plain", *WORDS, plain) == "completed"
    lines = list(read_lines(tmp_path / "plain/completions.jsonl"))
    stuck = next(line for line in lines if line["step"] == 2)
    assert runs.run(tmp_path / "reward", *WORDS, rewards([stuck["ground_truth"]])) == "completed"
    rewards([])
    drop(monkeypatch, lambda prompt, sampling: prompt.ground_truth == stuck["ground_truth"])
    assert runs.run(tmp_path / "late", *WORDS, plain, DEADLINE, "observe.progress=plain") == "completed"
    found, expected, whole = (runs.everything(tmp_path / name) for name in ("late", "reward", "plain"))
    assert found["weights"] == expected["weights"] != whole["weights"]
    for line, other in zip(trained(tmp_path / "late"), trained(tmp_path / "reward"), strict=True):
        same(line, other)
    counts = [(line["rollout/groups_late"], line["rollout/groups_dropped"]) for line in trained(tmp_path / "late")]
    assert counts[1] == (1, 1)
    assert [line["response/aborted_ratio"] for line in trained(tmp_path / "late")][1] == 1 / 4
    dropped = [line for line in found["completions"] if "dropped" in line]
    assert dropped[0] == {
        **{key: stuck[key] for key in ("step", "uid", "prompt", "question", "ground_truth", "source")},
        "response": None,
        "reward": None,
        "rewards": {},
        "length": 0,
        "finished": False,
        "advantage": None,
        "dropped": REASON,
    }
    assert len(dropped) == sum(count for _, count in counts)
    kept = [line for line in expected["completions"] if line["reward"] is not None]
    assert [line for line in found["completions"] if "dropped" not in line] == kept
    columns = read_completions(tmp_path / "late", 1000)["rows"]
    assert list(columns["extras"].values()) == [{"dropped": REASON}] * len(dropped)


def test_the_first_dropped_group_is_noted(tmp_path: Path, monkeypatch, capsys):
    drop(monkeypatch, lambda prompt, sampling: prompt.uid.endswith("0"))
    assert runs.run(tmp_path / "run", *WORDS, DEADLINE, "observe.progress=plain") == "completed"
    dropped = [line for line in read_lines(tmp_path / "run/completions.jsonl") if "dropped" in line]
    assert dropped
    said = capsys.readouterr().out
    assert said.count("longer than rollout.group_timeout, and dropped") == 1
    assert f"(prompt {dropped[0]['uid']}: {REASON}); metrics count further ones" in said


def test_a_step_without_any_group_is_one_whose_rewards_were_all_dropped(tmp_path: Path, monkeypatch, rewards):
    assert runs.run(tmp_path / "plain", *WORDS, rewards([])) == "completed"
    second = [line for line in read_lines(tmp_path / "plain/completions.jsonl") if line["step"] == 2]
    answers = sorted({line["ground_truth"] for line in second})
    assert runs.run(tmp_path / "reward", *WORDS, rewards(answers)) == "completed"
    assert not [line for line in trained(tmp_path / "plain") if line["response/aborted_ratio"]]
    function = rewards([])
    drop(monkeypatch, lambda prompt, sampling: prompt.ground_truth in answers)
    assert runs.run(tmp_path / "late", *WORDS, function, DEADLINE, "observe.progress=plain") == "completed"
    assert runs.everything(tmp_path / "late")["weights"] == runs.everything(tmp_path / "reward")["weights"]
    lines = trained(tmp_path / "late")
    assert lines[1]["response/aborted_ratio"] == 1
    assert lines[1]["rollout/groups_dropped"] == 4
    for line, other in zip(lines, trained(tmp_path / "reward"), strict=True):
        same(line, other)


def test_functions_of_the_user_are_not_called_without_responses(tmp_path: Path, monkeypatch):
    (tmp_path / "own.py").write_text(
        "def longest(completions, **kwargs):\n    open(__file__ + '.called', 'w').close()\n"
        "    return [1.0] * len(completions)\n"
        "def shown(prompts, completions, rewards, advantages):\n    max(completions.texts)\n    return {}\n"
    )
    own = (f"reward.functions=['{tmp_path}/own.py:longest']", f"observe.metrics=['{tmp_path}/own.py:shown']")
    drop(monkeypatch, lambda prompt, sampling: True)
    assert runs.run(tmp_path / "run", *WORDS, *own, DEADLINE) == "completed"
    assert not (tmp_path / "own.py.called").exists()


@pytest.mark.parametrize("name", ADVANTAGES.names())
def test_every_advantage_estimator_accepts_a_step_without_responses(name: str):
    nothing = torch.zeros(0)
    step = nothing.double(), nothing.long(), nothing.bool(), AdvantageConfig(name=name), nothing.long()
    found = group_advantages(*step, token_probs=token_probs(nothing.long()))
    assert found.shape == (0,)


@pytest.mark.parametrize("std", ["group", "batch", "none"])
def test_every_scale_accepts_a_step_without_responses(std: str):
    nothing = torch.zeros(0)
    config = AdvantageConfig(std=std)
    assert group_advantages(nothing.double(), nothing.long(), nothing.bool(), config, nothing.long()).shape == (0,)


def test_a_group_dropped_in_a_validation_is_counted_and_in_no_mean(tmp_path: Path, monkeypatch):
    words = (*WORDS, DEADLINE, "trainer.max_steps=1")
    assert runs.run(tmp_path / "plain", *words) == "completed"
    drop(
        monkeypatch,
        lambda prompt, sampling: prompt.uid.startswith("-1") and (sampling.greedy or prompt.uid[-1] in "02"),
    )
    assert runs.run(tmp_path / "late", *words) == "completed"
    plain, late = (next(line for line in runs.metrics(tmp_path / n) if "reward" not in line) for n in ("plain", "late"))
    assert plain["val-aux/groups_dropped"] == 0
    assert late["val-aux/groups_dropped"] > 8, "all 8 greedy ones, and some of the sampled"
    greedy = next(name for name in plain if name.endswith("/greedy"))
    mean = next(name for name in plain if name.startswith("val-core/") and "/mean@" in name)
    assert late[greedy] == "NaN", "there is no reward"
    assert late[mean] not in ("NaN", plain[mean])


@pytest.mark.parametrize("more", [(), (DEADLINE,)], ids=["without a deadline", "with one"])
def test_a_measurement_says_how_many_groups_it_dropped(tmp_path: Path, monkeypatch, capsys, more: tuple[str, ...]):
    assert runs.run(tmp_path / "run", *WORDS, *more, "trainer.max_steps=1") == "completed"
    if more:
        drop(monkeypatch, lambda prompt, sampling: prompt.uid[-1] in ("02" if sampling.greedy else "0"))
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "run"), "--max-rows", "8", "--n", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out).get("groups_dropped") == (3 if more else None)


def test_late_groups_are_counted_where_some_ranks_had_no_deadline_yet():
    """A resumed run may set a deadline; a rank whose prefetched batch it cannot use samples that batch with it."""
    completions = make_completions([[Sample([5], [-0.5], True)], None], [Sampling(1, 4)] * 2, TOKENIZER, [], 0)
    prompts = PromptBatch(tuple(Prompt(str(i), "p", (1,), None, {}) for i in range(2)))
    rewards = Rewards(total=torch.ones(1).double(), valid=torch.ones(1).bool(), per_function={})
    batches = [completions, replace(completions, late=2, dropped={1: REASON})]
    sent: list[Any] = []
    for each in batches:
        sample_metrics(prompts, each, rewards, torch.zeros(1), lambda own: (sent.append(own), [own])[1])
    for each in batches:
        found = sample_metrics(prompts, each, rewards, torch.zeros(1), lambda own: sent)
        assert (found["rollout/groups_late"], found["rollout/groups_dropped"]) == (2, 1)


def test_rewards_of_a_validation_stay_with_their_prompts():
    class Stage:
        def generate(self, batch, sampling):
            return SimpleNamespace(prompt_index=torch.tensor([0, 0, 2, 2]), dropped={1: REASON}, outcomes=())

        def score(self, batch, completions, drawing):
            return Rewards(
                total=torch.tensor([1.0, 2.0, 3.0, 4.0]).double(), valid=torch.ones(4).bool(), per_function={}
            )

        def prompt(self, row, epoch):
            return Prompt(str(row), "p", (1,), None, {})

    stage: Any = Stage()
    scored = scores(stage, stage, stage, Sampling(2, 4), range(3))
    found, dropped = scored.rewards, scored.dropped
    assert found.nan_to_num(-1).tolist() == [[1, 2], [-1, -1], [3, 4]]
    assert dropped == 1


def test_dropped_groups_survive_a_checkpoint(tmp_path: Path):
    from safetensors.torch import save_file

    prompts = PromptBatch(tuple(Prompt(str(i), "p", (1,), None, {}) for i in range(3)))
    completions = Completions(
        prompt_index=torch.tensor([1, 1]),
        tokens=torch.tensor([3, 4, 5]),
        offsets=torch.tensor([0, 1, 3]),
        logprobs=torch.tensor([-1.0, -2.0, -3.0]),
        finished=torch.tensor([True, False]),
        texts=("a", "b"),
        weight_version=2,
        late=2,
        dropped={0: REASON, 2: REASON},
    )
    ((name, tensors),) = prefetched_batches.files_of([PrefetchedBatch(Batch(prompts, completions, {}), {})], 0).items()
    save_file(tensors, tmp_path / name)
    checkpoint: Any = SimpleNamespace(folder=tmp_path)
    source: Any = SimpleNamespace(rank=0, dataset=())
    ((prefetched, _),) = prefetched_batches._read(checkpoint, source)
    found = prefetched.batch.completions
    assert (found.late, found.dropped) == (2, {0: REASON, 2: REASON})
    assert found.prompt_index.tolist() == [1, 1]


@pytest.mark.parametrize("partial", [False, True])
def test_a_run_that_prefetches_goes_on_without_late_groups(tmp_path: Path, monkeypatch, partial: bool):
    drop(monkeypatch, lambda prompt, sampling: prompt.uid.endswith(("0", "3", "6")))
    ahead = ("rollout.max_staleness=1", "algorithm.correction.name=token_truncate", f"rollout.partial={partial}")
    assert runs.run(tmp_path / "run", *WORDS, *ahead, DEADLINE) == "completed"
    dropped = [line for line in read_lines(tmp_path / "run/completions.jsonl") if "dropped" in line]
    assert sum(line["rollout/groups_dropped"] for line in trained(tmp_path / "run")) == len(dropped) > 0


def test_groups_dropped_in_any_round_of_a_filter_are_in_completions(tmp_path: Path, monkeypatch, capsys):
    drop(monkeypatch, lambda prompt, sampling: prompt.uid.endswith(("0", "3", "6")))
    assert runs.run(tmp_path / "run", *WORDS, DEADLINE, *FILTERED, "observe.progress=plain") == "completed"
    lines = read_lines(tmp_path / "run/completions.jsonl")
    dropped = [line for line in lines if "dropped" in line]
    for metrics in trained(tmp_path / "run"):
        of_step = [line for line in dropped if line["step"] == metrics["step"]]
        assert metrics["rollout/groups_dropped"] == len(of_step)
    assert max(metrics["filter_groups/rounds"] for metrics in trained(tmp_path / "run")) > 1
    assert len({line["uid"] for line in dropped}) == len(dropped) > 0
    assert f"(prompt {dropped[0]['uid']}: {REASON}); metrics count further ones" in capsys.readouterr().out
    assert runs.run(tmp_path / "run", *WORDS, "trainer.max_steps=4", "observe.progress=plain") == "completed"
    said = capsys.readouterr().out
    assert re.search(r"\d groups kept for later steps are left out: algorithm.filter_groups.enable=false", said)
