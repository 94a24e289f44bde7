"""The page about playing and looking at trajectories: its commands run and print what it says."""

import io
import json
import re
from pathlib import Path

import pytest

from hwgrpo.agents.episode import OUTCOME
from hwgrpo.cli.main import main
from tests.docs.pages import FENCED, blocks, code, page, table
from tests.docs.test_extend import written
from tests.support.runs import runs

PAGE = page("chat.md")


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write the files of the page's block, and return the block."""
    monkeypatch.chdir(tmp_path)
    [block] = blocks(PAGE, "bash")
    for name, text in written(block).items():
        Path(name).write_text(text)
    [(row, file)] = re.findall(r"^echo '(.*)' > (\S+)$", block, flags=re.MULTILINE)
    Path(file).write_text(row + "\n")
    return block


def test_the_game_is_played_by_hand_as_the_page_shows(example, monkeypatch, capsys):
    [(typed, command)] = re.findall(r"^printf '(.*)' \| hwgrpo (.*)$", example, flags=re.MULTILINE)
    monkeypatch.setattr("sys.stdin", io.StringIO(typed.replace("\\n", "\n")))
    assert main(command.split()) == 0
    shown = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert shown == blocks(PAGE, "text")[0].splitlines()


def test_the_commands_of_the_table_play(example, monkeypatch, capsys):
    model = runs.SMALL[0].removeprefix("model.path=")
    settings = ("data.train=rows.jsonl", "data.validation=rows.jsonl", "rollout.workflow=environment")
    settings += ("rollout.agent.environments=[game.py:Guess]", "reward.functions=[environment]", "trainer.save_every=1")
    settings += ("data.max_prompt_tokens=64", "rollout.max_response_tokens=64", "trainer.max_steps=1")
    assert runs.run(Path("run"), *settings) == "completed"
    capsys.readouterr()
    for row in table(PAGE, "command", "what it plays"):
        [command] = code(row["command"])
        command = command.replace("RUN", "run").replace("MODEL", model).replace("step-00000050", "step-00000001")
        command = command.replace("--row 3", "--row 0").replace("tiny_guess", f"tiny_guess model.path={model}")
        monkeypatch.setattr("sys.stdin", io.StringIO("7\n"))
        assert main(command.removeprefix("hwgrpo ").split()) == 0, command
        assert re.search(r"^(ended: \w+ after \d turn|ended by you)", capsys.readouterr().out, flags=re.MULTILINE), (
            command
        )


def test_eval_prints_the_figures_of_the_page_and_the_log_has_its_keys(example, capsys):
    Path("rows.jsonl").write_text('{"number": 7, "environment": "Guess"}\n{"number": 8, "environment": "Again"}\n')
    Path("game.py").write_text(Path("game.py").read_text() + "\n\nclass Again(Guess):\n    pass\n")
    settings = ("data.train=rows.jsonl", "data.validation=rows.jsonl", "rollout.workflow=environment")
    settings += ("rollout.agent.environments=[game.py:Guess, game.py:Again]", "reward.functions=[environment]")
    settings += ("data.max_prompt_tokens=64", "rollout.max_response_tokens=64", "trainer.max_steps=1")
    assert runs.run(Path("run"), *settings) == "completed"
    capsys.readouterr()
    [command] = [each for each in code(FENCED.sub("", PAGE)) if each.startswith("hwgrpo eval RUN")]
    assert main([*command.replace("RUN", "run").split()[1:], "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    figures = [name for row in table(PAGE, "figure", "meaning") for name in code(row["figure"])]
    assert set(figures) <= result.keys()
    keys = [name for row in table(PAGE, "key of `outcome`", "value") for name in code(row["key of `outcome`"])]
    assert sorted(keys) == sorted(OUTCOME)
    logged = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    [validation, *_] = [line for line in logged if "val-core/rows.jsonl/reward/greedy" in line]
    assert {
        "val-aux/agent/turns/mean",
        "val-aux/Again/reward/greedy",
        "val-aux/Guess/reward/mean@2",
    } <= validation.keys()
