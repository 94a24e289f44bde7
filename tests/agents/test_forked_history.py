"""Chat templates that rewrite earlier turns: trajectories fork into rows, and what is trained is what was sampled."""

from typing import Any

import pytest

from hwgrpo.config.schema import EnvironmentConfig, ProcessConfig, ToolConfig
from hwgrpo.errors import ConfigError, RunError
from hwgrpo.registry import Registry
from hwgrpo.rewards.response_steps import StepFinder
from hwgrpo.rewards.verifiable import length_reward
from hwgrpo.rewards.verifiers.repetition import repeated_share, repetition
from hwgrpo.rollout.workflow import Sampler, Trajectory
from hwgrpo.rollout.workflow_engine import WorkflowEngine
from hwgrpo.values import Prompt, PromptBatch, Sampling
from tests.agents.recorded_turns import (
    assert_forks,
    assert_log_probs_are_those_of_a_plain_forward,
    assert_what_is_trained_was_sampled,
    play,
)
from tests.agents.scripted import ScriptedEngine, agent_engine, agent_rows, chat_tokenizer, prompts_of
from tests.agents.test_trained_tokens import merging_tokenizer
from tests.support.models.trajectories import rows_of

LAST_USER = (
    "{% set at = namespace(user=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set at.user = loop.index0 %}{% endif %}{% endfor %}"
)


def drops(ends_reasoning: str, opens: str = "<|open|>", closes: str = "<|close|>\n") -> str:
    """Return a template that drops what a turn has up to `ends_reasoning` once a message of the user follows it."""
    return (
        f"{LAST_USER}{{% for m in messages %}}{opens}{{{{ m.role }}}}:"
        f"{{% if m.role == 'assistant' and loop.index0 < at.user %}}{{{{ m.content.split('{ends_reasoning}')[-1] }}}}"
        f"{{% else %}}{{{{ m.content }}}}{{% endif %}}{closes}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{opens}assistant:{{% endif %}}"
    )


REASONING = drops("</think>", "[", "<eos>")


def forked(monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    tokenizer = merging_tokenizer()
    tokenizer.chat_template = drops("e")
    ends = [tokenizer.convert_tokens_to_ids(token) for token in ("<|close|>", "<|stop|>")]
    return play(tokenizer, ends, monkeypatch, often=tokenizer.convert_tokens_to_ids(["e"]), **options)


@pytest.mark.parametrize(
    "way", [{}, {"tools": True}, {"sessions": False}, {"asynchronous": True}], ids=["", "tools", "no session", "async"]
)
def test_what_is_trained_was_sampled_after_the_history_that_the_template_writes(way, monkeypatch):
    found = forked(monkeypatch, **way)
    assert_what_is_trained_was_sampled(found)
    assert_log_probs_are_those_of_a_plain_forward(found)
    rows = assert_forks(found, "e")
    assert {1, 2, 3} <= set(rows)
    turns = [len(each["turn_rewards"]) for each in found.completions.outcomes]
    assert any(1 < count < turns[i] for i, count in enumerate(rows)), "some turns append, some fork"


def test_the_limit_of_tokens_is_that_of_each_row(monkeypatch):
    room = 100
    found = forked(monkeypatch, room=room)
    assert_what_is_trained_was_sampled(found)
    assert_log_probs_are_those_of_a_plain_forward(found)
    longest = found.completions.longest_rows.tolist()
    assert max(longest) <= room < int(found.completions.lengths.max())
    assert {each["stop"] for each in found.completions.outcomes} == {"done", "length"}


def says(*turns: str) -> Any:
    """Return a policy that answers the n-th message of the user with the n-th turn."""
    return lambda read: turns[min(read.count("[user:"), len(turns)) - 1]


class Counts:
    def reset(self, row: Any) -> None:
        self.left = int(row["turns"])

    def step(self, action: Any) -> Any:
        self.left -= 1
        return f"next {self.left}", 1.0, self.left == 0


def counted(monkeypatch: pytest.MonkeyPatch, turn: Any, turns: int, template: str = REASONING, **sampling: Any) -> Any:
    """Return the trajectories of an environment, their prompts, and the engine."""
    registry = Registry("environment", {})
    registry._own["counts"] = Counts
    monkeypatch.setattr("hwgrpo.agents.environments.ENVIRONMENTS", registry)
    agent = {"environments": [EnvironmentConfig("counts")]}
    tokenizer = chat_tokenizer(template)
    engine = agent_engine(turn, tokenizer, "environment", **agent)
    prompts = prompts_of(
        agent_rows([{"prompt": [{"role": "user", "content": "begin"}], "turns": turns}], **agent), tokenizer
    )
    return engine.generate(prompts, Sampling(**{"n": 1, "max_response_tokens": 200} | sampling)), prompts, engine


def row_texts(prompts: PromptBatch, done: Any, tokenizer: Any) -> list[str]:
    """Return what the model has read and sampled in each row of the one trajectory."""
    rows = rows_of(prompts, done, 0)
    return [tokenizer.decode([*before, *done.tokens[start:end].tolist()]) for before, start, end in rows]


@pytest.mark.parametrize("turns", [1, 2, 3, 4])
def test_each_turn_with_reasoning_begins_a_row_with_the_history_without_it(turns, monkeypatch):
    said = [f"<think>hm {i}</think>{i}" for i in range(turns)]
    done, prompts, engine = counted(monkeypatch, says(*said), turns)
    tokenizer = engine._tokenizer
    assert any("leaves out the reasoning of a turn when messages of the roles user follow" in n for n in engine.notes)
    prompt = "[user:begin<eos>[assistant:"
    history = prompt
    texts = [
        tokenizer.decode([*before, *done.tokens[start:end].tolist()])
        for before, start, end in rows_of(prompts, done, 0)
    ]
    for i, (text, turn) in enumerate(zip(texts, said, strict=True)):
        assert text == f"{history}{turn}<eos>"
        history += f"{i}<eos>[user:next {turns - i - 1}<eos>[assistant:"
    assert (
        done.loss_mask is None
        if turns == 1
        else tokenizer.decode(done.tokens[done.loss_mask]) == "".join(f"{turn}<eos>" for turn in said)
    )
    observed = [f"[user:next {turns - i - 1}<eos>[assistant:" for i in range(turns - 1)]
    joined = said[0] + "".join(f"{new}{turn}" for new, turn in zip(observed, said[1:], strict=True))
    assert done.texts == (joined.replace("<eos>", ""),), "rewards see each turn and each observation once"
    assert [tokenizer.decode(tokens) for tokens in done.new_tokens()] == ["".join(f"{turn}<eos>" for turn in said)]
    assert done.turn_ends()[0] == [i for i, end in enumerate(done.tokens.tolist()) if _is_end(done, i)]


def _is_end(done: Any, place: int) -> bool:
    """Return whether a sampled token is the last of its turn, which each ends with <eos>."""
    sampled = done.loss_mask is None or bool(done.loss_mask[place])
    return sampled and int(done.tokens[place]) == int(done.tokens[-1])


def test_turns_without_reasoning_append_under_the_same_template(monkeypatch):
    done, prompts, engine = counted(monkeypatch, says("1", "2", "<think>a</think>3", "4"), 4)
    texts = row_texts(prompts, done, engine._tokenizer)
    kept = "[user:begin<eos>[assistant:1<eos>[user:next 3<eos>[assistant:2<eos>[user:next 2<eos>[assistant:"
    assert texts == [f"{kept}<think>a</think>3<eos>", f"{kept}3<eos>[user:next 1<eos>[assistant:4<eos>"]


def test_a_history_that_does_not_fit_into_a_row_ends_the_trajectory_as_truncated(monkeypatch):
    said = [f"<think>{'m' * 30}</think>{'n' * 25}" for _ in range(4)]
    done, prompts, _ = counted(monkeypatch, says(*said), 4, max_response_tokens=120)
    assert done.outcomes[0]["stop"] == "length"
    assert done.finished.tolist() == [False]
    assert len(rows_of(prompts, done, 0)) == 2
    assert int(done.longest_rows[0]) <= 120


EVERY_END = drops("never", "[", "{% if loop.last %}!{% endif %}<eos>")


def test_a_template_that_ends_each_turn_otherwise_once_another_follows_forks_at_every_turn(monkeypatch):
    done, prompts, engine = counted(monkeypatch, says("1!", "2!", "3!"), 3, EVERY_END)
    assert any("shows a turn of the policy differently" in note for note in engine.notes)
    texts = row_texts(prompts, done, engine._tokenizer)
    assert texts[0] == "[user:begin!<eos>[assistant:1!<eos>"
    assert texts[1] == "[user:begin<eos>[assistant:1!<eos>[user:next 2!<eos>[assistant:2!<eos>"
    assert done.row_starts is not None
    kept = len("[user:begin")
    assert [each for each in done.row_starts.tolist() if each >= 0] == [kept, kept], "the prompt as far as it is kept"


def test_a_history_that_does_not_begin_as_the_prompt_fails_the_trajectory_by_name(monkeypatch):
    moves = "{% if messages | length > 1 %}={% endif %}" + REASONING
    done, *_ = counted(monkeypatch, says("<think>a</think>1"), 3, moves)
    [outcome] = done.outcomes
    assert outcome["stop"] == "failed"
    assert "begins otherwise than the prompt 0:0" in outcome["failure"]
    assert done.row_starts is None


def test_tools_whose_results_are_messages_of_the_user_fork_too():
    refuses = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no') }}{% endif %}["
    template = REASONING.replace("{% for m in messages %}[", refuses)
    engine = agent_engine(
        lambda read: "8" if "[user:" in read[1:] else "<think>a</think><tool_call>1</tool_call>",
        chat_tokenizer(template),
        "tools",
        tools=[ToolConfig("calculator")],
    )
    assert sum("roles user follow" in note for note in engine.notes) == 1


def sampled_by(
    workflow: Any, template: str = REASONING, messages: Any = ({"role": "user", "content": "begin"},)
) -> Any:
    """Return the trajectory of a workflow of one's own, and the inputs of the engine."""
    found: list[Trajectory] = []

    async def run(prompt: Prompt, sampler: Sampler) -> list[Trajectory]:
        found.append(sampler.trajectory())
        await workflow(found[0], sampler)
        return found

    tokenizer = chat_tokenizer(template)
    samples = ScriptedEngine(tokenizer, lambda read: "<think>a</think>1")
    turns = agent_engine(lambda read: "", tokenizer)._turns
    engine: Any = WorkflowEngine(samples, run, "w.py:run", tokenizer, 20.0, turns)
    text = "[user:begin<eos>[assistant:"
    ids = tuple(tokenizer.encode(text, add_special_tokens=False))
    prompt = Prompt("0:0", text, ids, None, {}, messages=messages)
    done = engine.generate(PromptBatch((prompt,)), Sampling(n=1, max_response_tokens=100))
    return found[0], done, [tokenizer.decode(each) for each in samples.inputs]


NEXT = [{"role": "user", "content": "go on"}]


def test_a_workflow_of_ones_own_forks_by_messages_and_by_tokens():
    async def workflow(trajectory: Trajectory, sampler: Sampler) -> None:
        await sampler.sample(trajectory)
        sampler.observe(trajectory, NEXT)
        await sampler.sample(trajectory)
        trajectory.fork([], "")
        await sampler.sample(trajectory)
        trajectory.fork(sampler.encode("summary"), "", prompt_tokens=5)
        await sampler.sample(trajectory)

    trajectory, done, inputs = sampled_by(workflow)
    prompt = "[user:begin<eos>[assistant:"
    assert inputs == [prompt, f"{prompt}1<eos>[user:go on<eos>[assistant:", prompt, "[usersummary"]
    assert [segment.row for segment in trajectory.segments if segment.row is not None] == [23, 23, 5]
    assert done.turn_ends()[0][-1] == len(done.tokens) - 1
    assert len(done.turn_ends()[0]) == 4, "a row without a history is a turn of its own"
    assert len(done.row_bounds()[1]) == 4


def test_histories_that_cannot_be_written_anew_are_refused_by_name():
    async def observes(trajectory: Trajectory, sampler: Sampler) -> None:
        await sampler.sample(trajectory)
        sampler.observe(trajectory, NEXT)

    async def mixes(trajectory: Trajectory, sampler: Sampler) -> None:
        await sampler.sample(trajectory)
        trajectory.observe([5], "a")
        await sampler.sample(trajectory)
        sampler.observe(trajectory, NEXT)

    async def begins(trajectory: Trajectory, sampler: Sampler) -> None:
        trajectory.fork([5], "", prompt_tokens=0)

    why = r"shows a turn of the policy differently .*prompt 0:0 or what follows it is no conversation.*Trajectory\.fork"
    with pytest.raises(ConfigError, match=why):
        sampled_by(observes, EVERY_END, messages=None)
    with pytest.raises(ConfigError, match=why):
        sampled_by(mixes, EVERY_END)
    with pytest.raises(RunError, match=r"fork\(prompt_tokens=0\): a row begins with 1 to"):
        sampled_by(begins)


def test_rewards_by_length_see_the_longest_row_and_steps_of_a_text_are_refused(monkeypatch):
    said = [f"<think>{'hm' * (i + 1)}</think>{i}" for i in range(3)]
    done, prompts, engine = counted(monkeypatch, says(*said), 3)
    longest = max(end - start for _, start, end in rows_of(prompts, done, 0))
    assert longest < len(done.tokens)
    assert length_reward(prompts, done, max_response_tokens=longest + 10, buffer=20) == [-0.5]
    new = "".join(f"{turn}<eos>" for turn in said)
    tokens = engine._tokenizer.encode(new, add_special_tokens=False)
    assert repetition(prompts, done) == [-repeated_share(tokens, 3)] != [0.0]
    finder = StepFinder(ProcessConfig(), engine._tokenizer)
    with pytest.raises(ConfigError, match=r"process\.steps=text: .*several rows.*set algorithm\.process\.steps=turns"):
        finder.all_token_ends(done)
