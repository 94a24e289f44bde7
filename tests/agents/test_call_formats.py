"""Calls in a turn's text: what a chat template writes is read back, and nothing that a model writes raises."""

import json
import random

import jinja2
import pytest

from hwgrpo.agents.action import ToolCall
from hwgrpo.agents.call_formats import MARKS, UntypedText, detect_call_format
from hwgrpo.agents.tool_schema import typed_arguments
from hwgrpo.catalog import CALL_FORMATS

NESTED = {
    "code": "print(\"a\\n{'b'}\")\n# </tool_call> <think> [ARGS] ``` </think>",
    "n": 3,
    "deep": {"x": [1.5, None, True, "ü"]},
}
CALLS = (ToolCall("run", NESTED), ToolCall("look_up", {"city": "São Paulo"}), ToolCall("now", {}))
SCHEMAS = {
    "run": {"code": {"type": "string"}, "n": {"type": "integer"}, "deep": {"type": "object"}},
    "look_up": {"city": {"type": "string"}},
    "now": {},
}

THINK = "{% if reasoning %}<think>\n{{ reasoning }}\n</think>\n\n{% endif %}{{ content }}"
TEMPLATES = {
    "hermes": THINK
    + "{% for c in calls %}\n<tool_call>\n"
    + '{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}\n</tool_call>{% endfor %}',
    "llama3": THINK
    + "{% for c in calls %}{{ '; ' if not loop.first else ('\\n' if content) }}"
    + '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}{% endfor %}',
    "llama3 with a tag": THINK
    + "<|python_tag|>{% for c in calls %}{{ '; ' if not loop.first }}"
    + '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}{% endfor %}',
    "mistral": "{% if reasoning %}[THINK]{{ reasoning }}[/THINK]{% endif %}{{ content }}"
    + "[TOOL_CALLS] [{% for c in calls %}"
    + '{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}, "id": "abcdefghi"}{{ ", " if not loop.last }}'
    + "{% endfor %}]",
    "mistral with [ARGS]": "{% if reasoning %}[THINK]{{ reasoning }}[/THINK]{% endif %}{{ content }}"
    + "{% for c in calls %}[TOOL_CALLS]{{ c.name }}[ARGS]{{ c.arguments | tojson }}{% endfor %}",
    "mistral without [ARGS]": THINK
    + "{% for c in calls %}[TOOL_CALLS]{{ c.name }}{{ c.arguments | tojson }}{% endfor %}",
    "deepseek V3": THINK
    + "<｜tool▁calls▁begin｜>{% for c in calls %}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.name }}\n```json\n"
    + "{{ c.arguments | tojson }}\n```<｜tool▁call▁end｜>{{ '\\n' if not loop.last }}{% endfor %}<｜tool▁calls▁end｜>",
    "deepseek V3.1": "{% if reasoning %}{{ reasoning }}</think>{% endif %}{{ content }}"
    + "<｜tool▁calls▁begin｜>{% for c in calls %}<｜tool▁call▁begin｜>{{ c.name }}<｜tool▁sep｜>"
    + "{{ c.arguments | tojson }}<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>",
    "kimi": THINK
    + "<|tool_calls_section_begin|>{% for c in calls %}<|tool_call_begin|>functions.{{ c.name }}:{{ loop.index0 }}"
    + "<|tool_call_argument_begin|>{{ c.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>",
    "qwen3_coder": THINK
    + "{% for c in calls %}\n<tool_call>\n<function={{ c.name }}>\n"
    + "{% for k, v in c.arguments.items() %}<parameter={{ k }}>\n"
    + "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}",
    "glm": "<think>{{ reasoning }}</think>\n{{ content }}{% for c in calls %}\n<tool_call>{{ c.name }}\n"
    + "{% for k, v in c.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>"
    + "{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>{% endfor %}",
    "gpt_oss": "{% if reasoning %}<|channel|>analysis<|message|>{{ reasoning }}<|end|><|start|>assistant{% endif %}"
    + "{% if content %}<|channel|>final<|message|>{{ content }}<|end|><|start|>assistant{% endif %}"
    + "{% for c in calls %}<|channel|>commentary to=functions.{{ c.name }} <|constrain|>json<|message|>"
    + "{{ c.arguments | tojson }}{{ '<|call|><|start|>assistant' if not loop.last }}{% endfor %}",
}
NO_CALL_IN_REASONING = {name: text for name, text in TEMPLATES.items() if name != "gpt_oss"}


def read(name, text):
    return CALL_FORMATS.load(name.split()[0])(text)


def render(name, content="", reasoning="", calls=CALLS):
    env = jinja2.Environment()
    env.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "sort_keys": False}
    env.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return env.from_string(TEMPLATES[name]).render(content=content, reasoning=reasoning, calls=calls)


def typed(call):
    """Return a call with the types of its tool's schema."""
    parameters = {"properties": SCHEMAS[call.name], "required": []}
    arguments = typed_arguments({"function": {"name": call.name, "parameters": parameters}}, call.arguments)
    return ToolCall(call.name, arguments)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("content", ["", "Let me look {it} up."])
@pytest.mark.parametrize("reasoning", ["", "I need\ntwo calls."])
def test_what_a_template_writes_is_read_back(name, content, reasoning):
    calls = CALLS
    if reasoning and name == "deepseek V3.1":  # the text of its calls may have no `</think>`, as of a real one
        calls = CALLS[1:]
    turn = read(name, render(name, content, reasoning, calls))
    assert tuple(map(typed, turn.calls)) == calls
    assert (turn.content, turn.reasoning, turn.malformed) == (content, reasoning, ())


@pytest.mark.parametrize("name", NO_CALL_IN_REASONING)
def test_a_call_inside_reasoning_is_none(name):
    opens, closes = ("[THINK]", "[/THINK]") if "[THINK]" in TEMPLATES[name] else ("<think>", "</think>")
    call = render(name, calls=CALLS[1:2]).replace("<think></think>", "")
    for text in (f"{opens}I could {call} it.{closes}No.", f"I could {call} it.{closes}No."):
        turn = read(name, text)
        assert (turn.calls, turn.malformed, turn.content) == ((), (), "No.")
        assert turn.reasoning.startswith("I could")
        assert "look_up" in turn.reasoning
    unfinished = read(name, f"{opens}I could {call} it.")
    assert (unfinished.calls, unfinished.malformed, unfinished.content) == ((), (), "")


def test_harmony_has_its_reasoning_in_a_channel():
    text = "<|channel|>analysis<|message|>to=functions.f {}<|end|><|start|>assistant<|channel|>final<|message|>No."
    assert read("gpt_oss", text).calls == ()
    assert read("gpt_oss", f"{text}<|end|><|start|>assistant").content == "No."
    after_prompt = ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}'  # which ends with the role
    assert read("gpt_oss", after_prompt).calls == (ToolCall("f", {"a": 1}),)
    role_first = '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"a": 1}'
    assert read("gpt_oss", role_first).calls == (ToolCall("f", {"a": 1}),)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_text_without_markup_is_the_content(name):
    for text in ("", "  Two lines,\n a < b, {x} and [y].\n", '{"answer": 5}', "<tool> ```json\n{}\n```"):
        turn = read(name, text)
        assert (turn.content, turn.calls, turn.malformed, turn.reasoning) == (text, (), (), "")


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_that_breaks_off_is_malformed_at_every_character(name):
    """No prefix of a call is read as another call than the one that is written."""
    text = render(name, calls=CALLS[1:2]).replace("<think></think>\n", "")
    for end in range(1, len(text)):
        turn = read(name, text[:end])
        assert turn.calls in ((), CALLS[1:2])
        assert len(turn.malformed) <= 1


BROKEN = {
    "hermes": [
        ('<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>', "JSON is not valid"),
        ('<tool_call>{"name": "f", "arguments": {}}', "</tool_call> is missing"),
        ('<tool_call>{"name": "f", "arguments": {}}}</tool_call>', "must follow it directly"),
        ('<tool_call>{"name": "f"}</tool_call>', 'no object "arguments"'),
        ('<tool_call>{"name": "f", "arguments": "{}"}</tool_call>', 'no object "arguments"'),
        ('<tool_call>{"arguments": {}}</tool_call>', 'no text "name"'),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', 'no text "name"'),
        ('<tool_call>[{"name": "f", "arguments": {}}]</tool_call>', "not a JSON object"),
        ('<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "not finite"),
        ('<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>', "not finite"),
        (f'<tool_call>{{"name": "f", "arguments": {{"a": {"9" * 5000}}}}}</tool_call>', "too long"),
        ('<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', "surrogate"),
        (f'<tool_call>{{"name": "f", "arguments": {"[" * 100_000}', "nested too deeply"),
        ("<tool_call></tool_call>", "JSON is not valid"),
        ("<tool_call>", "ends before its JSON"),
    ],
    "llama3": [
        ('{"name": "f", "parameters": {"a": 1}', "JSON is not valid"),
        ('{"name": "f", "parameters": [1]}', 'no object "parameters"'),
        ("<|python_tag|>f.call(a=1)", "JSON is not valid"),
        ('<|python_tag|>{"name": "f"}', 'no object "parameters"'),
    ],
    "mistral": [
        ('[TOOL_CALLS] [{"name": "f", "arguments": {}}', "JSON is not valid"),
        ('[TOOL_CALLS] [{"name": "f", "arguments": 1}]', 'no object "arguments"'),
        ('[TOOL_CALLS]f[ARGS]{"a": ', "JSON is not valid"),
        ("[TOOL_CALLS]f[ARGS]", "JSON is not valid"),
    ],
    "deepseek": [
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>[1]<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "not a JSON object",
        ),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}", "<｜tool▁call▁end｜> is missing"),
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "<｜tool▁sep｜> is missing",
        ),
        ("<｜tool▁calls▁begin｜>f()", "is missing"),
    ],
    "kimi": [
        ("<|tool_calls_section_begin|><|tool_call_begin|>f<|tool_call_argument_begin|>{}<|tool_call_end|>", "its id"),
        ("<|tool_calls_section_begin|>f", "is missing"),
    ],
    "qwen3_coder": [
        ("<tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>", "</parameter> is missing"),
        ("<tool_call>\n<function=f>\n</tool_call>", "</function> must follow"),
        ('<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', "<function=name> is missing"),
        ("<tool_call>\n<function=>\n</function>\n</tool_call>", "has no name"),
    ],
    "glm": [
        ("<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1\n</tool_call>", "</arg_value> is missing"),
        ("<tool_call>f\n<arg_key>a</arg_key>\n1</tool_call>", "<arg_value> must follow"),
        ("<tool_call>\n</tool_call>", "it has no name"),
    ],
    "gpt_oss": [
        ('<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1', "JSON is not valid"),
        ("<|channel|>commentary to=functions.f<|message|>{} and more", "more than JSON"),
        ("<|channel|>commentary to=functions.f<|message|>[1]", "not a JSON object"),
        ("<|channel|>commentary to=functions.<|message|>{}", "no name"),
        ("<|channel|>commentary to=functions.f", "<|message|> is missing"),
    ],
}


@pytest.mark.parametrize(("name", "text", "reason"), [(n, *case) for n, cases in BROKEN.items() for case in cases])
def test_a_broken_call_says_what_is_wrong_and_what_to_write(name, text, reason):
    turn = read(name, "First. " + text if name not in ("gpt_oss",) else text)
    assert turn.calls == ()
    (message,) = turn.malformed
    assert reason in message
    assert "Write it as" in message
    assert turn.content == ("First." if name != "gpt_oss" else "")


def test_calls_beside_a_broken_one_are_read():
    good = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
    turn = read("hermes", f"A{good}B<tool_call>{{</tool_call>C{good}D")
    assert (turn.content, len(turn.calls), len(turn.malformed)) == ("ABCD", 2, 1)
    turn = read("mistral", '[TOOL_CALLS]f[ARGS]{"a": [TOOL_CALLS]g[ARGS]{}')
    assert (turn.calls, len(turn.malformed)) == ((ToolCall("g", {}),), 1)


def test_json_of_a_reply_is_no_call_for_llama():
    assert read("llama3", '{"name": "Bob", "age": 3}').content == '{"name": "Bob", "age": 3}'
    turn = read("llama3", 'Sure:\n{"name": "f", "parameters": {}} That is it.')
    assert (turn.calls, turn.content) == ((ToolCall("f", {}),), "Sure:\n That is it.")


def test_line_breaks_within_strings_are_read():
    turn = read("hermes", '<tool_call>{"name": "run", "arguments": {"code": "a\nb\t"}}</tool_call>')
    assert turn.calls == (ToolCall("run", {"code": "a\nb\t"}),)


def test_a_value_without_type_gets_that_of_the_schema():
    text = "<tool_call>\n<function=f>\n" + "".join(
        f"<parameter={name}>\n{value}\n</parameter>\n"
        for name, value in {"a": "5", "b": "5", "c": "True", "d": "[1, 2]", "e": "null", "f": "x"}.items()
    )
    (call,) = read("qwen3_coder", f"{text}</function>\n</tool_call>").calls
    assert all(type(value) is UntypedText for value in call.arguments.values())
    kinds = {"a": "string", "b": "integer", "c": "boolean", "d": "array", "e": "null", "f": ["integer", "string"]}
    parameters = {"properties": {name: {"type": kind} for name, kind in kinds.items()}}
    values = typed_arguments({"function": {"name": "f", "parameters": parameters}}, call.arguments)
    assert values == {"a": "5", "b": 5, "c": True, "d": [1, 2], "e": None, "f": "x"}
    assert {name: type(value) for name, value in values.items()}["a"] is str


@pytest.mark.parametrize("name", ["qwen3_coder", "glm"])
def test_texts_without_quotes_keep_their_spaces_and_tags(name):
    arguments = {"code": "  if x:\n\n    y()\n", "page": "a </parameter> b </arg_value> c", "empty": "", "line": "\n"}
    turn = read(name, render(name, calls=(ToolCall("f", arguments),)))
    assert [dict(each.arguments) for each in turn.calls] == [arguments]


PIECES = (
    *(
        "<tool_call>",
        "</tool_call>",
        "<think>",
        "</think>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "[THINK]",
        "[/THINK]",
    ),
    *("<|python_tag|>", "<function=", "f>", "<parameter=", "</parameter>", "</function>", "<arg_key>", "</arg_key>"),
    *("<arg_value>", "</arg_value>", "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|constrain|>"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    *(
        '{"name": "f", "arguments": {}}',
        '{"name": "f", "parameters": {"a": [1]}}',
        "{",
        "}",
        "[",
        "]",
        '"',
        ":",
        ",",
        "\\",
    ),
    *(
        "commentary to=functions.f",
        "analysis",
        "functions.f:0",
        "function",
        "```json\n",
        "```",
        "\n",
        " ",
        "é",
        "\ud800",
        "7",
    ),
)


@pytest.mark.parametrize("name", CALL_FORMATS.names())
def test_random_text_never_raises(name):
    rng = random.Random(f"{name} 0")
    parse = CALL_FORMATS.load(name)
    calls = malformed = 0
    written = [render(each, "A", "B") for each in TEMPLATES if each.split()[0] == name]
    for number in range(3000):
        text = "".join(rng.choices(PIECES, k=rng.randrange(1, 14)))
        if number % 2:  # what a template writes, with a hole and a piece in it
            whole = rng.choice(written)
            start, end = sorted(rng.choices(range(len(whole) + 1), k=2))
            text = whole[:start] + rng.choice(PIECES) + whole[rng.choice([start, start, end]) :]
        turn = parse(text)
        calls, malformed = calls + len(turn.calls), malformed + len(turn.malformed)
        assert all(type(call.name) is str and call.name and isinstance(call.arguments, dict) for call in turn.calls)
        assert all(type(each) is str for each in (turn.content, turn.reasoning, *turn.malformed))
    assert calls > 200
    assert malformed > 200


@pytest.mark.parametrize("name", CALL_FORMATS.names())
def test_long_text_is_read_in_a_time_that_grows_with_its_length(name):
    """64k characters of markers end within the limit of any test; a search per marker to the end would not."""
    for piece in PIECES:
        CALL_FORMATS.load(name)(piece * (65_536 // len(piece)))


def test_formats_are_found_in_templates():
    assert {name: detect_call_format(" ".join(marks)) for name, marks in MARKS.items()} == {
        name: name for name in MARKS
    }
    assert set(MARKS) == set(CALL_FORMATS.names())
    for name, template in TEMPLATES.items():
        if name.split()[0] != "llama3":  # its calls are found by its instruction alone: they have no marker
            assert detect_call_format(template) == name.split()[0]
    assert detect_call_format("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}") is None
