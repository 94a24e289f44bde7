"""Functions and classes that are given as objects: tools in threads, environments, and the end of their episodes."""

import asyncio
import gc
import inspect
import pickle
import threading
import time
from typing import Any

import pytest

import hwgrpo
from hwgrpo.agents.action import StepResult, ToolResult
from hwgrpo.agents.given_tools import GivenTool
from hwgrpo.agents.tool_schema import make_schema
from hwgrpo.config.schema import EnvironmentConfig, ToolConfig
from hwgrpo.errors import ConfigError
from hwgrpo.support.given_objects import ENVIRONMENT, TOOL, given, name_of
from hwgrpo.trainer.given_settings import load_given
from hwgrpo.values import Sampling
from tests.agents.scripted import agent_engine, agent_rows, prompts_of

BLOCKED = threading.Event()
CALL = '<tool_call>{"name": "%s", "arguments": %s}</tool_call>'


def add(a: int, b: int = 1) -> int:
    """Add.

    Args:
        a: One.
        b: Another.
    """
    return a + b


async def naps(seconds: float) -> str:
    """Sleep.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return "woke"


def hangs() -> str:
    """Never return."""
    BLOCKED.wait(60)
    return "late"


def leaves() -> None:
    """Exit."""
    raise SystemExit(3)


def pays() -> ToolResult:
    """Pay."""
    return ToolResult("x" * 30, reward=0.5)


def tool(function: Any, kwargs: Any = (), **changed: Any) -> GivenTool:
    limits = {"timeout": 0.2, "workers": 1, "max_chars": 20, "truncate": "right"} | changed
    return GivenTool(function, make_schema(function, dict(kwargs), "key"), dict(kwargs), **limits)


def result(each: GivenTool, **arguments: Any) -> ToolResult:
    return asyncio.run(each.call(arguments))


def test_results_are_as_those_of_tools_in_processes():
    assert result(tool(add), a=2).text == "3"
    assert result(tool(add, {"b": 5}), a=2).text == "7"
    assert "b" not in tool(add, {"b": 5}).schema["function"]["parameters"]["properties"]
    assert result(tool(naps), seconds=0.001).text == "woke"
    paid = result(tool(pays))
    assert (paid.reward, paid.text) == (0.5, "x" * 20 + "...[10 characters left out]...")


@pytest.mark.parametrize(
    ("function", "arguments", "failure", "said"),
    [
        (naps, {"seconds": 9.0}, "timeout", "naps took longer"),
        (hangs, {}, "timeout", "hangs took longer"),
        (add, {"a": "x"}, "malformed", "Error: "),
        (add, {"c": 1}, "malformed", "no parameter"),
        (leaves, {}, "error", "SystemExit"),
    ],
)
def test_failures_are_results(function, arguments, failure, said):
    BLOCKED.clear()
    found = result(tool(function, max_chars=400), **arguments)
    assert found.failure == failure
    assert said in found.text


def test_an_abandoned_call_gives_up_its_place_and_waiting_does_not_count():
    BLOCKED.clear()
    one = tool(hangs)

    async def three() -> list[ToolResult]:
        return await asyncio.gather(*(one.call({}) for _ in range(3)))

    assert [each.failure for each in asyncio.run(three())] == ["timeout"] * 3
    BLOCKED.set()
    assert result(one).text == "late"


def test_a_call_that_is_cancelled_while_it_waits_for_a_place_is_not_made():
    made: list[int] = []
    begun, go_on = threading.Event(), threading.Event()

    def records(number: int) -> None:
        """Record a number.

        Args:
            number: it.
        """
        made.append(number)
        begun.set()
        assert go_on.wait(60.0)

    one = tool(records, timeout=60.0)

    async def calls() -> None:
        first = asyncio.create_task(one.call({"number": 1}))
        assert await asyncio.to_thread(begun.wait, 60.0)
        second = asyncio.create_task(one.call({"number": 2}))
        await asyncio.sleep(0)  # it waits for the place
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        go_on.set()
        await first
        await one.call({"number": 3})

    asyncio.run(calls())
    for thread in [each for each in threading.enumerate() if each.name == f"tool {one.name}"]:
        thread.join(60.0)
    assert made == [1, 3]


def test_calls_run_as_many_at_once_as_there_are_workers():
    running, most, lock = 0, [0], threading.Lock()

    def counts() -> None:
        """Count."""
        nonlocal running
        with lock:
            running += 1
            most[0] = max(most[0], running)
        time.sleep(0.03)
        with lock:
            running -= 1

    async def six(each: GivenTool) -> None:
        await asyncio.gather(*(each.call({}) for _ in range(6)))

    asyncio.run(six(tool(counts, workers=2, timeout=9.0)))
    assert most[0] == 2


def test_settings_name_given_tools(monkeypatch):
    with given({f"{TOOL}add": add}):
        engine = agent_engine(
            lambda text: "done" if "<tool>" in text else CALL % ("add", '{"a": 4}'),
            workflow="tools",
            tools=[ToolConfig(f"{TOOL}add", kwargs={"b": 2})],
        )
        rows = agent_rows([{"prompt": "Add."}], tools=[ToolConfig(f"{TOOL}add")])
        done = engine.generate(prompts_of(rows), Sampling(n=1, max_response_tokens=200))
        engine.close()
    assert done.outcomes[0]["messages"][1] == {"role": "tool", "content": "6", "name": "add"}


class Game:
    """Adds to a reward at its end."""

    def reset(self, row: Any) -> str:
        self.ended = 0
        return "Play."

    def step(self, action: Any) -> StepResult:
        return StepResult("More.", reward=0.25, done=action.content == "2")

    def finish(self) -> float:
        self.ended += 1
        return 2.0 * self.ended


class Kept(Game):
    """Reward functions read it."""

    made = 0

    def __init__(self) -> None:
        Kept.made += 1

    @property
    def for_rewards(self) -> Any:
        return self

    async def finish(self) -> None:  # type: ignore[override]
        self.ended = 1


def play(kind: Any, turn: Any = lambda text: str(text.count("<assistant>")), **agent: Any) -> Any:
    name = f"{ENVIRONMENT}{kind.__name__}"
    with given({name: kind}):
        agent["environments"] = [EnvironmentConfig(name)]
        batch = prompts_of(agent_rows([{}], environments=agent["environments"]))
        engine = agent_engine(turn, **agent)
    return engine, lambda: engine.generate(batch, Sampling(n=2, max_response_tokens=100))


@pytest.mark.parametrize(
    ("limits", "rewards", "stop"),
    [({}, [0.25, 2.25], "done"), ({"max_turns": 1}, [2.25], "max_turns")],
)
def test_finish_is_called_once_and_adds_to_the_last_turn(limits, rewards, stop):
    engine, generate = play(Game, **limits)
    for outcome in generate().outcomes:
        assert outcome["turn_rewards"] == rewards
        assert outcome["stop"] == stop
        assert outcome["environment"] == "Game"
    engine.close()


@pytest.mark.parametrize(("value", "said"), [("much", "not a finite number"), (1 / 7, "")])
def test_a_finish_that_fails_costs_the_trajectory(value, said):
    bad = type("Bad", (Game,), {"finish": lambda self: value})
    engine, generate = play(bad)
    outcome = generate().outcomes[0]
    assert said in outcome["failure"]
    assert outcome["stop"] == ("failed" if said else "done")
    engine.close()


def test_a_kept_instance_serves_another_trajectory_only_when_its_response_is_gone():
    Kept.made = 0
    engine, generate = play(Kept)
    made = Kept.made
    first = generate()
    instances = [each.environment for each in first.outcomes]
    assert len({*map(id, instances)}) == 2
    second = generate()
    assert not {*map(id, instances)} & {id(each.environment) for each in second.outcomes}
    assert Kept.made == made + 4
    del first
    gc.collect()
    third = generate()
    assert {id(each.environment) for each in third.outcomes} == {*map(id, instances)}
    copy = pickle.loads(pickle.dumps(third.outcomes[0]))
    assert type(copy) is dict
    assert copy == third.outcomes[0]
    engine.close()
    del third  # put back after the end
    gc.collect()


def test_the_last_turn_by_max_turns_calls_no_tools():
    calls: list[int] = []

    def note(a: int) -> str:
        """Note.

        Args:
            a: A number.
        """
        calls.append(a)
        return "noted"

    with given({f"{TOOL}note": note}):
        engine = agent_engine(
            lambda text: CALL % ("note", '{"a": 1}'),
            workflow="tools",
            tools=[ToolConfig(f"{TOOL}note")],
            max_turns=2,
        )
        rows = agent_rows([{"prompt": "Go."}], tools=[])
        done = engine.generate(prompts_of(rows), Sampling(n=1, max_response_tokens=300))
        engine.close()
    assert (done.outcomes[0]["stop"], calls) == ("max_turns", [1])


def test_trainer_takes_tools_and_environments():
    tree = {"model.path": "builtin://tiny", "data.train": "task://sort", "reward.functions": ["exact_match"]}
    config, objects = load_given(
        tree, (), tools=[add, {"name": naps, "timeout": 5}], environments={"game": Game, "kept": Kept}
    )
    agent = config.rollout.agent
    assert [each.name for each in agent.tools] == [f"{TOOL}add", f"{TOOL}naps"]
    assert agent.tools[1].timeout == 5
    assert config.rollout.workflow == "environment"
    assert load_given(tree, (), tools=add)[0].rollout.workflow == "tools"
    assert [name_of(each.name) for each in agent.environments] == ["game", "kept"]
    assert objects[f"{ENVIRONMENT}kept"] is Kept
    with pytest.raises(ConfigError, match=r"tools\[0\] is a lambda.*tools=\{\"name\": ...\}"):
        load_given(tree, (), tools=[lambda a: a])
    with pytest.raises(ConfigError, match=r"environments\[1\]: two functions have the name 'Game'"):
        load_given(tree, (), environments=[Game, type("Game", (), {})])
    assert {"tools", "environments"} <= inspect.signature(hwgrpo.Trainer).parameters.keys()


def test_another_function_of_the_same_name_is_shown_by_its_own_schema():
    def tool_of(text: str) -> Any:
        def look(name: str) -> str:
            return name

        look.__doc__ = f"{text}\n\nArgs:\n    name: what to look at."
        return look

    for text in ("Look once.", "Look twice."):
        with given({f"{TOOL}look": tool_of(text)}):
            rows = agent_rows([{"prompt": "p"}], tools=[ToolConfig(f"{TOOL}look")])
        assert rows.tools(0)[0]["function"]["description"] == text
