"""`hwgrpo chat`, and `hwgrpo eval` in environments."""

import io
import json
from pathlib import Path

import pytest

from hwgrpo.cli.eval import pass_at_k
from hwgrpo.cli.main import main
from tests.support.runs import runs

GAMES = """
from hwgrpo.agents.action import StepResult

class Guess:
    def reset(self, row):
        self.number, self.left = row["number"], 3
        return "Which number?"
    def step(self, action):
        self.left -= 1
        if str(self.number) in action.content:
            return StepResult("", reward=1.0, done=True)
        return StepResult(f"Not {action.content}\\nTry again.", reward=-0.25, done=not self.left)

class Even(Guess):
    def reset(self, row):
        super().reset(row)
        return "Even or odd?"
    def step(self, action):
        if self.number == 3:
            raise ValueError("no such number")
        return StepResult("", reward=float(len(action.content) % 2), done=True)

class Echo:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    def reset(self, row):
        return "Call look."
    def step(self, action):
        return StepResult([{"role": "tool", "name": "look", "content": repr(dict(action.calls[0].arguments))}])

def score(batch, completions):
    return [outcome["reward"] for outcome in completions.outcomes]
"""
ROWS = [("Guess", 1), ("Even", 2), ("Guess", 2), ("Even", 3), ("Even", 5)]


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with environments, rows, and a run in them."""
    folder = tmp_path_factory.mktemp("games")
    (folder / "games.py").write_text(GAMES)
    rows = [{"environment": environment, "number": number} for environment, number in ROWS]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = (
        f"data.train={folder}/rows.jsonl",
        f"data.validation={folder}/rows.jsonl",
        "data.max_prompt_tokens=64",
        "rollout.workflow=environment",
        f"rollout.agent.environments=[{folder}/games.py:Guess, {folder}/games.py:Even]",
        "rollout.agent.max_turn_tokens=3",
        "rollout.max_response_tokens=200",
        f"reward.functions=[{folder}/games.py:score]",
        "trainer.max_steps=1",
    )
    assert runs.run(folder / "run", *settings) == "completed"
    return folder


@pytest.fixture
def chat(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Return a function that runs `hwgrpo chat` with lines of a person, and returns exit code and output."""

    def run(*arguments: str | Path, typed: str = "") -> tuple[int, str]:
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        capsys.readouterr()
        code = main(["chat", *map(str, arguments)])
        shown = capsys.readouterr()
        return code, shown.out + (shown.err if code else "")

    return run


def by_hand(folder: Path, environment: str = "Guess") -> tuple[str, ...]:
    return "--by-hand", "--env", f"{folder}/games.py:{environment}", f"data.train={folder}/rows.jsonl"


def test_an_environment_is_played_by_hand_without_a_model(chat, games):
    assert chat(*by_hand(games), "--row", "2", typed="é\\\n4\n2\n9\n") == (
        0,
        "prompt: \n  user: Which number?\n  assistant: \n"
        "policy: é\n  4\n  reward -0.25\nuser: Not é\n  4\n  Try again.\n"
        "policy: 2\n  reward +1\n\n"
        "ended: done after 2 turns, 45 tokens; reward of the turns 0.75\n",
    )


def test_typed_tool_calls_are_calls(chat, games):
    call = '<tool_call>{"name": "look", "arguments": {"at": 3}}</tool_call>'
    code, shown = chat(*by_hand(games, "Echo"), "rollout.agent.max_turns=2", typed=f"{call}\n{call}\n")
    assert code == 0
    assert '"name": "look"' in shown.partition("user: Call look.")[0], "the prompt shows the tool"
    assert shown.count("policy: look(at=3)\n") == 2
    assert shown.count("tool look: {'at': 3}\n") == 2
    assert "ended: max_turns after 2 turns" in shown


def test_a_failure_of_the_environment_is_shown(chat, games):
    code, shown = chat(*by_hand(games, "Even"), "--row", "3", typed="x\n")
    assert code == 0
    assert "policy: x\n\nended: failed after 1 turn" in shown
    assert "failure: Even.step ValueError: no such number" in shown


def test_the_end_of_the_input_and_an_interrupt_end_it_cleanly(chat, games, monkeypatch):
    code, shown = chat(*by_hand(games), typed="5\n")
    assert (code, shown.endswith("Try again.\n\nended by you\n")) == (0, True)

    def interrupted(_: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupted)
    code, shown = chat(*by_hand(games))
    assert (code, shown.endswith("hwgrpo: interrupted\n")) == (130, True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "name a run, a recipe or a model, or type the turns yourself with --by-hand"),
        (("trainer.seed=1",), "name a run, a recipe or a model"),
        (("--by-hand",), "--by-hand plays in an environment: name one with --env"),
        (("tiny_sort", "--row", "-1"), "--row -1: rows are counted from 0"),
        (("FOLDER/run", "--row", "5"), "--row 5: FOLDER/rows.jsonl has 5 rows, counted from 0"),
        (("FOLDER/run", "--row", "2", "data.max_prompt_tokens=12"), "--row 2: its prompt has more tokens than"),
    ],
)
def test_mistakes_are_named(chat, games, arguments, said):
    code, shown = chat(*(each.replace("FOLDER", str(games)) for each in arguments))
    assert code == 2
    assert said.replace("FOLDER", str(games)) in shown


def measured(games: Path, capsys) -> tuple[dict, list[dict]]:
    """Return what `hwgrpo eval` prints and writes."""
    file = games / "samples.jsonl"
    capsys.readouterr()
    assert main(["eval", str(games / "run"), "--n", "4", "--k", "1,2", "--completions", str(file), "--json"]) == 0
    return json.loads(capsys.readouterr().out), [json.loads(line) for line in file.read_text().splitlines()]


def test_a_run_plays_the_row_as_it_is_evaluated(chat, games, capsys):
    _, samples = measured(games, capsys)
    assert samples[3]["reward"] is None, "its environment fails"
    for row in (0, 3):
        outcome = samples[row]["outcome"]
        code, shown = chat(games / "run", "--row", str(row), "--greedy")
        assert code == 0
        turns = [line.removeprefix("policy: ") for line in shown.splitlines() if line.startswith("policy: ")]
        said = [each["content"] for each in outcome["messages"] if each["role"] == "assistant"]
        assert [turn.removesuffix(" (cut at the limit of tokens)") for turn in turns] == said
        assert f"ended: {outcome['stop']} after {len(outcome['turn_rewards'])} turn" in shown
        score = samples[row]["rewards"]["score"]
        assert f"reward function score: {'none' if score is None else f'{score:g}'}" in shown


def test_eval_has_figures_of_each_environment_and_of_turns_and_failures(games, capsys):
    result, samples = measured(games, capsys)
    sampled = [sample for sample in samples if sample["kind"] == "sampled"]
    assert result["failed"] == 4
    assert result["mean_turns"] == sum(len(each["outcome"]["turn_rewards"]) for each in sampled) / len(sampled)
    assert result["mean_calls"] == 0
    assert result["environments"].keys() == {"Guess", "Even"}
    for name, figures in result["environments"].items():
        rewards = [sample["reward"] for sample in sampled if sample["outcome"]["environment"] == name]
        assert (figures["prompts"], len(rewards)) == ({"Guess": 2, "Even": 3}[name], 4 * figures["prompts"])
        counted = [reward for reward in rewards if reward is not None]
        assert len(rewards) - len(counted) == {"Guess": 0, "Even": 4}[name], "failures are masked"
        assert figures["mean_reward"] == pytest.approx(sum(counted) / len(counted))
        groups = [rewards[i : i + 4] for i in range(0, len(rewards), 4)]
        for k in (1, 2):
            expected = [pass_at_k(4, sum((reward or 0) >= 1 for reward in group), k) for group in groups]
            assert figures[f"pass@{k}"] == pytest.approx(sum(expected) / len(groups))
    assert main(["eval", str(games / "run"), "--n", "2"]) == 0
    shown = capsys.readouterr().out
    assert "        failed  2 of 10\n" in shown
    assert [line for line in shown.splitlines() if line.startswith("environment ")] == [
        "environment Even",
        "environment Guess",
    ]


def test_a_model_is_talked_to_in_turns_of_one_conversation(chat):
    model = runs.SMALL[0].removeprefix("model.path=")
    code, shown = chat(model, "rollout.max_response_tokens=300", "--greedy", typed="312=\n41=\n")
    assert code == 0
    assert shown.startswith("type your message; end the input (Ctrl-D) to leave\nuser: 312=\npolicy: ")
    assert shown.count("\npolicy: ") == 2 or "ended: length" in shown
    assert "prompt: " not in shown
