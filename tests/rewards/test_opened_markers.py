"""Markers that a prompt leaves open, as chat templates of reasoning models do, count as the response's."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hwgrpo.errors import ConfigError
from hwgrpo.rewards.combine import RewardPipeline
from hwgrpo.rewards.response_text import continued, opened_markers
from hwgrpo.rewards.verifiable import format_reward
from hwgrpo.rewards.verifiers.regular_expression import regex
from hwgrpo.rewards.verifiers.tag_counts import tags
from hwgrpo.values import PromptBatch

CLOSED = "2 + 2</think>\n<answer>4</answer>"
FULL = "<think>" + CLOSED


@pytest.mark.parametrize(
    ("prompt", "opened"),
    [
        ("<|im_start|>assistant\n<think>\n", "<think>\n"),
        ("<｜Assistant｜><think>\n", "<think>\n"),
        ("<|user|>hi<|assistant|><think>", "<|assistant|><think>"),
        ("[/INST][THINK]", "[THINK]"),
        ("a◁think▷", "◁think▷"),
        ("<think>\n\n</think>\n\n", ""),
        ("<think> about 1 <", ""),
        ("is 3 < 4 or 4 > 3", ""),
        ("", ""),
        ("<think>" + " " * 1000, ""),
    ],
)
def test_the_markers_that_a_prompt_leaves_open(prompt: str, opened: str):
    assert opened_markers(prompt) == opened


@given(st.text(max_size=80))
def test_opened_markers_are_the_end_of_the_prompt(text: str):
    for prompt in (text, text + "<think>"):
        assert prompt.endswith(opened_markers(prompt))
    assert opened_markers(text + "<think>\n").endswith("<think>\n")


def test_a_response_is_read_behind_the_markers_that_a_rule_names():
    assert continued("x", "<|assistant|><think>\n", ["<think>"]) == "<think>\nx"
    assert continued("x", "<|assistant|><think>\n", ["<plan>"]) == "x"
    assert continued("x", "<|think|>", r"<\|think\|>.*") == "<|think|>x"
    assert continued("x", "", ["<think>"]) == "x"


def test_format_tags_and_patterns_count_the_opened_marker_once():
    for response, opened, reward in ((CLOSED, "<think>\n", 1), (CLOSED, "", 0), (FULL, "<think>\n", 0), (FULL, "", 1)):
        assert format_reward(response, opened_markers=opened) == reward
        assert format_reward(response, pattern=r"<think>(?!.*<think>).*</think>.*", opened_markers=opened) == reward
        assert regex(response, None, r"\A<think>(?!.*<think>).*</think>", opened_markers=opened) == reward
        assert tags(response, opened_markers=opened) == 0.75 + 0.25 * reward
    assert format_reward("4</plan>", tags=["plan"], opened_markers="<think>\n<plan>") == 1
    assert format_reward("ab", pattern="[a-z]+", opened_markers="<think>") == 1


def scored(pipeline, batch, text):
    prompts, completions = batch
    [prompt] = prompts.prompts
    return pipeline.score(PromptBatch((type(prompt)(**{**vars(prompt), "text": text}),)), completions).total.tolist()


def test_the_trainer_passes_the_markers_to_the_functions_that_name_them(reward_config, make_batch, pipeline):
    """A template that ends with <think> made the reward `format` 0 for every response."""
    batch = make_batch([[CLOSED, FULL]])
    rewards = RewardPipeline(reward_config({"name": "format"}, {"name": "tags", "weight": 10}))
    assert scored(rewards, batch, "<|assistant|>\n<think>\n") == [11, 7.5]
    assert scored(rewards, batch, "2 + 2 =") == [7.5, 11]
    functions = """
        def f(solution_str, opened_markers):
            return len(opened_markers)

        def g(solution_str, **others):
            return float("opened_markers" in others)
        """
    assert scored(pipeline(functions), batch, "a <plan>") == [6, 6]
    assert scored(pipeline(functions, name="g"), batch, "a <plan>") == [0, 0]
    with pytest.raises(ConfigError, match="the trainer passes 'opened_markers'"):
        RewardPipeline(reward_config({"name": "format", "kwargs": {"opened_markers": "<think>"}}))


def test_functions_in_processes_get_the_markers_too(make_batch, pipeline):
    own = pipeline("def f(solution_str, opened_markers): return len(opened_markers)", timeout=60)
    assert scored(own, make_batch([["a"]]), "a <plan>") == [6]
