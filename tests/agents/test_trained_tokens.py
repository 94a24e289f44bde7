"""What agents train is what the engine sampled, and what the model reads is prompt, turns and the messages between."""

from functools import cache
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hwgrpo.rollout.workflow import Sampler, Trajectory
from tests.agents.recorded_turns import (
    OBSERVED,
    assert_what_is_trained_was_sampled,
    assert_what_was_read_is_prompt_turns_and_messages,
    check,
    play,
)
from tests.rollout.test_turn_template import MARKERS, TEMPLATES

NAMES = ("markers around every message", "results within one message of the user", "calls in place of the content")


@cache
def merging_tokenizer() -> Any:
    """Return a tokenizer of bytes, pairs and words, in which one text has many sequences of tokens."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=[*MARKERS], initial_alphabet=alphabet)
    core.train_from_iterator(
        [*OBSERVED, "user assistant tool content question answer 0123456789 + calculator"] * 4, trainer
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|close|>")


def played(name: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    tokenizer = merging_tokenizer()
    tokenizer.chat_template = TEMPLATES[name]
    ends = [tokenizer.convert_tokens_to_ids(token) for token in ("<|close|>", "<|stop|>")]
    return play(tokenizer, ends, monkeypatch, **options)


@pytest.mark.parametrize("tools", [False, True], ids=["environment", "tools"])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_that_are_trained_and_read(name, tools, monkeypatch):
    found = played(name, monkeypatch, tools=tools, family="qwen3" if tools else "llama")
    check(found)
    ends = {call.tokens[-1] in found.ends for call in found.calls}
    assert ends == {True, False}  # turns that the policy ended, and turns that the limit did
    turns = {len(each["turn_rewards"]) for each in found.completions.outcomes}
    assert len(turns) > 1
    assert max(turns) == 6
    roles = {message["role"] for each in found.completions.outcomes for message in each["messages"]}
    assert roles == {"assistant", "user", *["tool"] * tools}


@pytest.mark.parametrize("way", [{"sessions": False}, {"asynchronous": True}], ids=["no session", "asynchronous"])
def test_tokens_that_are_trained_and_read_by_other_ways_to_sample(way, monkeypatch):
    check(played(NAMES[1], monkeypatch, tools=True, **way))


def test_tokens_of_trajectories_that_are_cut(monkeypatch):
    found = played(NAMES[0], monkeypatch, room=90)
    check(found)
    assert {each["stop"] for each in found.completions.outcomes} == {"done", "length"}


def retokenized(tokenizer: Any, tokens: Any) -> list[int]:
    return tokenizer.encode(tokenizer.decode(tokens), add_special_tokens=False)


@pytest.mark.parametrize("name", NAMES)
def test_a_conversation_that_is_tokenized_anew_each_turn_is_noticed(name, monkeypatch):
    plain: Any = Trajectory.token_ids.fget
    monkeypatch.setattr(Trajectory, "token_ids", property(lambda self: retokenized(merging_tokenizer(), plain(self))))
    found = played(name, monkeypatch)
    with pytest.raises(AssertionError):
        assert_what_was_read_is_prompt_turns_and_messages(found)


@pytest.mark.parametrize("name", NAMES)
def test_turns_that_are_tokenized_anew_are_noticed(name, monkeypatch):
    plain = Sampler.observe

    def observe(self: Any, trajectory: Any, messages: Any, **turn: Any) -> None:
        last = trajectory.segments[-1]
        tokens = last.columns.tokens
        changed = retokenized(merging_tokenizer(), tokens)
        tokens[:] = tokens.new_tensor((changed * len(tokens))[: len(tokens)])
        plain(self, trajectory, messages, **turn)

    monkeypatch.setattr(Sampler, "observe", observe)
    found = played(name, monkeypatch)
    with pytest.raises(AssertionError):
        assert_what_is_trained_was_sampled(found)
