"""Episodes in environments: prompts, turns, rewards, limits, failures, and what of them is recorded."""

import asyncio
import itertools
import queue
import threading
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from hwgrpo.agents.action import Action, ParsedTurn, StepResult
from hwgrpo.agents.agent_rows import OpenedRow, rows_of_agents
from hwgrpo.agents.environments import load_environments
from hwgrpo.agents.episode import EnvironmentWorkflow
from hwgrpo.config.schema import AgentConfig, DataConfig, EnvironmentConfig, RewardConfig, ToolConfig
from hwgrpo.data.chat_template import apply_template
from hwgrpo.data.formats import Part
from hwgrpo.data.sources import Rows
from hwgrpo.errors import ConfigError, DataError
from hwgrpo.registry import Registry
from hwgrpo.rewards.trajectory_outcomes import TurnFinder
from hwgrpo.rollout.turn_template import TurnTemplate
from hwgrpo.rollout.workflow import WorkflowParts
from hwgrpo.values import Sampling
from tests.agents.scripted import agent_engine, agent_rows, chat_tokenizer, prompts_of

SAMPLING = Sampling(n=2, max_response_tokens=200)


class Guess:
    """A number from 1 to 9; three turns."""

    def reset(self, row: Any) -> str:
        self.number, self.turns = row["number"], 0
        return "Which number?"

    def step(self, action: Any) -> Any:
        self.turns += 1
        if action.content == str(self.number):
            return StepResult("", reward=1.0, done=True)
        return StepResult(f"Not {action.content}.", reward=-0.25, done=self.turns == 3)

    def state(self) -> str:
        return str(self.turns)


class Slow(Guess):
    """Answers its second step late."""

    def step(self, action: Any) -> Any:
        if self.turns == 1:
            time.sleep(1.0)
        return super().step(action)


class Waits(Guess):
    """The same as a coroutine."""

    async def step(self, action: Any) -> Any:
        await asyncio.sleep(0.001)
        return super().step(action)


class Blocks(Guess):
    """A coroutine that blocks its thread."""

    async def step(self, action: Any) -> Any:
        time.sleep(1.0)
        return super().step(action)


def environments(*classes: type, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Register classes as environments, and return the setting that names them."""
    registry = Registry("environment", {})
    registry._own |= {each.__name__.lower(): each for each in classes}
    monkeypatch.setattr("hwgrpo.agents.environments.ENVIRONMENTS", registry)
    return {"environments": [EnvironmentConfig(name) for name in registry.names()]}


def counting(text: str) -> str:
    """Say 1, 2, 3, one after another."""
    return str(text.count("<assistant>"))


def play(agent: dict[str, Any], numbers: list[int], turn: Any = counting, sampling: Sampling = SAMPLING) -> Any:
    rows = agent_rows([{"number": number} for number in numbers], environments=agent["environments"])
    engine = agent_engine(turn, **agent)
    done = engine.generate(prompts_of(rows), sampling)
    engine.close()
    return done, engine


def test_an_episode_is_prompt_turns_and_observations_and_each_sampled_token_is_the_engines(monkeypatch):
    tokenizer = chat_tokenizer()
    done, engine = play(environments(Guess, monkeypatch=monkeypatch), [2, 1])
    first = "<user>Which number?<assistant>"
    assert tokenizer.decode(engine._engine.inputs[0]) == first
    whole = [tokenizer.decode(tokens) for tokens in done.token_lists()]
    assert whole == 2 * ["1<eos><user>Not 1.<assistant>2<eos>"] + 2 * ["1<eos>"]
    sampled = ["".join(tokenizer.decode([t]) for t, m in zip(tokens, mask) if m) for tokens, mask in pairs(done)]
    assert sampled == 2 * ["1<eos>2<eos>"] + 2 * ["1<eos>"]
    assert [each["turn_rewards"] for each in done.outcomes] == [[-0.25, 1.0], [-0.25, 1.0], [1.0], [1.0]]
    assert done.outcomes[0]["states"] == ["0", "1"]
    assert [each["stop"] for each in done.outcomes] == ["done"] * 4
    assert done.finished.all()
    assert done.outcomes[0]["messages"] == [
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "Not 1."},
        {"role": "assistant", "content": "2"},
    ]


def pairs(done: Any) -> list[tuple[list[int], list[bool]]]:
    """Return tokens and mask of each response."""
    bounds = done.offsets.tolist()
    masks = [done.loss_mask[low:high].tolist() for low, high in itertools.pairwise(bounds)]
    return list(zip(done.token_lists(), masks))


@pytest.mark.parametrize(
    ("limits", "stop", "turns", "finished"),
    [
        ({"max_turns": 2}, "max_turns", 2, True),
        ({"max_turn_tokens": 1}, "done", 3, True),
        ({}, "done", 3, True),
    ],
)
def test_limits_end_an_episode(monkeypatch, limits, stop, turns, finished):
    done, _ = play(environments(Guess, monkeypatch=monkeypatch) | limits, [9])
    assert {(each["stop"], len(each["turn_rewards"])) for each in done.outcomes} == {(stop, turns)}
    assert done.finished.tolist() == [finished] * 2


def test_a_trajectory_without_room_for_another_turn_is_truncated_and_keeps_no_loss_on_what_it_read(monkeypatch):
    sampling = Sampling(n=1, max_response_tokens=10)
    done, _ = play(environments(Guess, monkeypatch=monkeypatch), [9], sampling=sampling)
    assert done.lengths.tolist() == [10]
    assert done.outcomes[0]["stop"] == "length"
    assert not done.finished.any()
    assert done.loss_mask.tolist() == [True, True] + [False] * 8


def test_environments_may_be_coroutines_and_are_used_again(monkeypatch):
    made: list[Any] = []
    agent = environments(Waits, monkeypatch=monkeypatch)
    monkeypatch.setattr(Waits, "__init__", lambda self: made.append(self), raising=False)
    engine = agent_engine(counting, **agent)
    rows = agent_rows([{"number": 1}, {"number": 2}], environments=agent["environments"])
    batch = prompts_of(rows)
    before = len(made)
    first, second = engine.generate(batch, SAMPLING), engine.generate(batch, SAMPLING)
    assert [each["reward"] for each in first.outcomes] == [1.0, 1.0, 0.75, 0.75]
    assert second.outcomes == first.outcomes
    assert len(made) - before <= 4


@pytest.mark.parametrize("late", [Slow, Blocks])
def test_a_late_environment_costs_its_trajectory_alone_within_its_limit(monkeypatch, late):
    agent = environments(late, monkeypatch=monkeypatch) | {"turn_timeout": 0.2}
    done, _ = play(agent, [1, 2])
    failed = [bool(each["failure"]) for each in done.outcomes]
    assert [len(each["states"]) for each in done.outcomes] == [len(ends) for ends in done.turn_ends()]
    assert failed == ([False, False, True, True] if late is Slow else [True] * 4)
    assert "took longer than 0.2 s" in done.outcomes[-1]["failure"]
    assert done.outcomes[-1]["stop"] == "failed"
    assert not done.finished[-1]


def test_a_trajectorys_time_is_the_sum_over_its_turns(monkeypatch):
    class Naps(Guess):
        def step(self, action: Any) -> Any:
            time.sleep(0.15)
            return super().step(action)

    agent = environments(Naps, monkeypatch=monkeypatch) | {"trajectory_timeout": 0.25}
    done, _ = play(agent, [9], sampling=Sampling(n=1, max_response_tokens=200))
    assert done.outcomes[0]["stop"] == "failed"
    assert done.outcomes[0]["turn_rewards"] == [-0.25, 0.0]


BAD_STEPS = {
    "raises": (lambda self, action: 1 / 0, "ZeroDivisionError"),
    "exits": (lambda self, action: exit(3), "SystemExit"),
    "returns nothing": (lambda self, action: None, "expected a StepResult"),
    "a reward that is text": (lambda self, action: StepResult("x", reward="much"), "not a finite number"),  # type: ignore[arg-type]
    "an infinite reward": (lambda self, action: StepResult("x", reward=float("inf")), "not a finite number"),
    "an observation that is a number": (lambda self, action: StepResult(3), "not text or a list"),  # type: ignore[arg-type]
    "a message without a role": (lambda self, action: StepResult([{"content": "x"}]), "expected"),
    "no messages": (lambda self, action: StepResult([]), "returned no message; return text"),
    "four values": (lambda self, action: ("x", 0.0, False, {}), "expected a StepResult"),
}


@pytest.mark.parametrize("kind", BAD_STEPS)
def test_a_failing_environment_is_named_in_the_outcome(monkeypatch, kind):
    step, said = BAD_STEPS[kind]
    broken = type("Broken", (Guess,), {"step": step})
    done, _ = play(environments(broken, monkeypatch=monkeypatch), [1])
    assert all(said in each["failure"] and each["failure"].startswith("broken.step") for each in done.outcomes)
    assert done.outcomes[0]["messages"] == [{"role": "assistant", "content": "1"}]
    assert len(done) == 2


def test_a_failing_reset_costs_the_trajectory(monkeypatch):
    class Fails(Guess):
        calls = 0

        def reset(self, row: Any) -> str:
            Fails.calls += 1
            if Fails.calls == 2:
                raise ValueError("no such game")
            return super().reset(row)

    done, _ = play(environments(Fails, monkeypatch=monkeypatch), [1])
    assert [bool(each["failure"]) for each in done.outcomes] == [True, False]
    assert done.lengths.tolist() == [1, 2]


def test_a_reset_that_gives_another_prompt_than_before_fails(monkeypatch):
    class Changes(Guess):
        def reset(self, row: Any) -> str:
            self.number, self.turns = 1, 0
            return threading.current_thread().name + str(time.monotonic_ns())

    done, _ = play(environments(Changes, monkeypatch=monkeypatch), [1])
    assert all("must return the same for the same row" in each["failure"] for each in done.outcomes)


OPENINGS = {
    "text without a prompt": ({}, "Go!", [{"role": "user", "content": "Go!"}]),
    "text after a text": ({"prompt": "Play."}, "Go!", [{"role": "user", "content": "Play.\n\nGo!"}]),
    "text after messages": (
        {"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "Play."}]},
        "Go!",
        [{"role": "system", "content": "s"}, {"role": "user", "content": "Play.\n\nGo!"}],
    ),
    "messages in place of the prompt": (
        {"prompt": "Play."},
        [{"role": "user", "content": "Go!"}],
        [{"role": "user", "content": "Go!"}],
    ),
    "nothing": ({"prompt": "Play."}, None, [{"role": "user", "content": "Play."}]),
}


@pytest.mark.parametrize("case", OPENINGS)
def test_prompts_are_made_of_the_row_and_what_reset_returns(monkeypatch, case):
    row, opening, expected = OPENINGS[case]
    opens = type("Opens", (Guess,), {"reset": lambda self, row: opening})
    rows = agent_rows([row | {"number": 1}], **environments(opens, monkeypatch=monkeypatch))
    assert rows[0]["prompt"] == expected
    assert rows[0]["environment"] == "opens"
    assert isinstance(rows[0], OpenedRow)
    assert rows[0].original == row | {"number": 1}


def test_reset_gets_the_row_as_the_data_has_it_each_time(monkeypatch):
    seen: list[Any] = []

    class Sees(Guess):
        def reset(self, row: Any) -> Any:
            seen.append(row)
            super().reset(row)
            return None

    row = {"prompt": "Play.", "number": 1, "environment": "a column of the data's own"}
    agent = environments(Sees, monkeypatch=monkeypatch)
    rows = agent_rows([row], **agent)
    agent_engine(counting, **agent).generate(prompts_of(rows), SAMPLING)
    assert seen == [row] * 3


def test_a_trajectory_whose_last_turn_was_cut_at_its_limit_is_truncated_also_where_the_episode_is_over(monkeypatch):
    ends = type("Ends", (Guess,), {"step": lambda self, action: StepResult("", reward=1.0, done=True)})
    agent = environments(ends, monkeypatch=monkeypatch)
    done, _ = play(agent, [1], lambda text: "abcdef", Sampling(n=1, max_response_tokens=4))
    assert (done.outcomes[0]["stop"], done.outcomes[0]["reward"]) == ("length", 1.0)
    assert not done.finished.any()


def test_environments_are_all_closed_also_where_one_raises(monkeypatch):
    closed: list[int] = []

    class Closes(Guess):
        def close(self) -> None:
            closed.append(id(self))
            raise OSError("no such connection")

    agent = environments(Closes, monkeypatch=monkeypatch)
    batch = prompts_of(
        agent_rows(
            [{"number": 1, "prompt": "?"}], environments=environments(Guess, monkeypatch=monkeypatch)["environments"]
        )
    )
    environments(Closes, monkeypatch=monkeypatch)
    engine = agent_engine(counting, **agent)
    engine.generate(batch, SAMPLING)
    engine._engine.close = lambda: closed.append(-1)
    with pytest.raises(OSError, match="no such connection"):
        engine.close()
    assert len({*closed}) == 3  # two instances, and the engine
    assert closed[-1] == -1


@pytest.mark.parametrize("ended_by", ["a token that is not special", "a stop string", "the limit of tokens"])
def test_the_content_of_a_turn_has_no_end_of_the_turn(ended_by):
    tokenizer = chat_tokenizer()
    render = partial(apply_template, config=DataConfig(), tokenizer=tokenizer, place="here")
    ends = tokenizer.encode(";>", add_special_tokens=False)
    rollout = SimpleNamespace(workflow="tools", agent=AgentConfig())
    config = SimpleNamespace(rollout=rollout, reward=RewardConfig(), data=DataConfig())
    template = TurnTemplate(render, tokenizer, [tokenizer.eos_token_id, *ends])
    workflow = EnvironmentWorkflow(WorkflowParts(config, tokenizer, template))

    def content(written: str, text: str, calls: int = 0) -> str:
        action = workflow.action(tokenizer.encode(written, add_special_tokens=False), text, finished, 0)
        assert (len(action.calls), len(action.parsed.malformed)) == (calls, 0)
        return action.content

    finished = ended_by != "the limit of tokens"
    if ended_by == "a stop string":
        assert content("5</a>", "5") == content("<think>x</think>5</a>", "<think>x</think>5") == "5"
        assert content('<tool_call>{"name": "f", "arguments": {}}</tool_call>', '<tool_call>{"name": "f"', 1) == ""
    else:
        expected = "5" if finished else "5;"
        assert content("5;", expected) == content("<think>x</think>5;", f"<think>x</think>{expected}") == expected
        call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'  # which the stop token completes
        assert content(call, call[:-1] if finished else call, 1) == ""


def test_a_row_without_any_prompt_is_an_error_that_names_it(monkeypatch):
    silent = type("Silent", (Guess,), {"reset": lambda self, row: None})
    with pytest.raises(DataError, match="rows, row 0"):
        agent_rows([{"number": 1}], **environments(silent, monkeypatch=monkeypatch))


def test_rows_choose_among_environments_by_column_or_by_weight(monkeypatch):
    other = type("Other", (Guess,), {"reset": lambda self, row: "Other?"})
    agent = environments(Guess, other, monkeypatch=monkeypatch)
    rows = agent_rows([{"number": 1, "environment": "other"}, {"number": 1, "environment": "guess"}], **agent)
    assert [row["prompt"][0]["content"] for row in rows] == ["Other?", "Which number?"]
    with pytest.raises(ConfigError, match=r"environment='gess'.*guess"):
        agent_rows([{"number": 1, "environment": "gess"}], **agent)
    agent["environments"][1].weight = 3.0
    many = agent_rows([{"number": 1}] * 400, **agent)
    others = sum(row["environment"] == "other" for row in many)
    assert 270 <= others <= 330  # of 300: five standard deviations are 43
    assert [row["environment"] for row in many] == [
        row["environment"] for row in agent_rows([{"number": 1}] * 400, **agent)
    ]


def test_wrong_environments_are_refused_by_name(monkeypatch):
    agent = environments(Guess, type("Empty", (), {}), monkeypatch=monkeypatch)
    with pytest.raises(ConfigError, match=r"environments.0.name='empty' has no method 'reset'"):
        agent_engine(counting, **agent)
    agent = environments(Guess, monkeypatch=monkeypatch)
    with pytest.raises(ConfigError, match=r"environments.1.name='guess': .*environments.0.name has the same name"):
        agent_engine(counting, environments=agent["environments"] * 2)
    agent["environments"][0].kwargs = {"size": 3}
    with pytest.raises(ConfigError, match=r"environments.0.name='guess': making it failed: TypeError"):
        play(agent, [1])
    with pytest.raises(ConfigError, match=r"needs the tokenizer's chat template.*set model\.chat_template"):
        EnvironmentWorkflow(
            WorkflowParts(SimpleNamespace(rollout=SimpleNamespace(workflow="environment", agent=None)), None, None)
        )


def test_tools_and_environments_change_no_prompt_of_a_workflow_that_uses_none(monkeypatch):
    agent = AgentConfig(tools=[ToolConfig("calculator")], **environments(Guess, monkeypatch=monkeypatch))
    row = {"prompt": "Play.", "number": 1}
    found = {}
    for workflow in ("single_turn", "tools", "environment"):
        config = SimpleNamespace(rollout=SimpleNamespace(workflow=workflow, agent=agent), data=DataConfig())
        change = rows_of_agents(config)
        rows = Rows([Part("rows", [row], tuple(row), "rows")])
        rows = rows if change is None else change(rows, 1)
        found[workflow] = (rows[0]["prompt"], len(rows.tools(0)))
    assert found == {
        "single_turn": ("Play.", 0),
        "tools": ([{"role": "user", "content": "Play."}], 1),
        "environment": ([{"role": "user", "content": "Play.\n\nWhich number?"}], 1),
    }


class Closes(Guess):
    """Says when it is closed, as a coroutine."""

    def __init__(self, closed: queue.Queue[Any]) -> None:
        self.closed = closed

    def step(self, action: Any) -> Any:
        raise ValueError("the board broke")

    async def close(self) -> None:
        await asyncio.sleep(0)
        self.closed.put(id(self))


@pytest.mark.parametrize("ends_by", ["a failure", "an error of the engine"])
def test_an_instance_that_is_used_no_more_is_closed(monkeypatch, ends_by):
    closed: queue.Queue[Any] = queue.Queue()
    batch = prompts_of(agent_rows([{"number": 1}], **environments(Guess, monkeypatch=monkeypatch)))
    agent = environments(
        type("Own", (Closes,), {"__init__": lambda self: Closes.__init__(self, closed)}), monkeypatch=monkeypatch
    )
    engine = agent_engine(counting, **agent)
    if ends_by == "a failure":
        done = engine.generate(batch, SAMPLING)
        assert all("the board broke" in each["failure"] for each in done.outcomes)
    else:
        engine._engine.turn = lambda text: 1 / 0
        with pytest.raises(ZeroDivisionError):
            engine.generate(batch, SAMPLING)
    assert len({closed.get(timeout=60.0) for _ in range(2)}) == 2


def test_half_of_a_surrogate_pair_in_an_observation_or_a_state_ends_no_run(monkeypatch):
    half = type(
        "Half", (Guess,), {"step": lambda self, action: ("a\ud800", 0.0, False), "state": lambda self: "\ud800"}
    )
    agent = environments(half, monkeypatch=monkeypatch) | {"max_turns": 2}
    done, _ = play(agent, [1], sampling=Sampling(n=1, max_response_tokens=200))
    assert done.texts == ("1<user>a?<assistant>2",)
    states = TurnFinder(needs_lists=True).states(done, [2]).tolist()
    assert states[0] == states[1] >= 0


def test_the_text_of_a_truncated_observation_is_that_of_its_tokens(monkeypatch):
    done, _ = play(environments(Guess, monkeypatch=monkeypatch), [9], sampling=Sampling(n=1, max_response_tokens=10))
    assert done.texts == ("1<user>No",)
    assert len(done.tokens) == 10


def test_episodes_are_played_where_an_event_loop_runs_already(monkeypatch):
    agent = environments(Guess, monkeypatch=monkeypatch)

    async def in_a_notebook() -> Any:
        return play(agent, [2])[0]

    assert asyncio.run(in_a_notebook()).outcomes == play(agent, [2])[0].outcomes


def test_a_tool_of_the_environment_beside_one_of_the_runs_is_not_called_unknown(monkeypatch):
    move = {"type": "function", "function": {"name": "move", "description": "Move.", "parameters": {}}}
    moves = type("Moves", (Guess,), {"tools": [move]})
    agent = environments(moves, monkeypatch=monkeypatch) | {"tools": [ToolConfig("calculator")], "max_turns": 2}
    calls = ('{"name": "move", "arguments": {}}', '{"name": "calculator", "arguments": {"expression": "1+1"}}')
    both = "".join(f"<tool_call>{call}</tool_call>" for call in calls)
    engine = agent_engine(lambda text: both if text.count("<assistant>") == 1 else "9", **agent)
    done = engine.generate(prompts_of(agent_rows([{"number": 9}], **agent)), replace(SAMPLING, max_response_tokens=400))
    engine.close()
    assert "<tool>Error: call move in a turn without calls of calculator<tool>2<assistant>9" in done.texts[0]
    assert done.outcomes[0]["failed_calls"] == {"error": 1}
    assert done.outcomes[0]["reward"] == 1.0


class SlowlyMade(Guess):
    """Is made late."""

    threads: ClassVar[list[threading.Thread]] = []

    def __init__(self) -> None:
        self.threads.append(threading.current_thread())
        time.sleep(1.0)


def test_an_environment_is_made_in_a_thread_within_the_time_limit_of_a_turn(monkeypatch):
    SlowlyMade.threads = []
    agent = environments(SlowlyMade, monkeypatch=monkeypatch)
    done, _ = play(agent, [1])
    assert [each["reward"] for each in done.outcomes] == [1.0, 1.0]
    assert threading.main_thread() not in SlowlyMade.threads != []
    with pytest.raises(DataError, match=r"rows, row 0: making slowlymade took longer than 0.2 s"):
        agent_rows([{"number": 1}], **agent, turn_timeout=0.2)
    batch = prompts_of(agent_rows([{"number": 1}], **environments(Guess, monkeypatch=monkeypatch)))
    environments(SlowlyMade, monkeypatch=monkeypatch)
    done = agent_engine(counting, **agent, turn_timeout=0.2).generate(batch, SAMPLING)
    assert {each["failure"] for each in done.outcomes} == {"making slowlymade took longer than 0.2 s"}


class NeverCloses(Guess):
    """Does not close until it is let go."""

    let_go = threading.Event()

    def close(self) -> None:
        self.let_go.wait(60.0)


def test_an_environment_that_does_not_close_is_abandoned_and_named(monkeypatch, capsys):
    NeverCloses.let_go = threading.Event()
    batch = prompts_of(agent_rows([{"number": 1}], **environments(Guess, monkeypatch=monkeypatch)))
    engine = agent_engine(counting, **environments(NeverCloses, monkeypatch=monkeypatch), turn_timeout=0.5)
    engine.generate(batch, SAMPLING)
    engine.close()
    NeverCloses.let_go.set()
    assert capsys.readouterr().err == (
        "hwgrpo: 2 of 2 environments did not close within 0.5 s (rollout.agent.turn_timeout): nevercloses.close\n"
    )


def test_a_registered_environment_with_that_parameter_gets_the_runs_column_of_the_ground_truth(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(
        "class Own:\n    def __init__(self, ground_truth_key='own'):\n        self.key = ground_truth_key\n"
    )
    file.write_text(file.read_text() + "    def reset(self, row): ...\n    def step(self, action): ...\n")
    entries = [
        EnvironmentConfig("second_try", {"scorer": "exact_match"}, label="run's"),
        EnvironmentConfig("second_try", {"scorer": "exact_match", "ground_truth_key": "mine"}, label="its own"),
        EnvironmentConfig(f"{file}:Own"),
        EnvironmentConfig("guessing_game"),
    ]
    tried, named, own, _ = [kind.make() for kind in load_environments(entries, "short")]
    assert (tried._ground_truth_key, named._ground_truth_key, own.key) == ("short", "mine", "own")
    row = {"prompt": "p", "answer": "2 + 3 = 5", "short": "5", "number": 1}
    data = DataConfig(ground_truth_key="short")
    rollout = SimpleNamespace(workflow="environment", agent=AgentConfig(environments=entries[:1]))
    rows = rows_of_agents(SimpleNamespace(rollout=rollout, data=data))
    assert rows is not None
    (prompt,) = prompts_of(rows(Rows([Part("rows", [row], tuple(row), "rows")]), 1), data=data).prompts
    parts = WorkflowParts(
        SimpleNamespace(rollout=rollout, data=data, reward=RewardConfig()),
        chat_tokenizer(),
        agent_engine(counting)._turns,
    )
    workflow = EnvironmentWorkflow(parts)
    instance = workflow._instances.get(workflow._kinds[0])

    async def verdict() -> StepResult:
        await instance.reset(dict(prompt.columns), 60.0)
        return await instance.step(Action("5", (), True, 0, ParsedTurn("5")), 60.0)

    assert asyncio.run(verdict()).reward == 1.0


def test_prompts_that_take_long_are_reported(monkeypatch, capsys):
    class Late(Guess):
        def reset(self, row: Any) -> str:
            time.sleep(1.5 * row["number"])
            return super().reset(row)

    monkeypatch.setattr("hwgrpo.support.waits.FIRST_REPORT", 0.0)
    agent_rows([{"number": 0}, {"number": 1}], **environments(Late, monkeypatch=monkeypatch))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hwgrpo: waiting for prompts of environments (1 of 2 rows): 1 s")
