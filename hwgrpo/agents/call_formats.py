"""How families of models write tool calls: functions of a turn's text, `CallFormat`s.

None of them raises. A call inside reasoning is no call, and one that cannot be read becomes a text in
`ParsedTurn.malformed` that says what to write instead. JSON is strict (no NaN, no trailing commas), but for line breaks
within strings, which models write in code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hwgrpo.agents.action import ParsedTurn, ToolCall

_JSON = json.JSONDecoder(strict=False)
_THINK = ("<think>", "</think>")
_MISTRAL_THINK = ("[THINK]", "[/THINK]")
_LLAMA_CALL = re.compile(r'<\|python_tag\|>|\{\s*"(?:name|type)"\s*:')
_MISTRAL_NAME = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(?=\{)")
_HARMONY_BLOCK = re.compile(r"<\|(?:start|end|call|return)\|>")
_HARMONY_RECIPIENT = re.compile(r"\bto=([^\s<]+)")

MARKS = {
    "gpt_oss": ("<|channel|>",),
    "kimi": ("<|tool_call_argument_begin|>",),
    "deepseek": ("<｜tool▁calls▁begin｜>",),
    "mistral": ("[TOOL_CALLS]",),
    "qwen3_coder": ("<function=", "<parameter="),
    "glm": ("<arg_key>", "<arg_value>"),
    "hermes": ("<tool_call>",),
    "llama3": ('"name": function name, "parameters": dictionary',),
}
"""Format -> texts that a chat template of it contains, all of them; the first format that fits counts."""


class UntypedText(str):
    """A value of a format that writes values without their types, as `qwen3_coder`: 5 may be a number or a text.

    `typed_arguments` gives it the type that the tool's schema has.
    """

    __slots__ = ()


def detect_call_format(chat_template: str) -> str | None:
    """Return the name of the format in which a chat template writes calls; None: it has none of them."""
    return next((name for name, marks in MARKS.items() if all(mark in chat_template for mark in marks)), None)


@dataclass
class _Parts:
    """What has been read of a turn."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    malformed: list[str] = field(default_factory=list)

    def turn(self, text: str) -> ParsedTurn:
        """Return the parts; the content of a text without markup is the text."""
        if not (self.reasoning or self.calls or self.malformed):
            return ParsedTurn(text)
        reasoning = "\n".join(filter(None, (each.strip() for each in self.reasoning)))
        return ParsedTurn("".join(self.content).strip(), tuple(self.calls), tuple(self.malformed), reasoning)


class _Malformed(Exception):
    """A call that cannot be read.

    Args:
        reason: what is wrong with it.
    """


ReadCall = Callable[[str, int, _Parts], int]
"""Reads the call that is opened before a position; returns the position behind it."""


def _read(
    text: str, opening: str | re.Pattern[str], read_call: ReadCall, think: tuple[str, str] = _THINK
) -> ParsedTurn:
    """Read a turn from left to right.

    Args:
        text: the turn.
        opening: what opens a call.
        read_call: is called at each opening.
        think: what opens and closes reasoning. A turn may start within it, as where the prompt opens it.
    """
    parts = _Parts()
    start = 0
    opens, closes = think
    closed = text.find(closes)
    if 0 <= closed < (text.find(opens) % (len(text) + 1)):
        parts.reasoning.append(text[:closed])
        start = closed + len(closes)
    pattern = re.compile(re.escape(opening)) if isinstance(opening, str) else opening
    next_think = text.find(opens, start)
    while (match := pattern.search(text, start)) or next_think >= 0:
        if next_think >= 0 and (match is None or next_think < match.start()):
            parts.content.append(text[start:next_think])
            closed = text.find(closes, next_think)
            parts.reasoning.append(text[next_think + len(opens) : closed if closed >= 0 else len(text)])
            start = closed + len(closes) if closed >= 0 else len(text)
        else:
            assert match is not None
            parts.content.append(text[start : match.start()])
            start = read_call(text, match.end() if isinstance(opening, str) else match.start(), parts)
        if 0 <= next_think < start:
            next_think = text.find(opens, start)
    parts.content.append(text[start:])
    return parts.turn(text)


def _read_tagged(text: str, read_one: Callable[[str, int], tuple[ToolCall, int]], form: str) -> ParsedTurn:
    """Read a turn whose calls are between `<tool_call>` and `</tool_call>`.

    Args:
        text: the turn.
        read_one: returns the call that begins at a position, and the position behind it; raises `_Malformed`.
        form: how a call is written, for the model.
    """

    def read_call(text: str, start: int, parts: _Parts) -> int:
        try:
            call, end = read_one(text, start)
        except _Malformed as reason:
            _refuse(parts, reason, form)
            return _behind(text, start, "</tool_call>")
        parts.calls.append(call)
        return end

    return _read(text, "<tool_call>", read_call)


def _skip(text: str, start: int, spaces: str = " \t\r\n") -> int:
    while start < len(text) and text[start] in spaces:
        start += 1
    return start


def _decode(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value at a position, and the position behind it."""
    start = _skip(text, start)
    if start == len(text):
        raise _Malformed("it ends before its JSON")
    try:
        value, end = _JSON.raw_decode(text, start)
        json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise _Malformed(f"its JSON is not valid: {error.msg} at character {error.pos - start}") from error
    except UnicodeEncodeError as error:
        raise _Malformed("its JSON has half of a surrogate pair") from error
    except (ValueError, RecursionError) as error:  # NaN, an integer of thousands of digits, nested too deeply
        raise _Malformed("its JSON has a number that is not finite or too long, or is nested too deeply") from error
    return value, end


def _call(value: Any, keys: tuple[str, ...] = ("arguments",)) -> ToolCall:
    """Return the call in a JSON object of a name and arguments."""
    if not isinstance(value, dict):
        raise _Malformed("it is not a JSON object")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise _Malformed('it has no text "name"')
    key = next((each for each in keys if each in value), keys[0])
    if not isinstance(value.get(key), dict):
        raise _Malformed(f'it has no object "{key}"')
    return ToolCall(name, value[key])


def _arguments(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise _Malformed("its arguments are not a JSON object")
    return value


def _closed(text: str, start: int, tag: str) -> int:
    """Return the position behind a closing tag, which must be next."""
    start = _skip(text, start)
    if not text.startswith(tag, start):
        raise _Malformed(f"{tag} is missing behind it" if start == len(text) else f"{tag} must follow it directly")
    return start + len(tag)


def _behind(text: str, start: int, *tags: str) -> int:
    """Return where to read on after a malformed call: behind the next of some tags, else the end."""
    found = [(position, tag) for tag in tags if (position := text.find(tag, start)) >= 0]
    return min(found)[0] + len(min(found)[1]) if found else len(text)


def _refuse(parts: _Parts, reason: _Malformed, form: str) -> None:
    parts.malformed.append(f"The tool call cannot be read: {reason}. Write it as {form}")


def hermes(text: str) -> ParsedTurn:
    """Parse the format of Qwen2.5, Qwen3 and Hermes: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

    def read_call(text: str, start: int) -> tuple[ToolCall, int]:
        value, end = _decode(text, start)
        end = _closed(text, end, "</tool_call>")
        return _call(value), end

    return _read_tagged(text, read_call, '<tool_call>{"name": ..., "arguments": {...}}</tool_call>.')


def llama3(text: str) -> ParsedTurn:
    """Parse the format of Llama 3.1 to 3.3: `{"name": ..., "parameters": {...}}`, possibly after `<|python_tag|>`.

    Several calls follow each other, also separated by `;`. A JSON object without parameters is content.
    """
    tag = "<|python_tag|>"

    def read_call(text: str, start: int, parts: _Parts) -> int:
        tagged = text.startswith(tag, start)
        begin = start + len(tag) if tagged else start
        try:
            value, end = _decode(text, begin)
            if not tagged and not (isinstance(value, dict) and ("parameters" in value or "arguments" in value)):
                parts.content.append(text[start:end])
                return end
            parts.calls.append(_call(value, ("parameters", "arguments")))
            following = _skip(text, end, " \t\r\n;")
            return following if _LLAMA_CALL.match(text, following) else end
        except _Malformed as reason:
            _refuse(parts, reason, '{"name": ..., "parameters": {...}}.')
            return len(text)

    return _read(text, _LLAMA_CALL, read_call)


def mistral(text: str) -> ParsedTurn:
    """Parse the formats of Mistral: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}]`, or a name and JSON.

    The newer ones are `[TOOL_CALLS]NAME{...}` and `[TOOL_CALLS]NAME[ARGS]{...}`.
    """

    def read_call(text: str, start: int, parts: _Parts) -> int:
        try:
            if name := _MISTRAL_NAME.match(text, start):
                value, end = _decode(text, name.end())
                parts.calls.append(ToolCall(name[1], _arguments(value)))
                return end
            value, end = _decode(text, start)
            parts.calls += [_call(each) for each in (value if isinstance(value, list) else [value])]
            return end
        except _Malformed as reason:
            _refuse(parts, reason, '[TOOL_CALLS]name[ARGS]{...} or [TOOL_CALLS] [{"name": ..., "arguments": {...}}].')
            following = text.find("[TOOL_CALLS]", start)
            return following if following >= 0 else len(text)

    return _read(
        text, "[TOOL_CALLS]", read_call, _MISTRAL_THINK if any(each in text for each in _MISTRAL_THINK) else _THINK
    )


def deepseek(text: str) -> ParsedTurn:
    """Parse the formats of DeepSeek: V3 and R1 with a type and a block of JSON, V3.1 with a name and JSON."""
    begin, call, sep = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
    end_call, end_all = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"

    def read_call(text: str, start: int, parts: _Parts) -> int:
        while text.startswith(call, start := _skip(text, start)):
            start += len(call)
            try:
                middle = text.find(sep, start)
                if middle < 0:
                    raise _Malformed(f"{sep} is missing")
                name, position = text[start:middle].strip(), middle + len(sep)
                fenced = text.find("```json", position)
                line = text[position:fenced].strip() if fenced >= 0 else ""
                in_block = bool(line) and "{" not in line and "\n" not in line and "<" not in line
                if in_block:  # V3: the type, then the name in the first line
                    name, position = line, fenced + len("```json")
                value, position = _decode(text, position)
                if in_block:
                    position = _closed(text, position, "```")
                arguments = _arguments(value)
                if not name:
                    raise _Malformed("it has no name")
                start = _closed(text, position, end_call)
                parts.calls.append(ToolCall(name, arguments))
            except _Malformed as reason:
                _refuse(parts, reason, f"{begin}{call}name{sep}{{...}}{end_call}{end_all}.")
                start = _behind(text, start, end_call)
        if text.startswith(end_all, start):
            return start + len(end_all)
        if start < len(text) or not (parts.calls or parts.malformed):
            _refuse(
                parts,
                _Malformed(f"{call} or {end_all} is missing"),
                f"{begin}{call}name{sep}{{...}}{end_call}{end_all}.",
            )
            return len(text)
        return start

    return _read(text, begin, read_call)


def kimi(text: str) -> ParsedTurn:
    """Parse the format of Kimi K2: a section of calls, each with the id `functions.NAME:0` and JSON."""
    section, end_section = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
    call, argument, end_call = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
    form = f"{section}{call}functions.name:0{argument}{{...}}{end_call}{end_section}."

    def read_call(text: str, start: int, parts: _Parts) -> int:
        while text.startswith(call, start := _skip(text, start)):
            start += len(call)
            try:
                middle = text.find(argument, start)
                if middle < 0:
                    raise _Malformed(f"{argument} is missing")
                name = text[start:middle].strip().removeprefix("functions.").rpartition(":")[0]
                if not name:
                    raise _Malformed("its id is not functions.name:number")
                value, position = _decode(text, middle + len(argument))
                arguments = _arguments(value)
                start = _closed(text, position, end_call)
                parts.calls.append(ToolCall(name, arguments))
            except _Malformed as reason:
                _refuse(parts, reason, form)
                start = _behind(text, start, end_call)
        if text.startswith(end_section, start):
            return start + len(end_section)
        if start < len(text) or not (parts.calls or parts.malformed):
            _refuse(parts, _Malformed(f"{call} or {end_section} is missing"), form)
            return len(text)
        return start

    return _read(text, section, read_call)


def qwen3_coder(text: str) -> ParsedTurn:
    """Parse the format of Qwen3-Coder and Qwen3.5: `<tool_call><function=NAME><parameter=KEY>value</parameter>...`."""
    form = "<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>"

    def read_call(text: str, start: int) -> tuple[ToolCall, int]:
        name, position = _tagged_name(text, _skip(text, start), "<function=")
        arguments = {}
        while text.startswith("<parameter=", position := _skip(text, position)):
            key, position = _tagged_name(text, position, "<parameter=")
            end = _end_of_value(text, position, "</parameter>", ("<parameter=", "</function>"))
            arguments[key] = UntypedText(text[position:end].removeprefix("\n").removesuffix("\n"))
            position = end + len("</parameter>")
        position = _closed(text, position, "</function>")
        return ToolCall(name, arguments), _closed(text, position, "</tool_call>")

    return _read_tagged(text, read_call, form)


def glm(text: str) -> ParsedTurn:
    """Parse the format of GLM 4.5: `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>value</arg_value>...`."""
    form = "<tool_call>name\n<arg_key>key</arg_key>\n<arg_value>value</arg_value>\n</tool_call>"

    def read_call(text: str, start: int) -> tuple[ToolCall, int]:
        position = min((each for tag in ("<", "\n") if (each := text.find(tag, _skip(text, start))) >= 0), default=-1)
        name = text[start:position].strip() if position >= 0 else ""
        if not name:
            raise _Malformed("it has no name")
        arguments = {}
        while text.startswith("<arg_key>", position := _skip(text, position)):
            position += len("<arg_key>")
            end = text.find("</arg_key>", position)
            if end < 0:
                raise _Malformed("</arg_key> is missing")
            key = text[position:end].strip()
            position = _closed(text, end + len("</arg_key>"), "<arg_value>")
            end = _end_of_value(text, position, "</arg_value>", ("<arg_key>", "</tool_call>"))
            arguments[key] = UntypedText(text[position:end])
            position = end + len("</arg_value>")
        return ToolCall(name, arguments), _closed(text, position, "</tool_call>")

    return _read_tagged(text, read_call, form)


def _tagged_name(text: str, start: int, tag: str) -> tuple[str, int]:
    """Return the name in `<tag=NAME>`, and the position behind it."""
    end = text.find(">", start)
    if not text.startswith(tag, start) or end < 0:
        raise _Malformed(f"{tag}name> is missing")
    name = text[start + len(tag) : end].strip()
    if not name or "\n" in name or "<" in name:
        raise _Malformed(f"{tag}...> has no name")
    return name, end + 1


def _end_of_value(text: str, start: int, closing: str, following: tuple[str, ...]) -> int:
    """Return where a value ends: at the first closing tag that one of the following tags is behind."""
    end = text.find(closing, start)
    while end >= 0 and not text.startswith(following, _skip(text, end + len(closing))):
        end = text.find(closing, end + 1)
    if end < 0:
        raise _Malformed(f"{closing} is missing, with {' or '.join(following)} behind it")
    return end


def gpt_oss(text: str) -> ParsedTurn:
    """Parse harmony, the format of gpt-oss: messages of channels, of which those to a recipient are calls."""
    if "<|message|>" not in text and "<|channel|>" not in text:
        return ParsedTurn(text)
    parts = _Parts()
    for number, each in enumerate(_HARMONY_BLOCK.split(text)):
        header, separated, body = each.partition("<|message|>")
        recipient = _HARMONY_RECIPIENT.search(header)
        if recipient is not None:
            try:
                if not separated:
                    raise _Malformed("<|message|> is missing")
                value, end = _decode(body, 0)
                if body[end:].strip():
                    raise _Malformed("there is more than JSON in it")
                name = recipient[1].removeprefix("functions.")
                if not name:
                    raise _Malformed("it has no name")
                parts.calls.append(ToolCall(name, _arguments(value)))
            except _Malformed as reason:
                form = "<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>"
                _refuse(parts, reason, form)
        elif not separated:
            parts.content.append("" if number else each)  # a header alone is the start of a message that is not there
        elif "analysis" in header:
            parts.reasoning.append(body)
        else:
            parts.content.append(body)
    return ParsedTurn(
        "".join(parts.content).strip(),
        tuple(parts.calls),
        tuple(parts.malformed),
        "\n".join(filter(None, map(str.strip, parts.reasoning))),
    )
