"""Trajectories in the chat templates of published models: what is trained is what was sampled, token by token."""

from typing import Any

import pytest

from hwgrpo.errors import ConfigError
from hwgrpo.rollout.turn_template import TurnTemplate
from hwgrpo.rollout.workflow import Trajectory
from tests.agents.recorded_turns import (
    assert_what_was_read_is_prompt_turns_and_messages,
    check,
    play,
)
from tests.real.test_published_tokenizers import WITH_TEMPLATE, between_turns

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


def test_a_message_of_the_system_that_deepseek_shows_before_the_conversation_is_refused():
    read, render = between_turns("deepseek_v3")
    turns = TurnTemplate(render, read, [read.eos_token_id])
    with pytest.raises(ConfigError, match="does not show those of the role system there"):
        turns.between([read.eos_token_id], True, [{"role": "system", "content": "Go on."}])
