"""Runs on trajectories of several turns: resumed with responses in flight, in each layout, with failed environments."""

from pathlib import Path

import pytest
import torch
from hwgrpo_backends.cpu import BACKEND

from hwgrpo.cli.main import main
from hwgrpo.config.schema import ModelConfig
from hwgrpo.errors import ConfigError, RewardError
from hwgrpo.models.loading import load_model, load_tokenizer
from hwgrpo.support.jsonlines import read_lines
from hwgrpo.training.loop import train
from hwgrpo.training.setup import build_run
from tests.support.runs import runs

BOARD = """
class Board:
    def reset(self, row):
        self.turn = 0
        return None

    def state(self):
        return str(self.turn)

    def step(self, action):
        self.turn += 1
        if action.text.startswith(("1", "2")):
            raise ValueError("the board broke")
        return "=", float(ord(action.text[0]) % 5) if action.text else 0.0, False
"""
IN_FLIGHT = ("rollout.max_staleness=1", "algorithm.correction.name=token_truncate")


class Cut(Exception):
    pass


def cut(output: Path, *words: str, after: int) -> None:
    """Run until a step is saved, and end there as if by a crash."""
    run = build_run(runs.small(output, *words), BACKEND, 0, 1)
    plain = run.saver.save

    def save(step: int, **options) -> None:
        plain(step, **options)
        if step == after:
            run.saver.wait()
            raise Cut

    run.saver.save = save
    with pytest.raises(Cut):
        train(run)
    run.close()


@pytest.fixture
def words(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "board.py").write_text(BOARD)
    return (
        "rollout.workflow=environment",
        f"rollout.agent.environments=['{tmp_path}/board.py:Board']",
        "rollout.agent.max_turns=3",
        "rollout.agent.max_turn_tokens=2",
        "rollout.max_response_tokens=64",
        "data.max_prompt_tokens=200",
        "reward.functions=[environment]",
        "trainer.validate_every=0",
        "data.validation_max_rows=0",
        "trainer.max_steps=3",
        "observe.completions_per_step=64",
    )


@pytest.mark.parametrize(
    "more",
    [
        ("algorithm.advantage.name=gigpo", *IN_FLIGHT),
        ("algorithm.advantage.name=process", "algorithm.process.steps=turns"),
    ],
    ids=["gigpo, in flight", "process, on demand"],
)
def test_a_run_resumes_bit_for_bit_with_the_outcomes_of_what_was_in_flight(more, words, tmp_path: Path):
    words = (*words, *more, "trainer.save_every=1")
    runs.run(tmp_path / "whole", *words)
    cut(tmp_path / "cut", *words, after=2)
    runs.run(tmp_path / "cut", *words)
    assert runs.everything(tmp_path / "cut") == runs.everything(tmp_path / "whole")
    steps = [line for line in runs.metrics(tmp_path / "whole") if "actor/loss" in line]
    assert len(steps) == 3
    assert all(line["response_length/sampled/mean"] < line["response_length/mean"] for line in steps)
    assert any(line.get("reward_failures/errors/environment") for line in steps)
    assert max(line["response/steps/max"] for line in steps) == 3
    assert max(line["critic/advantages/max"] for line in steps) > 0.1


SCORED = """
class Board:
    def __init__(self):
        self.for_rewards = self

    def reset(self, row):
        self.turns = 0

    def step(self, action):
        self.turns += 1
        return "=", 0.0, False


def score(completions, environments=None, **_):
    return [None] * len(completions) if environments is None else [float(each.turns) for each in environments]
"""


def test_what_was_sampled_ahead_is_left_where_rewards_read_environments_which_are_not_saved(words, tmp_path: Path):
    (tmp_path / "scored.py").write_text(SCORED)
    named = f"{tmp_path}/scored.py"
    own = (f"rollout.agent.environments=['{named}:Board']", f"reward.functions=['{named}:score']", *IN_FLIGHT)
    cut(tmp_path / "cut", *words, *own, "trainer.save_every=1", after=2)
    runs.run(tmp_path / "cut", *words, *own, "trainer.save_every=1")
    steps = [line for line in runs.metrics(tmp_path / "cut") if "actor/loss" in line]
    assert [line["critic/rewards/mean"] for line in steps] == [3.0] * 3


def test_layouts_train_alike_on_turns(words, tmp_path: Path):
    found = []
    for layout in ("padded", "packed", "grouped"):
        words_of = (*words, "algorithm.advantage.name=gigpo", f"model.layout={layout}", "trainer.max_steps=1")
        runs.run(tmp_path / layout, *words_of, "optim.eps=1e-2")
        found.append(next(line for line in runs.metrics(tmp_path / layout) if "actor/loss" in line))
    for other in found[1:]:
        for name in ("actor/grad_norm", "actor/pg_loss", "critic/advantages/max", "response_length/sampled/mean"):
            assert other[name] == pytest.approx(found[0][name], rel=1e-3, abs=1e-5), name


def test_supervised_training_on_a_runs_trajectories_trains_what_was_sampled(words, tmp_path: Path):
    runs.run(tmp_path / "run", *words, "trainer.max_steps=1")
    kept = [line for line in read_lines(tmp_path / "run/completions.jsonl") if line["finished"]]
    kept = list({(line["prompt"], line["response"]): line for line in reversed(kept)}.values())
    assert len(kept) > 2
    assert all(len(line["sampled"]) == 3 for line in kept)
    model_config = ModelConfig(path=runs.SMALL[0].removeprefix("model.path="))
    model, tokenizer = load_model(model_config, attention="sdpa"), load_tokenizer(model_config)
    logprobs = []
    for line in kept:
        prompt = tokenizer.encode(line["prompt"], add_special_tokens=False)
        with torch.no_grad():
            of_all = model(input_ids=torch.tensor([[*prompt, *line["tokens"]]])).logits[0].log_softmax(-1)
        for start, stop in line["sampled"]:
            logprobs += [float(of_all[len(prompt) + i - 1, line["tokens"][i]]) for i in range(start, stop)]
    arguments = [
        *("sft", "--from-run", str(tmp_path / "run"), "--keep", "reward>=-9", f"trainer.output_dir={tmp_path / 'sft'}"),
        *(f"trainer.prompts_per_step={len(kept)}", f"trainer.prompts_per_update={len(kept)}"),
    ]
    assert main(arguments) == 0
    [step] = [line for line in runs.metrics(tmp_path / "sft") if "actor/loss" in line]
    assert step["actor/loss"] == pytest.approx(-sum(logprobs) / len(logprobs), rel=1e-4)


def test_policies_for_failed_environments(words, tmp_path: Path):
    runs.run(tmp_path / "value", *words, "rollout.agent.on_failure=value", "trainer.max_steps=1")
    lines = [line for line in read_lines(tmp_path / "value/completions.jsonl") if line["step"] == 1]
    broken = [line for line in lines if line["response"].startswith(("1", "2"))]
    assert broken
    assert {line["reward"] for line in broken} == {0.0}
    with pytest.raises(RewardError, match=r"the board broke.*; mend it or.*rollout\.agent\.on_failure"):
        runs.run(tmp_path / "raise", *words, "rollout.agent.on_failure=raise")


def test_settings_without_meaning_are_refused(words, tmp_path: Path):
    turns = ("algorithm.advantage.name=process", "algorithm.process.steps=turns")
    for more, said in (
        (("algorithm.process.steps=turns",), "process.steps='turns' has no effect with algorithm.advantage.name"),
        ((*turns, "algorithm.process.delimiter=;"), "delimiter=';' has no effect with algorithm.process.steps"),
        (("algorithm.advantage.name=gigpo", "reward.shuffle=true"), "'gigpo' has one per turn"),
        (("algorithm.advantage.name=gigpo", "algorithm.kl.coef=0.1", "algorithm.kl.in_reward=true"), "have no KL"),
        (("algorithm.advantage.name=gigpo", "algorithm.loss.name=gmpo"), "the loss of a sequence with one advantage"),
        (("algorithm.advantage.name=gigpo", "algorithm.advantage.kwargs.gamma=2"), "gamma"),
    ):
        with pytest.raises(ConfigError, match=said):
            runs.run(tmp_path / "run", *words, *more)
