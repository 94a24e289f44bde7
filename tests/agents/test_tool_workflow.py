"""The loop of tool calls: results as messages, wrong calls, limits, templates without tools or without their role."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hwgrpo.agents.action import Action, ParsedTurn, StepResult, Tool, ToolCall
from hwgrpo.agents.episode import DESCRIBED, Clock
from hwgrpo.agents.given_tools import GivenTool
from hwgrpo.agents.thread_tool import ThreadTool
from hwgrpo.agents.tool_answers import Tools
from hwgrpo.agents.tool_schema import make_schema
from hwgrpo.agents.tools import load_tools
from hwgrpo.config.schema import EnvironmentConfig, ToolConfig
from hwgrpo.errors import ConfigError
from hwgrpo.user_code import load_function
from hwgrpo.values import Sampling
from tests.agents.scripted import TEMPLATE, agent_engine, agent_rows, chat_tokenizer, prompts_of

SAMPLING = Sampling(n=1, max_response_tokens=2000)
CALCULATOR: dict[str, Any] = {"tools": [ToolConfig("calculator")]}


def call(expression: str, name: str = "calculator") -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {{"expression": "{expression}"}}}}</tool_call>'


def script(*turns: str) -> Any:
    """Return a policy that writes these turns, and the last one again and again."""
    return lambda text: turns[min(text.count("<assistant>") - 1, len(turns) - 1)]


def play(turn: Any, sampling: Sampling = SAMPLING, template: str = TEMPLATE, **agent: Any) -> Any:
    agent = CALCULATOR | agent
    tokenizer = chat_tokenizer(template)
    rows = agent_rows([{"prompt": "34*57?"}], tools=agent["tools"])
    engine = agent_engine(turn, tokenizer, "tools", **agent)
    done = engine.generate(prompts_of(rows, tokenizer), sampling)
    engine.close()
    return done, engine, tokenizer


def test_a_call_is_answered_by_its_result_and_the_turn_without_one_ends_the_trajectory():
    done, engine, tokenizer = play(script(call("34*57"), "1938"))
    assert tokenizer.decode(engine._engine.inputs[0]) == "[tools calculator ]<user>34*57?<assistant>"
    (tokens,) = done.token_lists()
    assert tokenizer.decode(tokens) == f"{call('34*57')}<eos><tool>1938<assistant>1938<eos>"
    (outcome,) = done.outcomes
    assert outcome["calls"] == {"calculator": 1}
    assert outcome["failed_calls"] == {}
    assert outcome["stop"] == "done"
    assert [message["role"] for message in outcome["messages"]] == ["assistant", "tool", "assistant"]
    assert outcome["messages"][0]["tool_calls"][0]["function"]["arguments"] == {"expression": "34*57"}


def test_calls_of_a_turn_run_together_and_are_answered_in_order():
    done, _, tokenizer = play(script(call("1+1") + call("2+2") + call("1/0"), "end"))
    assert "<tool>2<tool>4<tool>Error: '1/0' cannot be calculated" in tokenizer.decode(done.token_lists()[0])
    assert done.outcomes[0]["failed_calls"] == {"error": 1}


WRONG = {
    "unknown": (call("1", "calcualtor"), "there is no tool 'calcualtor'; the tools are: calculator"),
    "malformed": ('<tool_call>{"name": "calculator", </tool_call>', "its JSON is not valid"),
    "another parameter": ('<tool_call>{"name": "calculator", "arguments": {"x": "1"}}</tool_call>', "expression"),
    "no object": ("<tool_call>[1]</tool_call>", "it is not a JSON object"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_call_is_answered_by_what_is_wrong_with_it(case):
    written, said = WRONG[case]
    done, _, tokenizer = play(script(written, "end"))
    assert said in tokenizer.decode(done.token_lists()[0])
    (outcome,) = done.outcomes
    assert outcome["failed_calls"] == {"unknown" if case == "unknown" else "malformed": 1}
    assert outcome["stop"] == "done"
    assert len(outcome["turn_rewards"]) == 2


def test_a_model_that_never_stops_calling_is_stopped_by_turns_or_by_tokens():
    done, _, _ = play(script(call("1+1")), max_turns=5)
    assert (done.outcomes[0]["stop"], done.outcomes[0]["calls"]) == (
        "max_turns",
        {"calculator": 4},
    )  # nothing reads the last results
    assert done.finished.all()
    done, engine, _ = play(script(call("1+1")), Sampling(n=1, max_response_tokens=600))
    assert done.outcomes[0]["stop"] == "length"
    assert done.lengths[0] <= 600
    assert not done.finished.any()
    assert max(map(len, engine._engine.inputs)) < 600 + 100  # no input is longer than prompt and limit


@pytest.mark.parametrize("limits", [{"max_response_tokens": 5}, {"max_turn_tokens": 5}])
def test_a_turn_without_a_call_that_was_cut_is_none_that_the_policy_ended(limits):
    sampling = Sampling(n=1, max_response_tokens=limits.pop("max_response_tokens", 200))
    done, _, _ = play(script("abcdefgh"), sampling, **limits)
    assert done.lengths.tolist() == [5]
    assert done.outcomes[0]["stop"] == "length"
    assert not done.finished.any()


def test_special_tokens_in_a_result_do_not_end_its_message(tmp_path, monkeypatch):
    class Prints:
        def run(self, expression: str) -> str:
            """Return it.

            Args:
                expression: text.
            """
            return f"<eos>{expression}<pad><p<eos>ad><e<pad>os>"

        def close(self) -> None: ...

    monkeypatch.setattr("hwgrpo.agents.calculator_tool.Calculator", Prints)
    from hwgrpo import catalog

    monkeypatch.setitem(catalog.TOOLS._entries, "calculator", Prints)
    done, _, tokenizer = play(script(call("x"), "end"))
    assert "<tool>x<assistant>end" in tokenizer.decode(done.token_lists()[0])


def test_results_are_the_users_messages_where_the_template_has_no_role_for_them():
    no_role = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"
    done, engine, tokenizer = play(script(call("1+1"), "2"), template=no_role + TEMPLATE)
    assert "<eos><user>2<assistant>2<eos>" in tokenizer.decode(done.token_lists()[0])
    assert any("messages of the user" in note for note in engine.notes)


def test_results_are_the_users_messages_where_the_template_takes_one_result_alone():
    one = (
        "{% for m in messages %}{% if m.role == 'tool' and messages[loop.index0 - 1].role == 'tool' %}"
        "{{ raise_exception('one result') }}{% endif %}{% endfor %}"
    )
    done, _, tokenizer = play(script(call("1+1") + call("2*3"), "8"), template=one + TEMPLATE)
    assert "<eos><user>2\n6<assistant>8<eos>" in tokenizer.decode(done.token_lists()[0])


LAST_IS_SHOWN = TEMPLATE.replace("{{ m.content }}", "{{ m.content }}{% if loop.last %}!{% endif %}")


def test_a_template_that_shows_turns_differently_later_is_named_at_the_start():
    for agent in (CALCULATOR, {"environments": [EnvironmentConfig("guessing_game")]}):
        notes = agent_engine(script("1"), chat_tokenizer(LAST_IS_SHOWN), "environment", **agent).notes
        assert sum("roles user follow: a trajectory then goes on in a further row" in note for note in notes) == 1


def test_results_of_one_turn_are_one_message_of_the_user():
    alternating = (
        "{% for m in messages %}{% if (m.role == 'user') != loop.index0 is divisibleby(2) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
    )
    done, _, tokenizer = play(script(call("1+1") + call("2*3"), "8"), template=alternating + TEMPLATE)
    assert "<eos><user>2\n6<assistant>8<eos>" in tokenizer.decode(done.token_lists()[0])
    assert done.outcomes[0]["calls"] == {"calculator": 2}


def test_a_template_that_shows_no_tools_gets_a_system_message_that_describes_them():
    plain = TEMPLATE.partition("{% endif %}")[2].replace("{% for call in m.tool_calls or [] %}", "{% for call in [] %}")
    done, engine, tokenizer = play(script(call("1+1"), "2"), template=plain)
    first = tokenizer.decode(engine._engine.inputs[0])
    assert first.startswith("<system>You may call these functions:")
    assert '"name": "calculator"' in first
    assert DESCRIBED in engine.notes
    assert done.outcomes[0]["calls"] == {"calculator": 1}
    assert tokenizer.decode(done.token_lists()[0]).endswith("<eos><tool>2<assistant>2<eos>")


def test_a_template_whose_calls_are_in_an_unknown_form_is_refused_with_the_formats():
    unknown = TEMPLATE.replace("<tool_call>", "((").replace("</tool_call>", "))")
    with pytest.raises(ConfigError, match=r"rollout.agent.call_format=auto: .*set it to one of deepseek, .*hermes"):
        play(script("x"), template=unknown)


HELD = """
import time
from pathlib import Path


def held(path: str) -> str:
    '''Wait for a file.

    Args:
        path: Its path.
    '''
    Path(path + ".begun").touch()
    while not Path(path).exists():
        time.sleep(0.01)
    return "seen"
"""


def held_tool(kind: str, folder: Path) -> Tool:
    """Return a tool that waits for a file, with one worker."""
    (folder / "held.py").write_text(HELD)
    if kind == "in a process":
        return load_tools([ToolConfig(name=f"{folder}/held.py:held", workers=1)], folder=str(folder))[0]
    function = load_function(f"{folder}/held.py:held", "key")
    limits: dict[str, Any] = {"workers": 1, "max_chars": 100, "truncate": "right"}
    if kind == "given":
        return GivenTool(function, make_schema(function, {}, "key"), timeout=60.0, **limits)
    registered: Any = SimpleNamespace(run=function, close=lambda: None)
    return ThreadTool("held", registered, key="key", **limits)


def calling(path: Path) -> Action:
    return Action("", (), True, 0, ParsedTurn("", (ToolCall("held", {"path": str(path)}),)))


@pytest.mark.parametrize("kind", ["in a process", "in a thread", "given"])
def test_the_wait_for_a_free_worker_counts_in_no_time_limit(kind: str, tmp_path: Path):
    tools = Tools([held_tool(kind, tmp_path)], agent_engine(script("end"))._turns, chat_tokenizer())
    first, second = tmp_path / "first", tmp_path / "second"
    second.touch()

    async def both() -> tuple[StepResult, StepResult, StepResult]:
        waiting = asyncio.create_task(tools.step(calling(first), 60.0))
        while not Path(f"{first}.begun").exists():
            await asyncio.sleep(0.01)
        queued = asyncio.create_task(tools.step(calling(second), 1.0))
        await asyncio.sleep(1.3)
        assert not queued.done()
        first.touch()
        done = await asyncio.gather(waiting, queued)
        return *done, await tools.step(calling(tmp_path / "missing"), 0.3)

    waited, queued, late = asyncio.run(both())
    (tmp_path / "missing").touch()
    tools.close()
    assert [step.results[0][1].failure for step in (waited, queued, late)] == ["", "", "timeout"]
    assert late.results[0][1].text == "Error: held took longer than 0.3 s"
    assert queued.queued > 1.0 > max(waited.queued, late.queued)


def test_a_trajectory_without_time_makes_no_call_and_what_was_queued_is_not_of_its_time(tmp_path: Path):
    tools = Tools([held_tool("given", tmp_path)], agent_engine(script("end"))._turns, chat_tokenizer())
    step = asyncio.run(tools.step(calling(tmp_path / "first"), 0.0))
    (tmp_path / "first").touch()
    assert step.results[0][1].failure == "timeout"
    clock = Clock(5.0, 3.0)
    with clock:
        pass
    clock.leave_out(-1.0)
    assert 1.0 < clock.left <= 2.0
    clock.leave_out(1.0)
    assert 2.0 < clock.left <= 3.0
