"""Bash source -> statements of words, without running any of it: quotes, comments, continued lines, redirections."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from hwgrpo.errors import ConfigError
from hwgrpo.migrate.imports.reading_budget import Budget

OPERATORS = ("&&", "||", ";;&", ";;", ";&", ";", "|&", "|", "&", "\n")
_REDIRECTION = re.compile(r"(?:\d*|&)(?:<<<|<<-?|>>|>\||>&|<&|<>|>|<)")
_SETTING = re.compile(r"""\s*(?:["']?[+~]{0,2}[A-Za-z_]\w*\.[\w.@/-]+=|["']?\$[{@]|--config-)""")
"""How a continued line of settings begins."""
_CONTINUED = re.compile(r"\\(?:[ \t]*|[ \t]+#[^\n]*)(?:\n|\Z)")
_WITHIN_WORD = re.compile(r"\\\n(?![\s#;|&<>)]|\Z)")
"""The end of a continued line within a word."""
_TESTED = re.compile(r"&&|\|\||[&|<>()]")
_BEFORE_TESTS = ("if", "elif", "while", "until", "then", "else", "do", "!")
_ESCAPED = re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.DOTALL)
_ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{1,2}|u[0-9a-fA-F]{1,4}|[0-7]{1,3}|[abeEfnrtv\\'\"?])")
_ESCAPES = dict(zip("abeEfnrtv", "\a\b\x1b\x1b\f\n\r\t\v", strict=True))
_LITERAL_IN_QUOTES = re.compile(r"'|\\(?![$`\"\\}\n])")
_ARRAY = re.compile(r"[A-Za-z_]\w*\+?=\(")


def _unescaped(found: re.Match[str]) -> str:
    """Return the character of an escape of `$'...'`."""
    code = found[1]
    if code[0] in "xu":
        character = chr(int(code[1:], 16))
        return "\ufffd" if "\ud800" <= character <= "\udfff" else character
    return chr(int(code, 8) & 255) if code[0].isdigit() else _ESCAPES.get(code, code)


@dataclass(frozen=True)
class Part:
    """A piece of a word."""

    text: str
    """Literal text; of an expansion its source, `$X`, `${X:-y}`, `$(date)`, `$((1 + 2))`."""
    quoted: bool = False
    expands: bool = False


@dataclass(frozen=True)
class Word:
    """A word before expansion."""

    parts: tuple[Part, ...]
    elements: tuple[Word, ...] | None = None
    """The words of an array, `A=(...)`; `parts` is then `A=`."""

    @property
    def literal(self) -> str | None:
        """The word's text if nothing in it is quoted or expanded, as that of a keyword; else None."""
        return None if any(part.quoted or part.expands for part in self.parts) else "".join(p.text for p in self.parts)


@dataclass
class Statement:
    """A simple command, or a keyword of a compound one."""

    line: int
    words: list[Word] = field(default_factory=list)
    after: str = "\n"
    """The operator before it."""
    tests: bool | None = None
    """Whether it is within `[[ ... ]]`; None: it has not begun."""
    redirects_output: bool = False
    """Whether its standard output goes elsewhere, `> FILE`."""
    ends: str = ""
    """The operator behind it."""

    def add(self, word: Word) -> None:
        """Append a word."""
        self.words.append(word)
        literal = word.literal
        if self.tests is None and literal not in _BEFORE_TESTS:
            self.tests = literal == "[["
        elif self.tests and literal == "]]":
            self.tests = False


class BashReader:
    """Reader of a script's statements."""

    def __init__(self, text: str, name: str, budget: Budget | None = None) -> None:
        self._text, self._name, self._at = text.replace("\r\n", "\n"), name, 0
        self._budget = budget or Budget("the texts after <<")
        self._counted = 0, 1
        """A place of the text, and its line."""
        self.notices: list[str] = []

    def statements(self) -> list[Statement]:
        """Return the statements of the script in order.

        Raises:
            ConfigError: a quote or bracket is not closed.
        """
        found: list[Statement] = []
        now = Statement(1)
        while self._at < len(self._text):
            if (blank := self._skip_blanks()) is not None:
                self.notices += blank
                continue
            if self._in_double_brackets(now):
                now.add(self._tested_word())
                continue
            operator = next((each for each in OPERATORS if self._text.startswith(each, self._at)), None)
            if operator is not None and not self._text.startswith("&>", self._at):
                self._at += len(operator)
                found += [now] if now.words else []
                if found and not found[-1].ends:
                    found[-1].ends = operator
                now = Statement(self._line(), after=operator if now.words or operator != "\n" else now.after)
                continue
            if not now.words:
                now.line = self._line()
            if (redirection := self._skip_redirection()) is not None:
                now.redirects_output |= redirection.startswith((">", "1>", "&>"))
                continue
            if self._text[self._at] in "()":
                bracket = Word((Part(self._bracket()),))
                negates = bracket.literal == "(" and all(
                    each.literal in (*_BEFORE_TESTS, "{", "time") for each in now.words
                )
                if now.words and bracket.literal in ("(", ")") and not negates:
                    found.append(now)
                    now = Statement(self._line(), after=";")
                now.add(bracket)
                found.append(now)
                now = Statement(self._line(), after=";")
                continue
            now.add(self._word())
        return [*found, now] if now.words else found

    def _in_double_brackets(self, now: Statement) -> bool:
        return bool(now.tests) and not self._text.startswith(("\n", ";"), self._at)

    def _tested_word(self) -> Word:
        """Return a word of `[[ ... ]]`, in which `<`, `&&` and brackets are operators of its own."""
        found = _TESTED.match(self._text, self._at)
        if found is None:
            return self._word()
        self._at = found.end()
        return Word((Part(found[0]),))

    def word_parts(self, *, quoted: bool = False) -> tuple[Part, ...]:
        """Return all of the text as the parts of one word, spaces included, as after `${X:-`.

        Args:
            quoted: whether it is within `"..."`, where `'` is a character, and a backslash mostly one.
        """
        parts: list[Part] = []
        while self._at < len(self._text):
            if quoted and _LITERAL_IN_QUOTES.match(self._text, self._at):
                parts.append(Part(self._text[self._at], quoted=True))
                self._at += 1
            else:
                parts += [replace(each, quoted=quoted or each.quoted) for each in self._part()]
        return tuple(parts)

    def _line(self) -> int:
        at, line = self._counted if self._counted[0] <= self._at else (0, 1)
        self._counted = self._at, line + self._text.count("\n", at, self._at)
        return self._counted[1]

    def _error(self, what: str, line: int) -> ConfigError:
        return ConfigError(f"{self._name}, line {line}: {what}")

    def _skip_blanks(self) -> list[str] | None:
        """Skip blanks, a comment or a continued line's end; return notices about it, None where there is none."""
        text, at = self._text, self._at
        if (blank := re.compile(r"[ \t]+").match(text, at)) is not None:
            self._at = blank.end()
            return []
        if text[at] == "#":
            end = text.find("\n", at)
            self._at = end if end >= 0 else len(text)
            return []
        if (ends := _CONTINUED.match(text, at)) is None:
            return None
        line, self._at = self._line(), ends.end()
        notices = (
            [f"line {line}: text after the backslash, where bash would stop"] if ends[0].rstrip("\n") != "\\" else []
        )
        between = re.compile(r"(?:[ \t]*(?:#[^\n]*)?\n)+").match(text, self._at)
        if between is not None and _SETTING.match(text, between.end()):
            self._at = between.end()
            notices.append(
                f"line {line + 1}: a comment or an empty line between continued lines, where bash would stop"
            )
        return notices

    def _skip_redirection(self) -> str | None:
        """Skip a redirection; return its operator, None where there is none."""
        found = _REDIRECTION.match(self._text, self._at)
        if found is None or self._text.startswith(("<(", ">("), self._at):
            return None
        line, self._at = self._line(), found.end()
        while self._at < len(self._text) and self._text[self._at] in " \t":
            self._at += 1
        target = self._word()
        if found[0].lstrip("0123456789") in ("<<", "<<-"):
            end = "".join(part.text for part in target.parts)
            body = re.compile(rf"[^\n]*\n(?:.*\n)*?[ \t]*{re.escape(end)}[ \t]*(?=\n|\Z)").match(self._text, self._at)
            if body is None:
                raise self._error(f"the text after <<{end} has no end", line)
            rest = self._text.index("\n", self._at)
            self._budget.spend(len(self._text) // 100, f"{self._name}, line {line}")
            self._text = self._text[:rest] + "\n" * body[0].count("\n") + self._text[body.end() :]
        return found[0]

    def _bracket(self) -> str:
        """Return `(`, `)`, or all of `((...))`."""
        if self._text.startswith("((", self._at):
            start, self._at = self._at, self._closing(self._at, "(", ")", self._line())
            return self._text[start : self._at]
        if self._text.startswith("()", self._at):
            self._at += 2
            return "()"
        self._at += 1
        return self._text[self._at - 1]

    def _word(self, *, arrays: bool = True) -> Word:
        parts: list[Part] = []
        start, line = self._at, self._line()
        while self._at < len(self._text):
            here = self._text[self._at]
            if self._text.startswith(("<(", ">("), self._at):
                end = self._closing(self._at + 1, "(", ")", line)
                parts.append(Part(self._text[self._at : end], expands=True))
                self._at = end
                continue
            if _WITHIN_WORD.match(self._text, self._at):
                self._at += 2
                continue
            if here in " \t\n;|&<>)" or (here == "\\" and _CONTINUED.match(self._text, self._at)):
                break
            if here == "(":
                if not arrays or not _ARRAY.fullmatch(self._text, start, self._at + 1):
                    break
                self._at += 1
                return Word(tuple(parts), self._elements(line))
            parts += self._part()
        return Word(tuple(parts))

    def _elements(self, line: int) -> tuple[Word, ...]:
        elements: list[Word] = []
        while self._at < len(self._text):
            if self._text[self._at] == ")":
                self._at += 1
                return tuple(elements)
            if self._text[self._at] == "\n":
                self._at += 1
            elif self._skip_blanks() is None:
                if self._text[self._at] in ";|&<>(" and not self._text.startswith(("<(", ">("), self._at):
                    raise self._error(f"{self._text[self._at]!r} in an array", line)
                elements.append(self._word(arrays=False))
        raise self._error("the array's ( is not closed", line)

    def _part(self) -> list[Part]:
        text, at, line = self._text, self._at, self._line()
        here = text[at]
        if text.startswith("$'", at):
            if (found := _ESCAPED.match(text, at)) is None:
                raise self._error("a ' is not closed", line)
            self._at = found.end()
            return [Part(_ESCAPE.sub(_unescaped, found[1]), quoted=True)]
        if here == "'":
            end = text.find("'", at + 1)
            if end < 0:
                raise self._error("a ' is not closed", line)
            self._at = end + 1
            return [Part(text[at + 1 : end], quoted=True)]
        if here == '"' or text.startswith('$"', at):
            self._at += here == "$"
            return self._double_quoted(line)
        if here in "$`" and (expansion := self._expansion()) is not None:
            return [Part(expansion, expands=True)]
        if here == "\\":
            self._at += 2
            return [Part(text[at + 1 : at + 2], quoted=True)]
        self._at += 1
        return [Part(here)]

    def _double_quoted(self, line: int) -> list[Part]:
        parts = [Part("", quoted=True)]
        self._at += 1
        while self._at < len(self._text):
            here = self._text[self._at]
            if here == '"':
                self._at += 1
                return parts
            if here in "$`" and (expansion := self._expansion()) is not None:
                parts.append(Part(expansion, quoted=True, expands=True))
                continue
            if here == "\\" and self._text[self._at + 1 : self._at + 2] in ("$", "`", '"', "\\", "\n"):
                escaped = self._text[self._at + 1]
                parts.append(Part("" if escaped == "\n" else escaped, quoted=True))
                self._at += 2
                continue
            parts.append(Part(here, quoted=True))
            self._at += 1
        raise self._error('a " is not closed', line)

    def _expansion(self) -> str | None:
        """Return the source of an expansion, and go behind it; None for a `$` that begins none."""
        text, at, line = self._text, self._at, self._line()
        if text[at] == "`":
            end = text.find("`", at + 1)
            if end < 0:
                raise self._error("a ` is not closed", line)
            self._at = end + 1
        elif text.startswith("$((", at) or text.startswith("$(", at):
            self._at = self._closing(at + 1, "(", ")", line)
        elif text.startswith("$[", at):
            self._at = self._closing(at + 1, "[", "]", line)
        elif text.startswith("${", at):
            self._at = self._closing(at + 1, "{", "}", line)
        elif (name := re.compile(r"\$(?:[A-Za-z_]\w*|[0-9@*#?$!-])").match(text, at)) is not None:
            self._at = name.end()
        else:
            return None
        return text[at : self._at]

    def _closing(self, at: int, opens: str, closes: str, line: int) -> int:
        """Return the place behind the bracket that closes the one at `at`; quotes hide brackets."""
        depth, quote = 0, ""
        while at < len(self._text):
            here = self._text[at]
            if here == "\\":
                at += 1
            elif quote:
                quote = "" if here == quote else quote
            elif here == "'" or here == '"':
                quote = here
            elif here == opens:
                depth += 1
            elif here == closes:
                depth -= 1
                if not depth:
                    return at + 1
            at += 1
        raise self._error(f"a {opens} is not closed", line)
