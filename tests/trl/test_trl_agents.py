"""TRL scripts with tools and environments: the same calls, results, messages, columns and log as in TRL."""

import asyncio
import base64
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from hwgrpo.agents.action import Action, ParsedTurn, ToolCall
from hwgrpo.config.schema import ModelConfig
from hwgrpo.errors import ConfigError, DataError
from hwgrpo.models.loading import load_model
from hwgrpo.rollout.workflow_engine import WorkflowEngine
from hwgrpo.trl import GRPOConfig, GRPOTrainer
from hwgrpo.trl.trl_agents import Agents, result_parts
from tests.agents.scripted import ScriptedEngine, chat_tokenizer
from tests.support.models.reward_models import character_tokenizer
from tests.trl.small_trainer import SMALL


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first one.
        b: The second one.
    """
    if a > 90:
        raise ValueError("too large")
    return a + b


class Counter:
    """Counts up to a number."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.resets = 0

    def reset(self, limit: int, **row: Any) -> str:
        self.count, self.limit, self.row = 0, limit, row
        self.resets += 1
        return f" Count to {limit}."

    def up(self, by: int) -> str:
        """Count up.

        Args:
            by: How far.
        """
        self.count += by
        return f"at {self.count}"

    async def look(self) -> int:
        """Return the count."""
        await asyncio.sleep(0)
        return self.count

    def get_reward(self) -> float:
        return 1.0 if self.count == self.limit else -0.5

    def _private(self) -> None: ...


class Slow(Counter):
    """Its reward is a coroutine."""

    async def get_reward(self) -> float:  # type: ignore[override]
        await asyncio.sleep(0)
        return 0.25


class Plain:
    """Has no reward and no tools."""

    def reset(self, **row: Any) -> None: ...


@pytest.fixture
def chat_folder(folder: Path) -> Path:
    """The working directory, with a tiny model whose template has tools."""
    load_model(ModelConfig(path="builtin://tiny?hidden=32&layers=1"), attention="sdpa").save_pretrained("tools")
    chat_tokenizer().save_pretrained("tools")
    return folder


def scripted(turn: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Let a function write the turns of all runs; return the texts that it reads."""
    made, seen = WorkflowEngine.__init__, []

    class Over(ScriptedEngine):
        def __getattr__(self, name: str) -> Any:
            return getattr(self.__dict__["engine"], name)

        def update_weights(self, version: int) -> None:
            self.engine.update_weights(version)

        def close(self) -> None:
            self.engine.close()

    def said(text: str) -> str:
        seen.append(text)
        return turn(text)

    def init(self: Any, engine: Any, workflow: Any, name: str, tokenizer: Any, *others: Any) -> None:
        over: Any = Over(tokenizer, said)
        over.engine = engine
        made(self, over, workflow, name, tokenizer, *others)

    monkeypatch.setattr(WorkflowEngine, "__init__", init)
    return seen


def outcomes(folder: str = "out") -> list[dict[str, Any]]:
    lines = Path(folder, "completions.jsonl").read_text().splitlines()
    return [json.loads(line)["outcome"] for line in lines]


ARGUMENTS = SMALL | {"max_completion_length": 600, "learning_rate": 1e-3}


def test_a_script_with_environments_and_tools_calls_both_and_scores_the_instances(chat_folder, monkeypatch):
    numbers = iter(range(100))

    def turn(text: str) -> str:
        said = text.count("<tool>")
        if said == 0:
            return "so" + call("up", by=2 + (next(numbers) % 2)) + call("add", a=1, b=2)
        return call("look") + call("add", a=99, b=1) + call("jump") if said == 2 else "done"

    seen = scripted(turn, monkeypatch)
    read: list[Any] = []

    def limits(completions: Any, environments: Any, limit: Any, **_: Any) -> list[float]:
        read.append((completions, list(environments), limit))
        return [float(each.limit) for each in environments]

    Counter.made = 0
    trainer = GRPOTrainer(
        "tools",
        limits,
        GRPOConfig("out", **ARGUMENTS | {"max_steps": 4}, reward_weights=[0.5]),
        [{"prompt": [{"role": "user", "content": "Go."}], "limit": 2}] * 2,
        tools=[add],
        environment_factory=Counter,
    )
    trainer.train()
    assert seen[0] == "[tools add look up ]<user>Go. Count to 2.<assistant>"
    counts = [2, 3, 2, 3]
    for _, environments, limit in read:
        assert limit == [2] * 4
        assert [each.count for each in environments] == counts
        assert len({id(each) for each in environments}) == 4
        assert environments[0].row.keys() == {"prompt"}
    used = [[id(each) for each in environments] for _, environments, _ in read]
    assert used[0] == used[2]  # constructed once, reset often, while the step before is still in memory
    assert used[1] == used[3]
    assert Counter.made <= 10  # two steps of four, and two that made the prompts
    first = outcomes()[0]
    assert [(each["role"], each.get("name"), each["content"]) for each in first["messages"]] == [
        ("assistant", None, "so"),
        ("tool", "up", "at 2"),
        ("tool", "add", "3"),
        ("assistant", None, ""),
        ("tool", "look", "2"),
        ("tool", "add", "{'error': 'too large'}"),
        ("tool", "jump", "{'error': 'Tool jump not found.'}"),
        ("assistant", None, "done"),
    ]
    assert first["stop"] == "done"
    assert first["failed_calls"] == {"error": 1, "unknown": 1}
    log = trainer.state.log_history[0]
    assert log["rewards/Counter/mean"] == pytest.approx((1.0 - 0.5) / 2)
    assert log["rewards/limits/mean"] == pytest.approx(2.0)
    assert log["reward"] == pytest.approx(0.5 * 2.0 + 0.25)
    assert log["tools/call_frequency"] == pytest.approx(5.0)  # 5 calls a completion
    assert log["tools/failure_frequency"] == pytest.approx(2 / 5)


@pytest.mark.parametrize(("iterations", "turns"), [(None, 5), (2, 3), (0, 1)])
def test_the_limit_counts_rounds_of_calls_and_the_last_turns_calls_are_not_made(
    chat_folder, monkeypatch, iterations, turns
):
    def turn(text: str) -> str:
        return "end" if text.count("<tool>") == 4 else call("up", by=1)

    scripted(turn, monkeypatch)
    trainer = GRPOTrainer(
        "tools",
        None,
        GRPOConfig("out", **ARGUMENTS, max_tool_calling_iterations=iterations),
        [{"prompt": "Go.", "limit": min(turns - 1, 4)}] * 2,
        environment_factory=Counter,
    )
    trainer.train()
    found = outcomes()[0]
    assert len(found["turn_rewards"]) == turns
    assert found["stop"] == ("max_turns" if iterations is not None else "done")
    assert found["calls"] == ({"up": turns - 1} if turns > 1 else {})
    assert trainer.state.log_history[0]["rewards/Counter/mean"] == 1.0  # only the calls before the last turn count


def test_rows_choose_among_environments_and_each_class_has_a_column(chat_folder, monkeypatch):
    seen = scripted(lambda text: "done" if "<tool>" in text else call("up", by=3), monkeypatch)
    rows = [{"prompt": "A.", "limit": 3, "environment": "one"}, {"prompt": "B.", "limit": 0, "environment": "two"}]
    trainer = GRPOTrainer(
        "tools",
        lambda environments, **_: [None if type(each) is Slow else 1.0 for each in environments],
        GRPOConfig("out", **ARGUMENTS | {"per_device_train_batch_size": 8, "logging_steps": 1}, shuffle_dataset=False),
        rows,
        environment_factory={"one": Counter, "two": Slow, "three": Plain},
    )
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["rewards/Counter/mean"] == 1.0
    assert log["rewards/Slow/mean"] == 0.25
    assert {text.split("<assistant>")[0] for text in seen} == {
        "[tools look up ]<user>A. Count to 3.",
        "[tools look up ]<user>B. Count to 0.",
    }
    assert {each["environment"] for each in outcomes()} == {"one", "two"}
    with pytest.raises(ConfigError, match=r"train_dataset, row 0: environment='on'.*Did you mean 'one'"):
        GRPOTrainer(
            "tools",
            None,
            GRPOConfig("o", **SMALL),
            [rows[0] | {"environment": "on"}],
            environment_factory={"one": Counter},
        )
    with pytest.raises(ConfigError, match="environment is missing"):
        GRPOTrainer("tools", None, GRPOConfig("o", **SMALL), [{"prompt": "a"}], environment_factory={"one": Counter})


def test_tools_alone_train_a_model_that_samples_by_itself(chat_folder):
    def length(completions: Any, **_: Any) -> list[float]:
        assert all(each[0]["role"] == "assistant" for each in completions)
        return [float(len(each[0]["content"])) for each in completions]

    trainer = GRPOTrainer(
        "tools",
        length,
        GRPOConfig("out", **SMALL | {"max_steps": 2}),
        [{"prompt": "Go."}, {"prompt": "Stop."}],
        tools=[add],
    )
    assert trainer.settings["rollout.workflow"] == "environment"
    trainer.train()
    assert trainer.state.global_step == 2
    assert trainer.state.log_history[0]["tools/call_frequency"] == 0.0
    with pytest.raises(ConfigError, match="needs environments"):
        GRPOTrainer(
            "tools",
            lambda environments: [0.0],
            GRPOConfig("other", **SMALL),
            [{"prompt": "a"}],
            tools=[add],
        )


class Undocumented(Plain):
    def go(self, to: str) -> str:
        return to


class Untyped(Plain):
    def go(self, to) -> str:
        """Go.

        Args:
            to: Where.
        """
        return to


class Adds(Plain):
    add = staticmethod(add)

    def up(self) -> str:
        """Go up."""
        return ""


def fails() -> Any:
    raise OSError("no display")


WRONG: dict[str, tuple[Any, Any, str]] = {
    "a tool without a docstring": ([lambda a: a], None, r"tools\[0\]=.*no function with a name"),
    "an undocumented method": (None, Undocumented, r"environment_factory\.go: go has no JSON schema: .*Give each"),
    "a method without hints": (None, {"x": Untyped}, r"environment_factory\['x'\]\.go: go has no JSON schema"),
    "two tools of one name": ([add, add], None, r"tools\[1\]: two tools have the name 'add'"),
    "no list": (add, None, r"tools=.* must be a list of functions"),
    "no environment": (None, "Counter", r"environment_factory='Counter' must be a class"),
    "no reset": (None, dict, r"environment_factory\(\) made \{\}, which has no reset"),
    "a constructor that fails": (None, fails, r"environment_factory\(\) failed.*no display"),
    "no environments": (None, {}, r"environment_factory=\{\}"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_tools_and_environments_are_named_with_a_remedy(case):
    tools, factory, said = WRONG[case]
    with pytest.raises(ConfigError, match=said):
        Agents(tools, factory)


def test_a_tool_and_a_method_of_one_name_are_refused():
    def up(by: int) -> int:
        """Count.

        Args:
            by: How far.
        """
        return by

    with pytest.raises(ConfigError, match=r"tools and environment_factory both have 'up'"):
        Agents([up], Counter)


def test_what_the_door_needs_is_said_before_the_run(chat_folder):
    arguments = {"args": GRPOConfig("out", **SMALL), "environment_factory": Plain}
    with pytest.raises(ConfigError, match=r"reward_funcs is missing.*get_reward"):
        GRPOTrainer("tools", None, train_dataset=[{"prompt": "a"}], **arguments)
    with pytest.raises(ConfigError, match=r"train_dataset is missing.*columns by which reset makes one"):
        GRPOTrainer("tools", None, **arguments)
    tokenizer = character_tokenizer(chat=True)
    with pytest.raises(ConfigError, match="does not show how the model calls tools"):
        GRPOTrainer(
            "tools",
            lambda completions: [0.0],
            GRPOConfig("out", **SMALL),
            [{"prompt": "a"}],
            tools=[add],
            processing_class=tokenizer,
        )
    with pytest.raises(ConfigError, match="rollout_func is not supported"):
        GRPOTrainer("tools", None, train_dataset=[{"prompt": "a"}], rollout_func=fails)


def test_results_are_text_or_blocks_with_images():
    assert result_parts(3) == ("3", [])
    assert result_parts([1, 2]) == ("[1, 2]", [])
    assert result_parts([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]) == ("ab", [])
    with pytest.raises(DataError, match="block 0 is of type 'video'"):
        result_parts([{"type": "video", "video": "a.mp4"}])
    with pytest.raises(DataError, match="expected"):
        result_parts([{"type": "image", "image": Image.new("RGB", (2, 2))}, {"type": "inn"}])


def test_images_of_tools_and_methods_are_in_their_messages():
    def paint(color: str) -> Any:
        """Paint.

        Args:
            color: Name.
        """
        return [{"type": "text", "text": color}, {"type": "image", "image": Image.new("RGB", (2, 2), color)}]

    class Painter(Plain):
        def show(self) -> Any:
            """Show a picture."""
            return Image.new("RGB", (2, 2), "lime")

    episode = Agents([paint], Painter).environments["Painter"]()
    calls = (ToolCall("paint", {"color": "red"}), ToolCall("show", {}), ToolCall("paint", {"color": "blue"}))
    step = asyncio.run(episode.step(Action("x", (1,), True, 0, ParsedTurn("", calls))))
    shown = [
        [part.get("text") or Image.open(io.BytesIO(base64.b64decode(part["base64"]))).getpixel((0, 0)) for part in each]
        for each in (message["content"] for message in step.messages)
    ]
    assert shown == [["red", (255, 0, 0)], [(0, 255, 0)], ["blue", (0, 0, 255)]]
