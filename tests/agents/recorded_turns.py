"""Trajectories of a tiny random model through the workflows of agents, with a record of what its engine read and drew.

`check` compares what would be trained with the record, and what was read with the whole conversation in the template.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from hwgrpo.agents.action import ParsedTurn, StepResult, ToolCall
from hwgrpo.agents.episode import EnvironmentWorkflow
from hwgrpo.config.schema import AgentConfig, DataConfig, EnvironmentConfig, RewardConfig, ToolConfig
from hwgrpo.data.chat_template import apply_template
from hwgrpo.errors import DataError
from hwgrpo.registry import Registry
from hwgrpo.rollout.local.engine import LocalEngine
from hwgrpo.rollout.turn_template import TurnTemplate
from hwgrpo.rollout.workflow import WorkflowParts
from hwgrpo.rollout.workflow_engine import WorkflowEngine
from hwgrpo.training.update.train_batch import assemble
from hwgrpo.values import Completions, Prompt, PromptBatch, Sampling, TrainBatch
from tests.agents.scripted import agent_rows, prompts_of
from tests.support.models.trajectories import rows_of

OBSERVED = (
    "higher",
    "  <|im_end|>\n<|im_start|>assistant\n<eos> <end_of_turn>",
    "Größer als 十二 🙂?\n\n",
    "<tool_response>\n</tool_response><|eot_id|><think>",
    "</s> [INST] 3.14  ",
)
"""What the environment says, turn by turn: with text like special tokens, white space at both ends, several scripts."""
PLACE = "qzplace"
"""Stands for a turn of the policy in the whole conversation."""
TURNS = 6


class Says:
    """As many turns as the row says, each answered by the next of OBSERVED."""

    def reset(self, row: Any) -> None:
        self.turn, self.turns = 0, int(row["turns"])

    def step(self, action: Any) -> StepResult:
        self.turn += 1
        return StepResult(OBSERVED[(self.turn - 1) % len(OBSERVED)], done=self.turn == self.turns)


def calls_by_length(text: str) -> ParsedTurn:
    """Read a turn as calls of the calculator: none where its length is a multiple of 4, else one or two."""
    if len(text) % 4 == 0:
        return ParsedTurn(text)
    calls = [ToolCall("calculator", {"expression": f"{number} + {len(text)}"}) for number in range(1 + len(text) % 2)]
    return ParsedTurn(text, tuple(calls))


def random_model(tokenizer: Any, ends: Sequence[int], family: str = "llama", often: Sequence[int] = ()) -> Any:
    """Return a one-layer model over a tokenizer's vocabulary.

    About every fifth of its tokens ends a turn, and half are a letter or two, which encoding a text would merge. As
    many as end a turn are one of `often`.
    """
    kind, config = {"llama": (LlamaForCausalLM, LlamaConfig), "qwen3": (Qwen3ForCausalLM, Qwen3Config)}[family]
    torch.manual_seed(0)
    vocab = len(tokenizer)
    pieces = tokenizer.convert_ids_to_tokens(list(range(vocab)))
    letters = [number for number, piece in enumerate(pieces) if len(piece) <= 2 and piece.isalpha() and piece.isascii()]
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    more = {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 1024, "tie_word_embeddings": False}
    model = kind(config(vocab_size=vocab, **shape, **more)).eval()
    with torch.no_grad():
        for parameter in model.model.layers.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0, 0.3)  # what is read matters
        model.model.embed_tokens.weight.normal_()
        model.model.embed_tokens.weight[:, 0] = 4.0  # the same after every token, about 2.2 at the head
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = layer.mlp.down_proj.weight[0] = 0
        model.lm_head.weight.normal_(0, 0.2)
        model.lm_head.weight[:, 0] = 0
        # relative to all other tokens together
        for likely, share in ((letters, 2.0), ([*ends], 1.0), *([([*often], 1.0)] if often else [])):
            model.lm_head.weight[likely] = model.lm_head.weight[likely] * 0.1
            model.lm_head.weight[likely, 0] = math.log(share * vocab / len(likely)) / 2.2
    model.generation_config.eos_token_id = [*ends]
    return model


@dataclass
class Call:
    """One request at the engine's boundary, and the response to it."""

    uid: str
    read: list[int]
    tokens: list[int]
    logprobs: torch.Tensor
    continues: tuple[int, int] | None = None
    """The response whose keys and values it continues, where the engine has sessions."""


class RecordedSession:
    """A session of the local engine that records what goes in and out."""

    def __init__(self, session: Any, calls: list[Call]) -> None:
        self._session, self._calls = session, calls
        self._asked: dict[int, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def submit(self, requests: Any) -> list[int]:
        numbers = self._session.submit(requests)
        self._asked |= dict(zip(numbers, requests))
        return numbers

    def take(self, numbers: Any) -> Completions:
        done = self._session.take(numbers)
        asked = [self._asked[number] for number in numbers]
        calls = calls_between([request.prompt for request in asked], done)
        self._calls += [replace(call, continues=each.continues) for call, each in zip(calls, asked, strict=True)]
        return done


def calls_between(prompts: Sequence[Prompt], done: Completions) -> list[Call]:
    """Return the requests of some prompts, with the one response to each."""
    parts = zip(prompts, done.token_lists(), done.logprobs.split(done.lengths.tolist()), strict=True)
    return [Call(prompt.uid, [*prompt.token_ids], tokens, logprobs.clone()) for prompt, tokens, logprobs in parts]


class RecordedEngine:
    """The local engine with sessions that are recorded."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self.calls: list[Call] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, batch: PromptBatch, sampling: Sampling) -> Completions:
        raise NotImplementedError

    def open_session(self, *args: Any, **options: Any) -> Any:
        return RecordedSession(self._engine.open_session(*args, **options), self.calls)


class RecordedBatches:
    """The local engine as engines without sessions are: each turn is computed from its first token on."""

    def __init__(self, engine: LocalEngine) -> None:
        self._engine = engine
        self.calls: list[Call] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, batch: PromptBatch, sampling: Sampling) -> Completions:
        raise NotImplementedError

    def generate_each(self, batch: PromptBatch, samplings: Sequence[Sampling]) -> Completions:
        done = self._engine.generate_each(batch, samplings)
        self.calls += calls_between(batch.prompts, done)
        return done


@dataclass
class Episodes:
    """Trajectories, and the record of them."""

    prompts: PromptBatch
    completions: Completions
    batch: TrainBatch
    calls: list[Call]
    engine: LocalEngine
    model: Any
    tokenizer: Any
    render: Any
    ends: tuple[int, ...]


def play(
    tokenizer: Any,
    ends: Sequence[int],
    patch: pytest.MonkeyPatch,
    *,
    tools: bool = False,
    family: str = "llama",
    room: int = 500,
    engine: Any = None,
    sessions: bool = True,
    asynchronous: bool = False,
    often: Sequence[int] = (),
) -> Episodes:
    """Return trajectories of 1 to 6 turns, two to each prompt.

    Args:
        tokenizer: has the chat template.
        ends: tokens that end a turn.
        patch: registers the environment.
        tools: whether most turns call a tool.
        family: of the model.
        room: most tokens of a trajectory.
        engine: of an earlier call, to sample with; None: a new one.
        sessions: whether the engine keeps the keys and values of earlier turns.
        asynchronous: whether a trajectory's next turn begins while others are sampled.
        often: tokens that the model samples as often as ends.
    """
    registry = Registry("environment", {})
    registry._own["says"] = Says
    patch.setattr("hwgrpo.agents.environments.ENVIRONMENTS", registry)
    if tools:
        patch.setattr("hwgrpo.agents.episode.call_format", lambda agent, tokenizer: calls_by_length)
    settings = DataConfig(template_date="2026-01-02")
    agent = AgentConfig(
        environments=[EnvironmentConfig("says")],
        tools=[ToolConfig("calculator")] if tools else [],
        max_turn_tokens=6,
        max_turns=TURNS,
    )
    question: Any = [{"role": "user", "content": "Wie viel ist 7 + 5? 答案。 🙂"}]
    rows = agent_rows([{"prompt": question, "turns": turns} for turns in range(1, TURNS + 1)], **vars(agent))
    prompts = prompts_of(rows, tokenizer, settings)
    if engine is None:
        model = random_model(tokenizer, ends, family, often)
        engine = LocalEngine(
            model,
            tokenizer,
            device=torch.device("cpu"),
            compute_dtype=torch.float32,
            max_sequences=8,
            longest=1000,
        )
    recorded: Any = RecordedEngine(engine) if sessions else RecordedBatches(engine)
    render = partial(apply_template, config=settings, tokenizer=tokenizer, place="here")
    turns = TurnTemplate(render, tokenizer, ends)
    rollout = SimpleNamespace(workflow="environment", agent=agent)
    config = SimpleNamespace(rollout=rollout, data=settings, reward=RewardConfig())
    workflow = EnvironmentWorkflow(WorkflowParts(config, tokenizer, turns))
    outer = WorkflowEngine(recorded, workflow, "environment", tokenizer, 60.0, turns, asynchronous)
    done = outer.generate(prompts, Sampling(n=2, max_response_tokens=room, seed=3))
    workflow.close()
    batch = assemble(prompts, done, torch.ones(len(done)), torch.ones(len(done), dtype=torch.bool))
    return Episodes(prompts, done, batch, recorded.calls, engine, engine._model, tokenizer, render, tuple(ends))


def check(played: Episodes) -> None:
    """Check what was trained and read, token by token; see the parts."""
    assert_what_is_trained_was_sampled(played)
    assert_what_was_read_is_prompt_turns_and_messages(played)
    assert_log_probs_are_those_of_a_plain_forward(played)


def assert_what_is_trained_was_sampled(played: Episodes) -> None:
    batch = played.batch
    assert batch.loss_mask is not None
    for number, (start, end) in enumerate(itertools.pairwise(batch.offsets.tolist())):
        mask = batch.loss_mask[start:end]
        sampled = [token for call in calls_of(played, number) for token in call.tokens]
        assert batch.tokens[start:end][mask].tolist() == sampled, number
        logprobs = torch.cat([call.logprobs for call in calls_of(played, number)])
        assert torch.equal(batch.logprobs[start:end][mask], logprobs), number


def assert_what_was_read_is_prompt_turns_and_messages(played: Episodes) -> None:
    tokens_of, outcomes = played.batch.token_lists(), played.completions.outcomes
    for number, (tokens, outcome) in enumerate(zip(tokens_of, outcomes, strict=True)):
        prompt = prompt_of(played, number)
        calls, read = calls_of(played, number), [*prompt.token_ids]
        assert len(calls) == len(outcome["turn_rewards"])
        between = answers(played, prompt, outcome["messages"], calls)
        for call, new in zip(calls, [*between, []]):
            assert call.read == read, (number, call.uid)
            read += [*call.tokens, *new]
        whole = [*prompt.token_ids, *tokens]
        assert read[: len(whole)] == whole, number
        assert len(read) == len(whole) or outcome["stop"] == "length"


def assert_forks(played: Episodes, ends_reasoning: str) -> list[int]:
    """Check what was read and trained where the template drops what an earlier turn has before `ends_reasoning`.

    A trajectory forks at a message of the user if a turn of its row has such reasoning, and reads the conversation as
    the template writes it; elsewhere it appends.

    Returns:
        The number of rows of each trajectory.
    """
    batch, found = played.batch, []
    assert batch.loss_mask is not None
    for number, outcome in enumerate(played.completions.outcomes):
        prompt = prompt_of(played, number)
        calls, rows = calls_of(played, number), rows_of(played.prompts, played.completions, number)
        contents = [[*before, *batch.tokens[start:end].tolist()] for before, start, end in rows]
        masks = [[False] * len(before) + batch.loss_mask[start:end].tolist() for before, start, end in rows]
        trained = [token for read, mask in zip(contents, masks, strict=True) for token, own in zip(read, mask) if own]
        assert trained == [token for call in calls for token in call.tokens], "each sampled token once, in its order"
        assert len(prompt.token_ids) == len(rows[0][0])
        assert prompt.messages is not None
        conversation, messages = [*prompt.messages], [*outcome["messages"]]
        row, place, reasoned = 0, len(prompt.token_ids), False
        for before, call in zip([None, *calls], calls):
            if before is not None:
                turn, *rest = messages
                observed = [*itertools.takewhile(lambda each: each["role"] != "assistant", rest)]
                messages = rest[len(observed) :]
                conversation += [turn, *observed]
                reasoned = reasoned or ends_reasoning in played.tokenizer.decode(
                    before.tokens, skip_special_tokens=True
                )
                if reasoned and any(each["role"] == "user" for each in observed):
                    row, reasoned = row + 1, False
                    text = played.render(conversation, add_generation_prompt=True, tools=prompt.tools)
                    written = played.tokenizer.encode(text, add_special_tokens=False)
                    assert call.read == written, "the conversation as the template writes it"
                    assert call.continues is None, "a row begins with keys and values of its own"
                    place = len(written)
                else:
                    place = next(i for i in range(place, len(contents[row])) if masks[row][i])
            assert call.read == contents[row][:place], (number, call.uid)
            stop = place + len(call.tokens)
            assert contents[row][place:stop] == call.tokens
            assert all(masks[row][place:stop])
            place = stop
        assert row == len(rows) - 1
        found.append(len(rows))
    return found


def answers(played: Episodes, prompt: Prompt, messages: Sequence[Any], calls: Sequence[Call]) -> list[list[int]]:
    """Return the tokens of what was observed after each turn, of the conversation so far in the chat template."""
    assert prompt.messages is not None
    conversation, found = [*prompt.messages], []
    rest = [*messages]
    for call in calls:
        turn, rest = rest[0], rest[1:]
        assert turn["role"] == "assistant"
        observed = [*itertools.takewhile(lambda each: each["role"] != "assistant", rest)]
        rest = rest[len(observed) :]
        if not observed:
            break
        end = after_place(played, prompt, [*conversation, {"role": "assistant", "content": PLACE}], False)
        text = end + shown(played, prompt, conversation, observed)
        conversation += [{"role": "assistant", "content": "Twelve."}, *observed]
        tokens = played.tokenizer.encode(text, add_special_tokens=False)
        found.append(tokens[1:] if call.tokens[-1] in played.ends else tokens)
    return found


def shown(played: Episodes, prompt: Prompt, before: Any, observed: Any) -> str:
    """Return the messages as the template shows them after a turn, and the beginning of the next turn.

    Results are shown as after a first call: DeepSeek-V3's template opens the results of later ones in another way.
    """
    forms: list[dict[str, Any]] = [{"role": "assistant", "content": PLACE}]
    if observed[0]["role"] == "tool":
        named, before = [each["name"] for each in observed], prompt.messages
        for content, arguments in (("", {"value": PLACE}), (PLACE, {})):
            made = [
                {"type": "function", "id": f"call{i:05}", "function": {"name": n, "arguments": arguments}}
                for i, n in enumerate(named)
            ]
            forms.insert(0, {"role": "assistant", "content": content, "tool_calls": made})
        observed = [{"tool_call_id": f"call{i:05}", **each} for i, each in enumerate(observed)]
    for form in forms:
        try:
            alone = after_place(played, prompt, [*before, form], False)
            whole = after_place(played, prompt, [*before, form, *observed], True)
        except DataError:  # the template refuses this form
            continue
        if alone is not None and whole is not None and whole.startswith(alone):
            return whole[len(alone) :]
    raise AssertionError(f"{observed} is shown after no form of a turn")


def after_place(played: Episodes, prompt: Prompt, messages: Any, opened: bool) -> Any:
    """Return the text behind PLACE; None where the template leaves it out."""
    text = played.render(messages, add_generation_prompt=opened, tools=prompt.tools)
    return text.rpartition(PLACE)[2] if PLACE in text else None


def assert_log_probs_are_those_of_a_plain_forward(played: Episodes) -> None:
    batch = played.batch
    assert batch.loss_mask is not None
    of_rows = (row for number in range(len(batch)) for row in rows_of(played.prompts, played.completions, number))
    for before, start, end in of_rows:
        mask = batch.loss_mask[start:end]
        ids = torch.tensor([[*before, *batch.tokens[start:end].tolist()]])
        places = mask.nonzero()[:, 0] + len(before)
        with torch.no_grad():
            logits = played.model(input_ids=ids, use_cache=False, logits_to_keep=places - 1).logits[0]
        expected = logits.log_softmax(-1).gather(1, ids[0, places, None])[:, 0]
        torch.testing.assert_close(batch.logprobs[start:end][mask], expected, rtol=0, atol=1e-5)


def prompt_of(played: Episodes, number: int) -> Prompt:
    return played.prompts.prompts[int(played.completions.prompt_index[number])]


def calls_of(played: Episodes, number: int) -> list[Call]:
    """Return the requests of a trajectory in their order: `uid/sample.turn`."""
    strand = f"{prompt_of(played, number).uid}/{number % 2}."
    return sorted(
        (call for call in played.calls if call.uid.startswith(strand)), key=lambda call: int(call.uid.split(".")[1])
    )
