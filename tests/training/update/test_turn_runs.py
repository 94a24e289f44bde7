"""Runs on trajectories of several turns: resumed with responses in flight, in each layout, with failed environments."""

from pathlib import Path

import pytest
from hwgrpo_backends.cpu import BACKEND

from hwgrpo.errors import ConfigError, RewardError
from hwgrpo.rollout.workflow import Trajectory
from hwgrpo.support.jsonlines import read_lines
from hwgrpo.training.loop import train
from hwgrpo.training.setup import build_run
from tests.support.runs import runs

WORKFLOW = """
async def in_turns(prompt, sampler):
    async def one(sampler):
        trajectory = sampler.trajectory()
        while not trajectory.truncated:
            segment = await sampler.sample(trajectory, max_tokens=2)
            if segment.finished or trajectory.truncated:
                break
            trajectory.observe(sampler.encode("="), "=")
        return trajectory

    return await sampler.gather(one)
"""
IN_FLIGHT = ("rollout.max_staleness=1", "algorithm.correction.name=token_truncate")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch):
    """Give trajectories outcomes: a turn's reward is that of its first digit, its state the turn's number."""
    plain = Trajectory.completion

    def with_outcome(self, prompt_index: int):
        texts = [segment.text for segment in self.segments if segment.role == "sampled"]
        rewards = [float(ord(text[0]) % 5) if text else 0.0 for text in texts]
        outcome = {
            "reward": sum(rewards),
            "turn_rewards": rewards,
            "states": [str(turn) for turn in range(len(texts))],
            "failure": "the board broke" if texts[0].startswith(("1", "2")) else "",
            "messages": [{"role": "assistant", "content": text} for text in texts],
        }
        completion = plain(self, prompt_index)
        return type(completion)(**{**vars(completion), "outcomes": (outcome,)})

    monkeypatch.setattr(Trajectory, "completion", with_outcome)


@pytest.fixture
def words(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "turns.py").write_text(WORKFLOW)
    return (
        f"rollout.workflow={tmp_path}/turns.py:in_turns",
        "rollout.max_response_tokens=8",
        "reward.functions=[environment]",
        "trainer.validate_every=0",
        "data.validation_max_rows=0",
        "trainer.max_steps=4",
        "observe.completions_per_step=64",
    )


@pytest.mark.parametrize("ahead", [(), IN_FLIGHT], ids=["on demand", "in flight"])
@pytest.mark.parametrize(
    "estimator",
    [("algorithm.advantage.name=gigpo",), ("algorithm.advantage.name=process", "algorithm.process.steps=turns")],
    ids=["gigpo", "process"],
)
def test_a_run_resumes_bit_for_bit_with_the_outcomes_of_what_was_in_flight(ahead, estimator, words, tmp_path: Path):
    words = (*words, *ahead, *estimator, "trainer.save_every=1")
    runs.run(tmp_path / "whole", *words)
    run = build_run(runs.small(tmp_path / "cut", *words), BACKEND, 0, 1)
    save = run.saver.save

    class Cut(Exception):
        pass

    def cut(step: int, **options) -> None:
        save(step, **options)
        if step == 2:
            run.saver.wait()
            raise Cut

    run.saver.save = cut
    with pytest.raises(Cut):
        train(run)
    run.close()
    runs.run(tmp_path / "cut", *words)
    assert runs.everything(tmp_path / "cut") == runs.everything(tmp_path / "whole")
    steps = [line for line in runs.metrics(tmp_path / "whole") if "actor/loss" in line]
    assert len(steps) == 4
    assert all(line["response_length/sampled/mean"] < line["response_length/mean"] for line in steps)
    assert any(line.get("reward_failures/errors/environment") for line in steps)
    assert max(line["response/steps/max"] for line in steps) > 1
    assert max(line["critic/advantages/max"] for line in steps) > 0.1


def test_layouts_train_alike_on_turns(words, tmp_path: Path):
    found = []
    for layout in ("padded", "packed", "grouped"):
        words_of = (*words, "algorithm.advantage.name=gigpo", f"model.layout={layout}", "trainer.max_steps=1")
        runs.run(tmp_path / layout, *words_of, "optim.eps=1e-2")
        found.append(next(line for line in runs.metrics(tmp_path / layout) if "actor/loss" in line))
    for other in found[1:]:
        for name in ("actor/grad_norm", "actor/pg_loss", "critic/advantages/max", "response_length/sampled/mean"):
            assert other[name] == pytest.approx(found[0][name], rel=1e-3, abs=1e-5), name


def test_policies_for_failed_environments(words, tmp_path: Path):
    runs.run(tmp_path / "value", *words, "rollout.agent.on_failure=value", "trainer.max_steps=1")
    lines = [line for line in read_lines(tmp_path / "value/completions.jsonl") if line["step"] == 1]
    broken = [line for line in lines if line["response"].startswith(("1", "2"))]
    assert broken
    assert {line["reward"] for line in broken} == {0.0}
    with pytest.raises(RewardError, match=r"the board broke; mend it or.*rollout\.agent\.on_failure"):
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
