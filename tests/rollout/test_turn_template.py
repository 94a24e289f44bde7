"""Tokens between turns by the chat template: those of the whole conversation, without tokenizing what was sampled."""

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hwgrpo.config.schema import DataConfig
from hwgrpo.data.chat_template import apply_template
from hwgrpo.errors import ConfigError, RunError
from hwgrpo.rollout.turn_template import Message, TurnTemplate
from hwgrpo.rollout.workflow import Sampler, Trajectory
from hwgrpo.rollout.workflow_engine import WorkflowEngine
from hwgrpo.values import Prompt, PromptBatch, Sampling
from tests.rollout.test_workflow import Engine

MARKERS = ("<|open|>", "<|close|>", "<|end|>", "<|stop|>")
LOOP = "{% for message in messages %}"
TEMPLATES = {
    "markers around every message": LOOP + "<|open|>{{ message.role }}\n{{ message.content }}<|close|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|open|>assistant\n{% endif %}",
    "text alone": LOOP + "{% if message.role == 'assistant' %}{{ message.content }}<|close|>"
    "{% else %}{{ message.role }}: {{ message.content | trim }} assistant:{% endif %}{% endfor %}",
    "results within one message of the user": LOOP
    + "{% if message.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|open|>user\n{% endif %}"
    "<result>{{ message.content }}</result>{% if loop.last or loop.nextitem.role != 'tool' %}<|close|>\n{% endif %}"
    "{% else %}<|open|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls %}<call>{{ call.function.name }} {{ call.id }}</call>{% endfor %}<|close|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|open|>assistant\n{% endif %}",
    "calls in place of the content": LOOP + "<|open|>{{ message.role }}\n{% if message.tool_calls %}"
    "{% for call in message.tool_calls %}{{ call.function | tojson }}{% endfor %}{% else %}{{ message.content }}"
    "{% endif %}<|close|>\n{% endfor %}{% if add_generation_prompt %}<|open|>assistant\n{% endif %}",
}
NO_TOOLS = (
    LOOP
    + "{% if message.role == 'tool' %}{{ raise_exception('only user and assistant') }}{% endif %}"
    + ("<|open|>{{ message.role }}\n{{ message.content }}<|close|>{% endfor %}")
)
LAST_IS_SHOWN = LOOP + "{{ message.content }}{% if loop.last %} (the last){% endif %}<|close|>{% endfor %}"


def tokenizer_of(template: str | None) -> Any:
    """Return a tokenizer of bytes and four special tokens."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core = Tokenizer(models.BPE({letter: number for number, letter in enumerate(sorted(alphabet))}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([*MARKERS])
    first = ("<|stop|>", core.token_to_id("<|stop|>"))  # before every text, as <s>
    core.post_processor = processors.TemplateProcessing(single="<|stop|> $A", special_tokens=[first])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|close|>")
    tokenizer.chat_template = template
    return tokenizer


def turns_of(tokenizer: Any) -> TurnTemplate:
    def render(messages: Any, *, add_generation_prompt: bool, tools: Any = ()) -> str:
        options = {"add_generation_prompt": add_generation_prompt, "tools": tools}
        return apply_template(messages, DataConfig(), tokenizer, "here", **options)

    ends = [tokenizer.convert_tokens_to_ids(token) for token in ("<|close|>", "<|stop|>", "!")]
    return TurnTemplate(render, tokenizer, ends)


def ids(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def tool(text: str) -> Message:
    return {"role": "tool", "content": text}


@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("turns", [1, 2, 6])
def test_all_turns_together_are_the_tokens_of_the_whole_conversation(template, turns):
    tokenizer = tokenizer_of(template)
    between, conversation = turns_of(tokenizer), [user("What is 7 + 5?")]

    def whole() -> list[int]:
        text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        return ids(tokenizer, text)

    tokens = whole()
    for turn in range(turns):
        answer = f"Zwölf? 十二 {turn}"
        sampled = [*ids(tokenizer, answer), tokenizer.eos_token_id]
        tokens += [*sampled, *(between.between(sampled, True, [user(f" Again, {turn}.")]) or ())]
        conversation += [{"role": "assistant", "content": answer}, user(f" Again, {turn}.")]
    assert tokens == whole()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("markers around every message", "\n<|open|>tool\n12<|close|>\n<|open|>tool\n13<|close|>\n<|open|>assistant\n"),
        (
            "results within one message of the user",
            "\n<|open|>user\n<result>12</result><result>13</result><|close|>\n<|open|>assistant\n",
        ),
        (
            "calls in place of the content",
            "\n<|open|>tool\n12<|close|>\n<|open|>tool\n13<|close|>\n<|open|>assistant\n",
        ),
    ],
)
def test_results_of_tools_are_shown_as_the_template_shows_them(name, expected):
    tokenizer = tokenizer_of(TEMPLATES[name])
    sampled = [*ids(tokenizer, "<call>add 5 7</call>"), tokenizer.eos_token_id]
    assert tokenizer.decode(turns_of(tokenizer).between(sampled, True, [tool("12"), tool("13")])) == expected


@pytest.mark.parametrize(
    ("last", "finished", "begins"),
    [
        ("<|close|>", True, "\n<|open|>"),
        ("<|stop|>", True, "\n<|open|>"),  # another stop token stands for the end of the turn
        ("x", True, "<|close|>\n"),  # a stop string
        ("!", True, "<|close|>\n"),  # a stop token that is text
        ("<|end|>", True, "<|close|>\n"),  # one that is a special token
        ("x", False, "<|close|>\n"),  # the limit of tokens
        ("<|stop|>", False, "<|close|>\n"),
    ],
)
def test_the_end_of_a_turn_is_there_once(last, finished, begins):
    tokenizer = tokenizer_of(TEMPLATES["markers around every message"])
    sampled = ids(tokenizer, f"12{last}")
    text = tokenizer.decode(turns_of(tokenizer).between(sampled, finished, [user("?")]))
    assert text.startswith(begins)
    assert text.endswith("<|open|>user\n?<|close|>\n<|open|>assistant\n")


def test_messages_that_a_template_refuses_or_shows_otherwise_are_named():
    with pytest.raises(
        ConfigError, match=r"roles tool after a turn of the policy: .*only user and assistant.*as messages of the user"
    ):
        turns_of(tokenizer_of(NO_TOOLS)).between([1], True, [tool("12")])
    rewriting = turns_of(tokenizer_of(LAST_IS_SHOWN))
    assert rewriting.between([1], True, [user("12")]) is None
    assert rewriting.rewrites([user("12")]) == (
        "the chat template shows a turn of the policy differently when messages of the roles user follow"
    )


def test_messages_that_a_template_moves_elsewhere_are_refused():
    moved = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}{% endfor %}"
        "{% for m in messages %}{% if m.role != 'system' %}<|open|>{{ m.content }}<|close|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|open|>{% endif %}"
    )
    turns = turns_of(tokenizer_of(moved))
    assert turns.between([1], True, [user("12")])
    for messages in ([{"role": "system", "content": "12"}], [user("12"), {"role": "system", "content": "12"}]):
        with pytest.raises(ConfigError, match=r"does not show those of the role system there; give them as messages"):
            turns.between([1], True, messages)


def sampled_by(tokenizer: Any, workflow: Any) -> Trajectory:
    """Return the one trajectory of a workflow."""
    found: list[Trajectory] = []

    async def run(prompt: Prompt, sampler: Sampler) -> list[Trajectory]:
        trajectory = sampler.trajectory()
        await workflow(trajectory, sampler)
        found.append(trajectory)
        return [trajectory]

    turns = None if tokenizer.chat_template is None else turns_of(tokenizer)
    samples: Any = Engine()
    engine = WorkflowEngine(samples, run, "w.py:run", tokenizer, 20.0, turns)
    engine.generate(PromptBatch((Prompt("0:0", "", (7, 2), None, {}),)), Sampling(n=1, max_response_tokens=64))
    return found[0]


def test_a_workflow_observes_messages_in_the_chat_template_and_keeps_what_was_sampled():
    tokenizer = tokenizer_of(TEMPLATES["markers around every message"])

    async def workflow(trajectory: Trajectory, sampler: Sampler) -> None:
        await sampler.sample(trajectory)
        sampler.observe(trajectory, [user("12")])
        await sampler.sample(trajectory, max_tokens=5)

    trajectory = sampled_by(tokenizer, workflow)
    first, seen, second = trajectory.segments
    assert (first.role, seen.role, second.role) == ("sampled", "observed", "sampled")
    assert first.token_ids == [10, 11], "as the engine sampled it"
    shown = "<|close|>\n<|open|>user\n12<|close|>\n<|open|>assistant\n"
    assert seen.token_ids == ids(tokenizer, shown), "no stop token ended the turn"
    assert seen.text == "\nuser\n12\nassistant\n"
    assert seen.columns.loss_mask is not None
    assert not seen.columns.loss_mask.any()


def test_a_workflow_that_observes_too_early_or_without_a_template_is_named():
    async def early(trajectory: Trajectory, sampler: Sampler) -> None:
        sampler.observe(trajectory, [user("12")])

    async def late(trajectory: Trajectory, sampler: Sampler) -> None:
        await sampler.sample(trajectory)
        sampler.observe(trajectory, [user("12")])

    with pytest.raises(RunError, match="follows a sampled segment: give all messages"):
        sampled_by(tokenizer_of(TEMPLATES["text alone"]), early)
    with pytest.raises(
        ConfigError, match=r"needs the tokenizer's chat template, and it has none; set model\.chat_template"
    ):
        sampled_by(tokenizer_of(None), late)
