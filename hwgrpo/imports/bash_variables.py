"""Variables of a bash script and the words that expand to them; what is not known becomes a mark with a reason."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence

from hwgrpo.imports.bash_arithmetic import evaluate
from hwgrpo.imports.bash_words import BashReader, Part, Word
from hwgrpo.imports.script_command import MARK

_EXPANSION = re.compile(r"\$\{(#?)([A-Za-z_]\w*|[0-9@*#])(\[[^]]*\])?(:?[-=+?]|%%?|##?|//?|:)?(.*)\}", re.DOTALL)
_BRACES = re.compile(r"\{[^{}\s]*(?:,|\.\.)[^{}\s]*\}")


class BashVariables:
    """The variables and arguments of a script, as far as they are known."""

    def __init__(self, name: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._name = name
        self.arguments = [each for each in arguments if "=" in each]
        self.words = [each for each in arguments if "=" not in each]
        self.values: dict[str, list[str]] = {key: [value] for key, value in environment.items()}
        self.passes_arguments = False
        """Whether `"$@"` was read."""
        self.unknown: list[str] = []
        """The reason of each mark."""
        self.sees_all = True
        """Whether a variable that seems unset is."""
        self.line = 1
        """The line that is read, for reasons."""

    def mark(self, reason: str) -> str:
        """Return a mark for an unknown piece."""
        self.unknown.append(f"{self._name}, line {self.line}: {reason}")
        return f"\ue000{len(self.unknown) - 1}\ue001"

    def set_unknown(self, name: str, reason: str) -> None:
        """Make the value of a variable unknown."""
        self.values[name] = [self.mark(reason)]

    def expand(self, word: Word, *, split: bool = True, unset: str | None = None) -> list[str]:
        """Return the fields that a word becomes; a variable that is not set is `unset`, or a mark."""
        plain = "".join(" " if part.quoted or part.expands else part.text for part in word.parts)
        if split and (braces := _BRACES.search(plain)):
            return [self.mark(f"{braces[0]} is not expanded")]
        fields, now, begun, vanishes = [], "", False, False
        for part in word.parts:
            if not part.expands:
                now, begun = now + part.text, True
                continue
            name = re.fullmatch(r"\$\{?([A-Za-z_]\w*|\d)\}?", part.text)
            values = [unset] if unset is not None and name and self.values_of(name[1]) is None else None
            values = self._expansion(part.text) if values is None else values
            if not part.quoted and split:
                values = [piece for value in values for piece in value.split()] if values else []
            elif not split or not re.match(r"\$(?:@|\{@|\{\w+\[@)", part.text):
                values = [" ".join(values)]
            vanishes = vanishes or not values  # "$@" without arguments is no field
            for i, value in enumerate(values):
                if i:
                    fields.append(now)
                    now = ""
                now, begun = now + value, True
        return [*fields, now] if begun and (now or not vanishes) else fields

    def _expansion(self, source: str) -> list[str]:
        if source.startswith("$(("):
            return [self._arithmetic(source[3:-2])]
        if source == "$(pwd)" and (folder := self.values.get("PWD")):
            return folder
        if source.startswith(("$(", "`")):
            return [self.mark(f"{source} is the output of a program")]
        if not source.startswith("${"):
            source = f"${{{source[1:]}}}"
        found = _EXPANSION.fullmatch(source)
        if found is None:
            return [self.mark(f"{source} is not read")]
        length, name, index, form, rest = found.groups()
        if length or (rest and not form) or form in ("/", "//"):
            return [self.mark(f"{source} is not read")]
        values = self.values_of(name)
        if index and index[1:-1].isdigit():
            values = values[int(index[1:-1]) :][:1] if values else values
        elif values and not index and name not in ("@", "*"):
            values = values[:1]
        if form == ":" and name in ("@", "*"):  # ${@:2}
            return values[max(int(rest) - 1, 0) :] if values and rest.isdigit() else []
        if form == ":" and values:  # ${X:0:4}
            start, _, size = rest.partition(":")
            if not start.isdigit() or not (size or "0").isdigit() or MARK.search(values[0]):
                return [self.mark(f"{source} is not read")]
            return [values[0][int(start) :][: int(size) if size else None]]
        return self._operated(source, name, values, form, rest)

    def _operated(self, source: str, name: str, values: list[str] | None, form: str | None, rest: str) -> list[str]:
        missing = values is None or (form is not None and form.startswith(":") and not "".join(values))
        if values is None and not self.sees_all and not name.isdigit():
            return [self.mark(f"the variable {name} may be set by a file or command that is not read")]
        if form in (":+", "+"):
            return [] if missing else [self._text_of(rest)]
        if form in (":-", "-", ":=", "=") and missing:
            value = self._text_of(rest)
            if form.endswith("="):
                self.values[name] = [value]
            return [value]
        if values is None:
            return [self.mark(f"the variable {name} is not set")]
        if form in ("%", "%%", "#", "##"):
            pattern = self._text_of(rest)
            return [_trimmed(value, form, pattern) for value in values]
        return values

    def values_of(self, name: str) -> list[str] | None:
        """Return the value of a variable or parameter, several of an array; None: it is not set."""
        if name in ("@", "*"):
            self.passes_arguments = True
            return self.arguments
        if name == "0":
            return [self._name]
        if name == "#":
            return [str(len(self.words) + len(self.arguments))]
        if name.isdigit():
            return self.words[int(name) - 1 : int(name)] or None
        return self.values.get(name)

    def _text_of(self, source: str) -> str:
        parts: tuple[Part, ...] = BashReader(source, self._name).word_parts()
        return "".join(self.expand(Word(parts), split=False))

    def _arithmetic(self, source: str) -> str:
        def number(found: re.Match[str]) -> str:
            name = found[1] or found[0]
            values = self.values_of(name)
            if values is None and not self.sees_all:
                return self.mark(f"the variable {name} may be set by a file or command that is not read")
            text = "".join((values or [""])[:1]).strip() or "0"
            if not MARK.search(text) and not re.fullmatch(r"[\d\s()+*/%-]+", text):
                return self.mark(f"$(({source})) is not read")
            return text if found[1] else f"({text})"  # $X is replaced as text, X is an expression of its own

        text = re.sub(r"\$\{?(\w+)\}?|[A-Za-z_]\w*", number, source)
        if "#" in text and not MARK.search(text):
            return self.mark(f"$(({source})) is not read")
        if MARK.search(text):
            return "".join(found[0] for found in MARK.finditer(text))
        try:
            return evaluate(text)
        except ValueError:
            return self.mark(f"$(({source})) is not read")


def _trimmed(value: str, form: str, pattern: str) -> str:
    """Return `${value%pattern}` and its kin."""
    cuts = range(len(value) + 1)
    if form in ("%", "##"):
        cuts = reversed(cuts)
    for cut in cuts:
        removed = value[cut:] if form.startswith("%") else value[:cut]
        if fnmatch.fnmatchcase(removed, pattern):
            return value[:cut] if form.startswith("%") else value[cut:]
    return value
