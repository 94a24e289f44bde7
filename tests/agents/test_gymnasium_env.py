"""The environment `gymnasium`: observations as text, actions from text, seeds from rows, and what is refused."""

import json
import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from hwgrpo.agents.action import Action, ParsedTurn, StepResult
from hwgrpo.agents.agent_metrics import agent_metrics
from hwgrpo.agents.gymnasium_env import GymnasiumEnvironment, as_json
from hwgrpo.config.schema import EnvironmentConfig
from hwgrpo.errors import ConfigError, DataError
from hwgrpo.values import Sampling
from tests.agents.scripted import agent_engine, agent_rows, chat_tokenizer, prompts_of
from tests.support.runs import runs

LAKE = {"id": "FrozenLake-v1", "actions": ["left", "down", "right", "up"]}


class Echo(gymnasium.Env):
    """Says a number that it draws, and what it was given; the third action ends it in one of the two ways."""

    observation_space = spaces.Text(100)

    def __init__(self, action_space: Any = None, observation: Any = None, end: str = "terminated") -> None:
        self.action_space = action_space or spaces.Text(6, charset="ab")
        self._observation, self._end = observation, end
        self.closed = False

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.taken: list[Any] = []
        self.options = options
        return self._said(), {}

    def step(self, action: Any) -> Any:
        self.taken.append(action)
        over = len(self.taken) == 3
        return self._said(), 0.5, over and self._end == "terminated", over and self._end == "truncated", {}

    def close(self) -> None:
        self.closed = True

    def _said(self) -> Any:
        drawn = int(self.np_random.integers(1000))
        return f"{drawn} {self.taken} {self.options}" if self._observation is None else self._observation


def echo(monkeypatch: pytest.MonkeyPatch, arguments: Any = None, **settings: Any) -> Any:
    """Return `Echo` as an environment of ours, and itself."""
    made = Echo(**(arguments or {}))
    monkeypatch.setattr(gymnasium, "make", lambda id: made)
    return GymnasiumEnvironment("Echo-v0", **settings), made


def act(environment: Any, text: str) -> StepResult:
    return environment.step(Action(text, (), True, 0, ParsedTurn(text)))


@pytest.mark.parametrize(
    "observation, text",
    [
        ("a text", "a text"),
        (np.int64(7), "7"),
        (np.float32(0.123456), "0.1235"),
        (np.array([1.0, -2.34567e-9, 3e9], np.float32), "[1.0, -2.346e-09, 3000000000.0]"),
        (np.array([[1, 0], [0, 1]], np.int8), "[[1, 0], [0, 1]]"),
        ((np.int64(20), np.bool_(True), "ß"), '[20, true, "ß"]'),
        ({"at": np.array([0.5]), "bag": {"key": 1}}, '{"at": [0.5], "bag": {"key": 1}}'),
    ],
)
def test_observations_are_text(monkeypatch, observation, text):
    environment, _ = echo(monkeypatch, {"observation": observation})
    assert environment.reset({}) == environment.state() == text


def test_an_observation_without_a_text_or_of_an_image_is_refused(monkeypatch):
    environment, _ = echo(monkeypatch, {"observation": np.zeros((64, 64, 3), np.uint8)})
    with pytest.raises(ValueError, match=r"observation has \d{5} characters, more than 4096: wrap"):
        environment.reset({})
    with pytest.raises(TypeError, match="type object has no text"):
        as_json([object()], 4)


@pytest.mark.parametrize(
    "space, names, settings, turns",
    [
        (spaces.Discrete(3), None, {}, {"2": 2, " 0\n": 0, "+1": 1, "3": None, "-1": None, "left": None, "1.0": None}),
        (spaces.Discrete(2, start=5), None, {}, {"5": 5, "6": 6, "0": None}),
        (spaces.Discrete(2, start=5), ["on", "off"], {}, {"on": 5, "OFF": 6, "6": 6, "on off": None}),
        (spaces.Discrete(2), ["1", "0"], {}, {"1": 0, "0": 1}),
        (
            spaces.Discrete(2),
            None,
            {"pattern": r"<do>(.*?)</do>"},
            {"<do>0</do> or <do>\n1</do>": 1, "1": None, "<do>": None, "<do></do>": None},
        ),
        (spaces.Discrete(12), None, {"pattern": r"\d+"}, {"first 3, then 11.": 11, "none": None}),
        (spaces.Text(3, charset="ab"), None, {}, {"aba": "aba", " b ": "b", "abab": None, "c": None, "": None}),
    ],
)
def test_actions_are_read_from_a_turn(monkeypatch, space, names, settings, turns):
    for text, wanted in turns.items():
        environment, inner = echo(monkeypatch, {"action_space": space}, actions=names, **settings)
        environment.reset({})
        step = act(environment, text)
        assert inner.taken == ([] if wanted is None else [wanted]), text
        (name, result) = step.results[0]
        assert (name, result.failure) == ("action", "malformed" if wanted is None else "")


@pytest.mark.parametrize(
    "space, names, settings, expected",
    [
        (spaces.Discrete(3, start=1), None, {}, "a whole number from 1 to 3"),
        (spaces.Discrete(2), ["on", "off"], {}, "one of on, off"),
        (spaces.Text(3, charset="ba"), None, {}, "text of 1 to 3 characters, each one of ab"),
        (spaces.Text(2, min_length=2, charset="a"), None, {}, "text of 2 characters, each one of a"),
        (spaces.Discrete(2), None, {"expected": "<do>0</do> or <do>1</do>"}, "<do>0</do> or <do>1</do>"),
    ],
)
def test_what_is_no_action_is_answered_with_what_is_and_costs_what_is_set(
    monkeypatch, space, names, settings, expected
):
    settings |= {"malformed_reward": -0.25}
    environment, _ = echo(monkeypatch, {"action_space": space}, actions=names, **settings)
    first = environment.reset({})
    step = act(environment, "???")
    assert (step.observation, step.reward, step.done) == (f"Not an action: write {expected}.", -0.25, False)
    assert environment.state() == first


@pytest.mark.parametrize("end", ["terminated", "truncated"])
def test_an_episode_ends_where_the_environment_ends_it(monkeypatch, end):
    environment, inner = echo(monkeypatch, {"end": end})
    environment.reset({})
    steps = [act(environment, "ab") for _ in range(3)]
    assert [step.done for step in steps] == [False, False, True]
    assert [step.reward for step in steps] == [0.5] * 3
    assert str(steps[1].observation).endswith("['ab', 'ab'] None")
    environment.close()
    assert inner.closed


def test_the_same_row_begins_the_same_episode_and_another_row_another_one(monkeypatch):
    environment, _ = echo(monkeypatch)
    rows = [{"prompt": "a", "k": [1, {"b": 2}]}, {"prompt": "b"}, {"k": [1, {"b": 2}], "prompt": "a"}]
    first, second, again = [environment.reset(row) for row in rows]
    assert first == again != second
    assert environment.reset({"image": object()}) == environment.reset({"image": object()})
    seeded, _ = echo(monkeypatch, seed_key="seed")
    assert seeded.reset({"seed": 3, "prompt": "a"}) == seeded.reset({"seed": 3}) != seeded.reset({"seed": 4})
    assert seeded.reset({"seed": 3}).split()[0] == str(np.random.Generator(np.random.PCG64(3)).integers(1000))
    for wrong in ({}, {"seed": -1}, {"seed": True}, {"seed": "3"}):
        with pytest.raises(ValueError, match=r"column seed \(kwargs.seed_key\) is .*, no whole number"):
            seeded.reset(wrong)


def test_a_column_may_have_the_options_of_reset(monkeypatch):
    environment, inner = echo(monkeypatch, options_key="options")
    environment.reset({"options": {"target": "cat"}})
    assert inner.options == {"target": "cat"}


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"id": "FrozenLoch-v1"}, r"kwargs.id='FrozenLoch-v1': NameNotFound: .*doesn't exist"),
        ({"id": "no_module:Lake-v1"}, r"kwargs.id='no_module:Lake-v1': ModuleNotFoundError"),
        ({"id": "FrozenLake-v1", "arguments": {"size": 3}}, r"FrozenLake-v1': TypeError: .*size"),
        ({"id": "Pendulum-v1"}, r"the action space Box\(.*cannot be written; a policy writes Text or Discrete"),
        ({"id": "Pendulum-v1", "actions": ["a"]}, r"has names \(kwargs.actions\) of Discrete actions only"),
        ({"id": "FrozenLake-v1", "actions": ["left", "right"]}, r"kwargs.actions=.* must be 4 different texts"),
        ({"id": "FrozenLake-v1", "actions": ["a", "b", "c", "A"]}, r"must be 4 different texts"),
        ({"id": "FrozenLake-v1", "actions": [1, 2, 3, 4]}, r"must be 4 different texts"),
        ({"id": "FrozenLake-v1", "pattern": "("}, r"kwargs.pattern='\(' is no regular expression"),
        ({"id": f"{__file__}:Path"}, r"Path' is no gymnasium.Env; name it in rollout.agent.environments itself"),
        ({"id": f"{__file__}:object"}, r"has no function 'object'"),
    ],
)
def test_wrong_settings_are_refused_by_name(settings, message):
    with pytest.raises(ConfigError, match=message):
        GymnasiumEnvironment(**settings)


def test_a_missing_package_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(ConfigError, match=r'needs the package gymnasium .*: pip install "hwgrpo\[gymnasium\]"'):
        GymnasiumEnvironment("FrozenLake-v1")


def play(kwargs: dict[str, Any], turn: Any, rows: list[dict[str, Any]], **more: Any) -> tuple[Any, list[str]]:
    """Play episodes of `gymnasium` through the workflow; return the responses, and all texts."""
    agent = {"environments": [EnvironmentConfig("gymnasium", kwargs)], **more}
    tokenizer = chat_tokenizer()
    engine = agent_engine(turn, tokenizer, **agent)
    done = engine.generate(prompts_of(agent_rows(rows, **agent)), Sampling(n=2, max_response_tokens=600))
    engine.close()
    return done, [tokenizer.decode(tokens) for tokens in done.token_lists()]


def test_frozen_lake_is_played_through_the_workflow():
    """The way of its four by four map that avoids the holes."""
    way = ["down", "down", "right", "swim", "right", "down", "right"]
    kwargs = {**LAKE, "arguments": {"is_slippery": False}}
    done, texts = play(kwargs, lambda text: way[text.count("<assistant>") - 1], [{"prompt": "Cross the lake."}])
    assert texts[0] == texts[1]
    assert texts[0].startswith("down<eos><user>4<assistant>down<eos><user>8<assistant>right<eos><user>9<assistant>swim")
    assert "<user>Not an action: write one of left, down, right, up.<assistant>right" in texts[0]
    assert [each["reward"] for each in done.outcomes] == [1.0, 1.0]
    assert done.outcomes[0]["states"] == ["0", "4", "8", "9", "9", "10", "14"]
    assert done.outcomes[0]["stop"] == "done"
    metrics = agent_metrics(done.outcomes)
    assert metrics["tools/action/calls"] == 14
    assert metrics["tools/failed/malformed"] == 2
    assert metrics["tools/failure_frequency"] == pytest.approx(1 / 7)


def test_what_never_is_an_action_ends_by_the_number_of_turns():
    done, _ = play(LAKE, lambda text: "swim", [{"prompt": "Cross."}], max_turns=3)
    assert [(each["stop"], len(each["turn_rewards"]), each["failure"]) for each in done.outcomes] == [
        ("max_turns", 3, "")
    ] * 2


def test_an_environment_of_a_file_that_is_drawn_alike_in_all_trajectories(tmp_path: Path):
    file = tmp_path / "walk.py"
    file.write_text(WALK)
    kwargs = {"id": f"{file}:Walk", "arguments": {"length": 3}, "pattern": r"\[(\w+)\]", "actions": ["back", "on"]}
    rows = [{"prompt": "Go.", "i": i} for i in range(4)]
    done, texts = play(kwargs, lambda text: "I go [on]", rows)
    assert texts[::2] == texts[1::2]
    assert len({*texts}) > 1, "rows differ"
    assert {each["stop"] for each in done.outcomes} == {"done"}


WALK = """
import gymnasium
from gymnasium.spaces import Dict, Discrete


class Walk(gymnasium.Env):
    observation_space = Dict({"at": Discrete(9), "wind": Discrete(2)})
    action_space = Discrete(2)

    def __init__(self, length):
        self.length = length

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.at = 0
        return self.seen(), {}

    def seen(self):
        return {"at": self.at, "wind": int(self.np_random.integers(2))}

    def step(self, action):
        self.at += action
        seen = self.seen()
        self.at = max(0, self.at - seen["wind"] * int(self.np_random.integers(2)))
        return seen, float(self.at == self.length), self.at == self.length, False, {}
"""


def test_several_of_one_class_have_labels_by_which_rows_choose():
    lake = EnvironmentConfig("gymnasium", LAKE, label="lake")
    cards = EnvironmentConfig("gymnasium", {"id": "Blackjack-v1", "actions": ["stick", "hit"]}, label="cards")
    rows = agent_rows([{"prompt": "p", "environment": name} for name in ("lake", "cards")], environments=[lake, cards])
    texts = [chat_tokenizer().decode(prompt.token_ids) for prompt in prompts_of(rows).prompts]
    assert texts[0] == "<user>p\n\n0<assistant>"
    assert len(json.loads(texts[1].removeprefix("<user>p\n\n").removesuffix("<assistant>"))) == 3
    with pytest.raises(ConfigError, match="the same name 'gymnasium', by which rows choose; give one of them a label"):
        agent_rows([{"prompt": "p"}], environments=[EnvironmentConfig("gymnasium", LAKE)] * 2)


def test_a_row_whose_seed_is_wrong_is_named():
    with pytest.raises(DataError, match=r"rows, row 0: gymnasium.reset ValueError: the column seed"):
        play({**LAKE, "seed_key": "seed"}, lambda text: "up", [{"prompt": "p", "seed": "x"}])


def test_a_run_trains_in_an_environment_of_gymnasium(tmp_path: Path):
    (tmp_path / "walk.py").write_text(WALK)
    entry = f"{{name: gymnasium, kwargs: {{id: '{tmp_path}/walk.py:Walk', arguments: {{length: 1}}}}}}"
    runs.run(
        tmp_path / "run",
        "model.path=builtin://tiny?task=guess&hidden=32&layers=1&steps=1&batch=4",
        "data.train=task://guess",
        "rollout.workflow=environment",
        f"rollout.agent.environments=[{entry}]",
        "rollout.agent.max_turns=2",
        "rollout.max_response_tokens=80",
        "data.max_prompt_tokens=256",
        "reward.functions=[environment]",
        "trainer.max_steps=1",
    )
    (line,) = [line for line in runs.metrics(tmp_path / "run") if "actor/pg_loss" in line]
    assert line["tools/action/calls"] == line["agent/turns/mean"] * 16


def test_instances_that_are_made_at_once_see_their_file_loaded(tmp_path: Path):
    file = tmp_path / "walk.py"
    file.write_text("import time\n\ntime.sleep(0.3)\n" + WALK)
    kwargs = {"id": f"{file}:Walk", "arguments": {"length": 3}}
    rows = agent_rows([{"prompt": str(i)} for i in range(4)], environments=[EnvironmentConfig("gymnasium", kwargs)])
    assert all("wind" in rows[i]["prompt"][0]["content"] for i in range(4))
