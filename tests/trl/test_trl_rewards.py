"""The reward functions of `hwgrpo.trl.rewards` beside those of `trl.rewards`."""

import inspect
import itertools
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest

from hwgrpo.trl import GRPOConfig, GRPOTrainer, rewards
from tests.peers.answer_corpus import corpus
from tests.peers.peer_rewards import trl_reward
from tests.trl.tiny_chat_model import save_chat_model

MODULES = {
    "accuracy_reward": "accuracy_rewards",
    "reasoning_accuracy_reward": "accuracy_rewards",
    "get_cosine_scaled_reward": "accuracy_rewards",
    "think_format_reward": "format_rewards",
    "get_repetition_penalty_reward": "other_rewards",
    "get_soft_overlong_punishment": "other_rewards",
}
"""Function -> its module of trl.rewards."""
ANSWERS = [
    r"so \boxed{\frac{1}{2}}",
    r"$\frac{1}{2}$",
    "it is 0.5",
    r"\boxed{3}",
    r"<think>\boxed{0.5}</think> hence \boxed{1/2}",
    r"<think>a</think><think>b</think> $\frac{1}{2}$",
    r"<think>\boxed{\frac12}",
    "a <think>b</think>",
    "<think></think>",
    "",
    r"\boxed{50\%} of $x$",
    "</think><think>",
    r"</think>\boxed{1}</think>\boxed{0.5}",
]
SOLUTIONS = [r"$\frac{1}{2}$", "0.5", "in words"]


def messages(texts: list[str]) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


def compared(function: str, *made: Any, arguments: dict[str, Any]) -> list[float | None]:
    """Return the rewards of a function here, which those of TRL must equal; `made` makes the function first."""
    results, columns = [], []
    for module in (rewards, trl_reward(MODULES[function])):
        logged: dict[str, list[Any]] = {}
        call = getattr(module, function)
        call = call(*made) if made else call
        extra = {"log_extra": logged.__setitem__} if "log_extra" in inspect.signature(call).parameters else {}
        results.append(call(**arguments, **extra, unused=1))
        columns.append(logged)
    assert results[0] == results[1]
    assert columns[0] == columns[1]
    return results[0]


@pytest.mark.slow
def test_signatures_are_trls():
    for name, module in MODULES.items():
        ours, theirs = (
            [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]
            for function in (getattr(rewards, name), getattr(trl_reward(module), name))
        )
        assert ours == theirs


@pytest.mark.slow
def test_accuracies_are_trls():
    texts = [text for text in ANSWERS for _ in SOLUTIONS] + [each.response for each in corpus()[:60]]
    solutions = SOLUTIONS * len(ANSWERS) + [f"${each.truth}$" for each in corpus()[:60]]
    arguments = {"completions": messages(texts), "solution": solutions}
    for more in ({}, {"reasoning_delimiters": ["</r>", "</think>", "a"]}):
        assert {0.0, 1.0, None} == {*compared("reasoning_accuracy_reward", arguments=arguments | more)}
    assert {0.0, 1.0, None} == {*compared("accuracy_reward", arguments=arguments)}
    lengths = {"completion_ids": [[1] * (7 * number % 60) for number in range(len(texts))]}
    scaled = compared("get_cosine_scaled_reward", 40, -2.0, -1.0, 0.25, 3.0, arguments=arguments | lengths)
    assert len({*scaled}) > 20


@pytest.mark.slow
def test_formats_are_trls():
    parts = ("<think>", "</think>", "a\n", "")
    texts = ["".join(each) for each in itertools.product(parts, repeat=5)]
    assert {0.0, 1.0} == {*compared("think_format_reward", arguments={"completions": messages(texts)})}


@pytest.mark.slow
def test_penalties_are_trls():
    ids = [[number % period for number in range(length)] for length in range(40) for period in (1, 3, 50)]
    for size, most in ((1, -1.0), (3, -0.5), (8, 0.0)):
        compared("get_repetition_penalty_reward", size, most, arguments={"completion_ids": ids})
    for longest, buffer in ((30, 10), (20, 0), (50, 50)):
        compared("get_soft_overlong_punishment", longest, buffer, arguments={"completion_ids": ids})


def test_rewards_of_a_few_responses():
    texts = [r"<think>b</think> \boxed{\frac{1}{2}}", r"\boxed{3}", r"$\frac{1}{2}$"]
    logged: dict[str, list[Any]] = {}
    solution = ["0.5", "0.5", "words"]
    assert rewards.accuracy_reward(messages(texts), solution, logged.__setitem__) == [1.0, 0.0, None]
    assert logged["answer_parsed"][1:] == ["[3, '3']", "[skipped]"]
    assert rewards.accuracy_reward(texts, solution) == [1.0, 0.0, None]  # without messages, too
    assert rewards.reasoning_accuracy_reward(messages(texts), solution) == [1.0, 0.0, 0.0]
    assert rewards.think_format_reward(texts) == [1.0, 0.0, 0.0]
    assert rewards.get_soft_overlong_punishment(100, 20)([[1] * 80, [1] * 90, [1] * 101]) == [0.0, -0.5, -1.0]
    repeats = pickle.loads(pickle.dumps(rewards.get_repetition_penalty_reward(2)))
    assert repeats([[1, 2, 3, 4], [5] * 5, [5]]) == [0.0, -0.75, 0.0]
    scaled = rewards.get_cosine_scaled_reward(100)
    assert scaled(texts, solution, [[1] * 50, [1] * 200, [1]]) == [0.75, -0.5, None]
    with pytest.raises(ValueError, match="max_penalty=1"):
        rewards.get_repetition_penalty_reward(max_penalty=1)


def test_a_comparison_in_another_thread():
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(rewards.accuracy_reward([r"\boxed{2}"], ["2"])))
    thread.start()
    thread.join()
    assert found == [1.0]


def test_a_script_with_them_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_chat_model(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    small = {"per_device_train_batch_size": 2, "num_generations": 2, "max_completion_length": 4, "bf16": False}
    trainer = GRPOTrainer(
        "model",
        [rewards.accuracy_reward, rewards.think_format_reward, rewards.get_soft_overlong_punishment(4, 2)],
        GRPOConfig("out", **small, max_steps=1),
        [{"prompt": [{"role": "user", "content": "1+1"}], "solution": "$2$"}],
    )
    trainer.train()
    names = ("accuracy_reward", "think_format_reward", "soft_overlong_punishment_reward")
    assert {f"rewards/{name}/mean" for name in names} <= {*trainer.state.log_history[0]}
