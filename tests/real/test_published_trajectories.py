"""Trajectories in the chat templates of published models: what is trained is what was sampled, token by token."""

from typing import Any

import pytest

from hwgrpo.config.schema import EnvironmentConfig, ToolConfig
from hwgrpo.errors import ConfigError
from hwgrpo.registry import Registry
from hwgrpo.rollout.turn_template import TurnTemplate
from hwgrpo.rollout.workflow import Trajectory
from hwgrpo.values import Sampling
from tests.agents.recorded_turns import (
    assert_forks,
    assert_log_probs_are_those_of_a_plain_forward,
    assert_what_is_trained_was_sampled,
    assert_what_was_read_is_prompt_turns_and_messages,
    check,
    play,
)
from tests.agents.scripted import agent_engine, agent_rows, prompts_of
from tests.agents.test_forked_history import Counts
from tests.real.test_published_tokenizers import TOOL_TURNS, WITH_TEMPLATE, between_turns
from tests.support.models.trajectories import rows_of

NAMES = (*WITH_TEMPLATE, "smollm2")
ENDS = {
    "gemma3": ("<end_of_turn>", "<eos>"),
    "llama3_1": ("<|eot_id|>", "<|end_of_text|>"),
    "qwen3": ("<|im_end|>", "<|endoftext|>"),
}
"""Tokens that end a turn, as the generation configs of these models have them; of others the end of sequence."""


@pytest.mark.parametrize("name", NAMES)
def test_tokens_that_are_trained_and_read(name, monkeypatch):
    read, _ = between_turns(name)
    ends = [read.convert_tokens_to_ids(token) for token in ENDS.get(name, (read.eos_token,))]
    found = play(read, ends, monkeypatch)
    check(found)
    assert {call.tokens[-1] in found.ends for call in found.calls} == {True, False}
    assert {len(each["turn_rewards"]) for each in found.completions.outcomes} == {1, 2, 3, 4, 5, 6}
    with_tools = play(read, ends, monkeypatch, tools=True, engine=found.engine)
    check(with_tools)
    roles = {message["role"] for each in with_tools.completions.outcomes for message in each["messages"]}
    assert roles == {"assistant", "user", *["tool"] * (name != "gemma3")}

    plain: Any = Trajectory.token_ids.fget
    tokenized_anew = property(lambda self: read.encode(read.decode(plain(self)), add_special_tokens=False))
    monkeypatch.setattr(Trajectory, "token_ids", tokenized_anew)
    mutant = play(read, ends, monkeypatch, engine=found.engine)
    with pytest.raises(AssertionError):
        assert_what_was_read_is_prompt_turns_and_messages(mutant)


def test_the_history_of_qwen3_without_earlier_reasoning_begins_a_row(monkeypatch):
    read, _ = between_turns("qwen3")
    ends = [read.convert_tokens_to_ids(token) for token in ENDS["qwen3"]]
    found = play(read, ends, monkeypatch, often=[read.convert_tokens_to_ids("</think>")])
    assert_what_is_trained_was_sampled(found)
    assert_log_probs_are_those_of_a_plain_forward(found)
    rows = assert_forks(found, "</think>")
    assert len({*rows}) > 2


def test_qwen3_reads_its_reasoning_after_the_result_of_a_tool_and_no_more_after_a_message_of_the_user(monkeypatch):
    read, render = between_turns("qwen3")
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1+1"}}\n</tool_call>'
    said = [f"<think>\nhm\n</think>\n\n{call}", "<think>\nso\n</think>\n\n2", "3", "<think>\nwell\n</think>\n\n4"]
    registry = Registry("environment", {})
    registry._own["counts"] = Counts
    monkeypatch.setattr("hwgrpo.agents.environments.ENVIRONMENTS", registry)
    agent = {"environments": [EnvironmentConfig("counts")], "tools": [ToolConfig("calculator")]}
    turns = iter(said)
    engine = agent_engine(lambda text: next(turns), read, "environment", **agent)
    question = {"role": "user", "content": "How much is 1+1?"}
    prompts = prompts_of(agent_rows([{"prompt": [question], "turns": 3}], **agent), read)
    done = engine.generate(prompts, Sampling(n=1, max_response_tokens=400))
    assert [note for note in engine.notes if "agent/forks" in note] == [
        "the chat template leaves out the reasoning of a turn when messages of the roles user follow: a trajectory "
        "then goes on in a further row (agent/forks)"
    ]
    rows = [
        read.decode([*before, *done.tokens[start:end].tolist()]) for before, start, end in rows_of(prompts, done, 0)
    ]
    tools = prompts.prompts[0].tools
    first = render([question], add_generation_prompt=True, tools=tools) + said[0] + "<|im_end|>"
    first += TOOL_TURNS["qwen3"].replace("12", "2") + said[1] + "<|im_end|>"
    messages = [question, {"role": "assistant", "content": call}, {"role": "tool", "content": "2"}]
    messages += [{"role": "assistant", "content": "2"}, {"role": "user", "content": "next 2"}]
    second = render(messages, add_generation_prompt=True, tools=tools) + said[2] + "<|im_end|>"
    second += "\n<|im_start|>user\nnext 1<|im_end|>\n<|im_start|>assistant\n" + said[3] + "<|im_end|>"
    assert rows == [first, second]


def test_a_message_of_the_system_that_deepseek_shows_before_the_conversation_is_refused():
    read, render = between_turns("deepseek_v3")
    turns = TurnTemplate(render, read, [read.eos_token_id])
    with pytest.raises(ConfigError, match="does not show those of the role system there"):
        turns.between([read.eos_token_id], True, [{"role": "system", "content": "Go on."}])
