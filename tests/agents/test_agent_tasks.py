"""Tasks of several turns: their demonstrations are what the chat template, the tools and the environments write."""

import re
from typing import Any

import pytest

from hwgrpo.agents.action import Action, ParsedTurn
from hwgrpo.agents.calculator_tool import Calculator
from hwgrpo.agents.call_formats import hermes
from hwgrpo.agents.guessing_game import GuessingGame
from hwgrpo.agents.search_tool import Search
from hwgrpo.agents.second_try import SecondTry
from hwgrpo.data.agent_tasks import ASSISTANT, END, TOOL, USER, ChatTask
from hwgrpo.data.tasks import parse_task
from hwgrpo.errors import ConfigError
from hwgrpo.models import tiny

TASKS = ("calculator", "guess", "lookup", "spell")


def task_of(name: str) -> ChatTask:
    task = parse_task(f"task://{name}")
    assert isinstance(task, ChatTask)
    return task


def tokenizer_of(task: ChatTask) -> Any:
    return tiny.make(task=task, seed=0, hidden=32, layers=1, steps=0, batch=1, lr=1e-3)[1]


def turns_of(response: str) -> list[tuple[str, str]]:
    """Return the turns of a demonstration, each with what was observed after it ("" after the last one)."""
    turns = re.split(f"{re.escape(END)}|{re.escape(ASSISTANT)}", response)
    return list(zip(turns[::2], [*turns[1::2], ""], strict=True))


@pytest.mark.parametrize("name", TASKS)
def test_demonstrations_are_written_as_the_chat_template_writes_them(name: str):
    task = task_of(name)
    tokenizer = tokenizer_of(task)
    tools = [{"type": "function", "function": {"name": task.tool}}] if task.tool else None
    for row in task.splits["warm"][:20]:
        for mode in task.modes.values():
            messages: list[dict[str, Any]] = [{"role": "user", "content": row["prompt"]}]
            written = mode(row["payload"])
            for turn, observed in turns_of(written):
                parsed = hermes(turn)
                messages.append(Action(turn, (), True, 0, parsed).message)
                if observed:
                    role, text = (TOOL, "tool") if observed.startswith(TOOL) else (USER, "user")
                    messages.append({"role": text, "content": observed.removeprefix(role)})
            rendered = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
            assert rendered == task.opened(row["prompt"]) + written + END


@pytest.mark.parametrize("name", ["calculator", "lookup"])
def test_demonstrated_results_are_the_tools(name: str):
    task = task_of(name)
    tool = Calculator() if name == "calculator" else Search("task://lookup", top_k=1)
    for row in task.splits["train"][:50]:
        for mode in task.modes.values():
            for turn, observed in turns_of(mode(row["payload"])):
                for call in hermes(turn).calls:
                    assert tool.run(**call.arguments) == observed.removeprefix(TOOL)
        assert turns_of(next(iter(task.modes.values()))(row["payload"]))[-1][0] == row["ground_truth"]


@pytest.mark.parametrize("name", ["guess", "spell"])
def test_demonstrated_answers_are_the_environments_and_the_first_mode_succeeds(name: str):
    task = task_of(name)
    for row in task.splits["train"][:50]:
        for number, mode in enumerate(task.modes.values()):
            environment = GuessingGame() if name == "guess" else SecondTry("exact_match")
            environment.reset(row)
            for turn, observed in turns_of(mode(row["payload"])):
                step = environment.step(Action(turn, (), True, 0, ParsedTurn(turn)))
                assert step.done == (not observed)
                assert step.done or step.observation == observed.removeprefix(USER)
            assert number > 0 or step.reward == 1.0


@pytest.mark.parametrize("name", TASKS)
def test_what_is_observed_has_no_loss_in_the_warm_start(name: str):
    task = task_of(name)
    tokenizer = tokenizer_of(task)
    pairs = [
        (task.opened(row["prompt"]), mode(row["payload"]))
        for row in task.splits["warm"][:9]
        for mode in task.modes.values()
    ]
    ids, targets = tiny._tensors(tokenizer, pairs, True)
    for row, (_, response) in zip(targets.tolist(), pairs, strict=True):
        trained = tokenizer.decode([token for token in row if token >= 0])
        assert trained == "".join(turn + END for turn, _ in turns_of(response))
    assert ((targets == ids.roll(-1, 1)) | (targets == -100))[:, :-1].all()


def test_the_second_try_counts_less_and_a_wrong_scorer_is_refused():
    row = {"prompt": "p", "ground_truth": "right"}
    environment = SecondTry("exact_match", tries=3)
    environment.reset(row)
    steps = [environment.step(Action(text, (), True, 0, ParsedTurn(text))) for text in ("a", "b", "right")]
    assert [step.reward for step in steps] == [0.0, 0.0, 0.25]
    assert [step.done for step in steps] == [False, False, True]
    named = SecondTry("exact_match", ground_truth_key="short")
    named.reset({"prompt": "p", "answer": "2 + 3 = 5", "short": "5"})
    assert named.step(Action("5", (), True, 0, ParsedTurn("5"))).reward == 1.0
    with pytest.raises(ConfigError, match="none of the accepted signatures"):
        SecondTry("environment")
    with pytest.raises(ConfigError, match="verl's form"):
        SecondTry(f"{__file__}:of_a_batch")


def of_a_batch(completions: list[str], **columns: Any) -> list[float]:
    return [0.0] * len(completions)


CALCULATIONS = {
    "34*57": "1938",
    "1/3": "0.333333333333",
    "(12 + 3.5) * 4": "62",
    "-2**2": "-4",
    "7//2 + 7%4": "6",
    "2**-1": "0.5",
    "0.1+0.2": "0.3",
}
NOT_CALCULATED = ("1/0", "2**99999", "x+1", "__import__('os')", "1+", "9" * 2000, "'a'*3", "True", "10**300**2", "")


@pytest.mark.parametrize("expression", CALCULATIONS)
def test_the_calculator_is_exact(expression: str):
    assert Calculator().run(expression) == CALCULATIONS[expression]


@pytest.mark.parametrize("expression", NOT_CALCULATED)
def test_what_is_no_arithmetic_is_an_error_as_text(expression: str):
    text, failure = Calculator().run(expression)
    assert failure == "error"
    assert text.startswith("Error: ")
    assert len(text) < 300
