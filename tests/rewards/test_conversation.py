"""Prompts and responses as rewards by models read them."""

import pytest

from hwgrpo.rewards.conversation import conversation, prompt_text
from hwgrpo.values import Prompt

USER = {"role": "user", "content": "2+2?"}
PARTS = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]


def prompt(*messages) -> Prompt:
    return Prompt("0", "text", (1,), None, {}, "s", "row 1", messages or None)


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ((), [{"role": "user", "content": "text"}, {"role": "assistant", "content": "4"}]),
        ((USER,), [USER, {"role": "assistant", "content": "4"}]),
        ((USER, {"role": "assistant", "content": "It is "}), [USER, {"role": "assistant", "content": "It is 4"}]),
        ((USER, {"role": "assistant", "content": PARTS}), [USER, {"role": "assistant", "content": "2+2?4"}]),
        ((USER, {"role": "assistant", "content": None}), [USER, {"role": "assistant", "content": "4"}]),
    ],
)
def test_a_response_is_one_message_with_the_beginning_that_the_prompt_gives_it(messages, expected):
    assert conversation(prompt(*messages), "4") == expected


def test_the_text_of_a_prompt_is_that_of_its_parts():
    assert prompt_text(prompt({"role": "user", "content": PARTS})) == "2+2?"
    assert prompt_text(prompt({"role": "system", "content": "be brief"}, {"role": "user", "content": PARTS})) == (
        "system: be brief\n\nuser: 2+2?"
    )


def test_images_are_named_in_the_text_that_models_of_rewards_read():
    parts = [{"type": "image"}, {"type": "text", "text": "What is it?"}]
    seen = Prompt("0", "", (1,), None, {}, messages=({"role": "user", "content": parts},))
    assert conversation(seen, "A cat.")[0] == {"role": "user", "content": "[image]What is it?"}
    assert prompt_text(seen) == "[image]What is it?"
