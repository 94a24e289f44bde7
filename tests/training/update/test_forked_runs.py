"""Runs on trajectories that fork into rows: resumed with responses in flight, filtered and replayed, in each layout."""

from pathlib import Path

import pytest

from hwgrpo.cli.main import main
from hwgrpo.support.jsonlines import read_lines
from tests.support.runs import runs
from tests.training.update.test_turn_runs import IN_FLIGHT, cut

BOARD = """
class Board:
    def reset(self, row):
        self.turn = 0
        return [{"role": "user", "content": "321"}]

    def state(self):
        return str(self.turn)

    def step(self, action):
        self.turn += 1
        return "12", float(ord(action.text[0]) % 5) if action.text else 0.0, False
"""
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' and not loop.last %}{{ m.content[1:] }}"
    "{% else %}{{ m.content }}{% endif %}{% if m.role == 'assistant' %}<eos>{% else %}={% endif %}{% endfor %}"
)
"""Drops the first letter of what a turn says once others follow."""


@pytest.fixture
def words(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "board.py").write_text(BOARD)
    (tmp_path / "drops.jinja").write_text(TEMPLATE)
    return (
        "rollout.workflow=environment",
        f"model.chat_template={tmp_path}/drops.jinja",
        f"rollout.agent.environments=['{tmp_path}/board.py:Board']",
        "rollout.agent.max_turns=3",
        "rollout.agent.max_turn_tokens=3",
        "rollout.max_response_tokens=24",
        "data.max_prompt_tokens=200",
        "reward.functions=[environment]",
        "trainer.validate_every=0",
        "data.validation_max_rows=0",
        "trainer.max_steps=3",
        "observe.completions_per_step=64",
    )


FILTERED = (
    *("algorithm.filter_groups.enable=true", "algorithm.filter_groups.replay_groups=2"),
    "algorithm.correction.name=sequence_truncate",
)
"""Dynamic sampling, with replay."""


@pytest.mark.parametrize(
    "more",
    [
        ("algorithm.advantage.name=gigpo", *IN_FLIGHT),
        ("algorithm.loss.name=gspo", "algorithm.aggregation.name=seq-mean-token-mean", *FILTERED),
    ],
    ids=["gigpo, in flight", "gspo, filtered and replayed"],
)
def test_a_run_resumes_bit_for_bit_with_all_rows_of_what_was_in_flight(more, words, tmp_path: Path):
    words = (*words, *more, "trainer.save_every=1")
    runs.run(tmp_path / "whole", *words)
    cut(tmp_path / "cut", *words, after=2)
    runs.run(tmp_path / "cut", *words)
    assert runs.everything(tmp_path / "cut") == runs.everything(tmp_path / "whole")
    steps = [line for line in runs.metrics(tmp_path / "whole") if "actor/loss" in line]
    assert len(steps) == 3
    assert all(line["agent/forks"] > 0 for line in steps)
    assert all(1 < line["agent/rows_per_trajectory/mean"] <= line["agent/rows_per_trajectory/max"] for line in steps)
    assert any(line["actor/grad_norm"] > 0 for line in steps)


def test_layouts_train_alike_on_rows_and_the_engine_and_the_trainer_agree(words, tmp_path: Path):
    found = []
    for layout in ("padded", "packed", "grouped"):
        more = ("algorithm.advantage.name=gigpo", f"model.layout={layout}", "trainer.max_steps=1", "optim.eps=1e-2")
        runs.run(tmp_path / layout, *words, *more)
        found.append(next(line for line in runs.metrics(tmp_path / layout) if "actor/loss" in line))
    for line in found:
        assert line["rollout_corr/log_ratio_max"] < 1e-4, "log-probs of the engine are those of each row by itself"
        for name in ("actor/grad_norm", "actor/pg_loss", "critic/advantages/max", "agent/forks"):
            assert line[name] == pytest.approx(found[0][name], rel=1e-3, abs=1e-5), name


def test_logged_rows_are_named_and_refused_by_supervised_training(words, tmp_path: Path, capsys):
    runs.run(tmp_path / "run", *words, "trainer.max_steps=1")
    lines = [line for line in read_lines(tmp_path / "run/completions.jsonl") if "rows" in line]
    assert lines
    for line in lines:
        starts = [token for token, _ in line["rows"]]
        assert all(0 < prompt <= len("321=") for _, prompt in line["rows"])
        assert all(any(start < first for first, _ in line["sampled"]) for start in starts)
        assert len(line["sampled"]) == len(line["outcome"]["turn_rewards"])
    arguments = ["sft", "--from-run", str(tmp_path / "run"), "--keep", "reward>=-9"]
    assert main([*arguments, f"trainer.output_dir={tmp_path / 'sft'}"]) == 1
    assert "line 1: the trajectory forked into rows" in capsys.readouterr().err


def test_a_captured_step_is_replayed_with_its_rows_in_another_layout(words, tmp_path: Path, capsys):
    more = ("algorithm.advantage.name=gigpo", "trainer.capture_steps=[1]", "trainer.max_steps=1")
    runs.run(tmp_path / "run", *words, *more)
    assert main(["replay", str(tmp_path / "run/captures/step_00001"), "model.layout=packed"]) == 0
    assert "rounding explains every difference" in capsys.readouterr().out
