"""Variables of a bash script and the words that expand to them; what is not known becomes a mark with a reason."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping, Sequence

from hwgrpo.migrate.imports.bash_arithmetic import evaluate
from hwgrpo.migrate.imports.bash_braces import expand_braces
from hwgrpo.migrate.imports.bash_programs import is_installed, output_of
from hwgrpo.migrate.imports.bash_words import BashReader, Part, Word
from hwgrpo.migrate.imports.reading_budget import Budget, check_depth
from hwgrpo.migrate.imports.script_command import KEPT, MARK, KeptVariable
from hwgrpo.migrate.imports.variable_secrets import is_structure, may_be_secret

_EXPANSION = re.compile(r"\$\{(#?)([A-Za-z_]\w*|\d+|[@*#])(\[[^]]*\])?(.*)\}", re.DOTALL)
_FORM = re.compile(r":?[-=+?]|%%?|##?|/[/#%]?|\^\^?|,,?|:")
_ALL = re.compile(r"\$(?:@|\{@|\{\w+\[@\])")
_SET_BY_BASH = re.compile(
    "S?RANDOM|SECONDS|LINENO|EPOCH(?:SECONDS|REALTIME)|HOSTNAME|(?:HOST|MACH|OS)TYPE|E?UID|PPID|SHLVL|BASH(?:_?[A-Z]+)?"
    "|SHELLOPTS|FUNCNAME|GROUPS|DIRSTACK|PIPESTATUS|OPTIND|(?:OLD)?PWD|IFS|PATH|TERM|_"
)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NAMED = re.compile(r"[A-Za-z_]\w*=")
_WILD = "\ud804"
"""What stands before a character that is not quoted, and by which bash may replace a word by names of files."""
_FILES = re.compile(rf"{_WILD}[*?]|(?<=.){_WILD}\[.+?\]", re.DOTALL)
"""What makes a word a pattern of names of files; one that begins with a bracket is a list of Hydra."""
_SETTING = re.compile(r"[-+~]{0,2}[A-Za-z_][\w.@/-]*=")
"""How a word begins that is the name of no file."""
_NUMBER = re.compile(r"\s*[-+]?[0-9]{1,40}\s*")
_LONGEST_SOURCE = 80
"""Characters of a piece of a script that a reason shows."""
_LONGEST_REASON = 300
_CASES = {"^^": str.upper, ",,": str.lower}


_EVALUATION = 20
"""What the value of a variable in an expression counts beside its characters."""
_DIGITS = 9
"""Of the number of an argument."""
_OF_SHELL = ("PWD", "OLDPWD", "IFS")


def _is_kept(name: str, value: str) -> bool:
    """Return whether a variable is a mark: what is read of a list, a mapping or settings depends on their text."""
    if not value or not _NAME.fullmatch(name) or name in _OF_SHELL:
        return False
    return not is_structure(value) or may_be_secret(name, value)


class _UnknownError(Exception):
    """Arithmetic needs what is not known; its argument is the marks."""


class BashVariables:
    """The variables and arguments of a script, as far as they are known.

    Values of the environment are marks, too, so that they are in no recipe or table; an operation that needs the text
    of one takes it, unless it may be a secret.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        path: str | None = None,
        fixed: Mapping[str, str] | None = None,
    ) -> None:
        self._name, self._path = name, path
        self._fixed = fixed or {}
        environment = {key: value for key, value in environment.items() if key not in self._fixed}
        self.budget, self._depth = Budget("the words of the script"), 0
        self.kept = [
            KeptVariable(key, value, may_be_secret(key, value))
            for key, value in environment.items()
            if _is_kept(key, value)
        ]
        """Variables of the environment whose values are marks."""
        self.arguments = [*arguments]
        """`$1`, `$2`, ...; one mark where they are not known."""
        self.values: dict[str, list[str]] = {key: [value] for key, value in environment.items()}
        self.values |= {each.name: [f"\ud802{i}\ud803"] for i, each in enumerate(self.kept)}
        self.values |= {key: [value] for key, value in self._fixed.items()}
        if path is not None:
            self.values["BASH_SOURCE"] = [path]
        self.unknown: list[str] = []
        """The reason of each mark."""
        self.sees_all = True
        """Whether a variable that seems unset is."""
        self.unset: dict[int, str] = {}
        """Place in `unknown` -> the variable that is not set."""
        self.asked: dict[str, None] = {}
        """What the script asks of the machine, and what this one answers, for notices."""
        self.line = 1
        """The line that is read, for reasons."""
        self.why: str | None = None
        """Why what is read may not be run; what it sets is then unknown."""

    def mark(self, reason: str) -> str:
        """Return a mark for an unknown piece."""
        reason = reason if len(reason) <= _LONGEST_REASON else f"{reason[:_LONGEST_REASON]}..."
        self.budget.spend(len(reason), self.place())
        self.unknown.append(f"{self._name}, line {self.line}: {reason}")
        return f"\ud800{len(self.unknown) - 1}\ud801"

    def place(self) -> str:
        """Return the line that is read, for errors."""
        return f"{self._name}, line {self.line}"

    def plain(self, text: str, *, number: bool = False) -> str:
        """Return a text with the values of variables, for what needs it; a mark stands for those that may be secret.

        Args:
            text: with marks of variables.
            number: whether only numbers are of use.
        """

        def value_of(found: re.Match[str]) -> str:
            each = self.kept[int(found[1])]
            if number and not _NUMBER.fullmatch(each.value):
                return self.mark(f"the variable {each.name} of the environment is no number")
            if each.is_secret and not number:
                return self.mark(f"it is made of the variable {each.name}, which may be a secret")
            return each.value

        return KEPT.sub(value_of, text)

    def set_unknown(self, name: str, reason: str) -> None:
        """Make the value of a variable unknown."""
        if name not in self._fixed:
            self.values[name] = [self.mark(reason)]

    def assign(self, name: str, values: list[str]) -> None:
        """Set a variable, or make it unknown where the statement may not be run."""
        self.budget.spend(sum(map(len, values)) + len(values), self.place())
        if name in self._fixed:
            return
        if self.why is None:
            self.values[name] = values
        else:
            self.set_unknown(name, f"{name} is set under {self.why}")

    def unset_variable(self, name: str) -> None:
        """Unset a variable."""
        if name not in self._fixed:
            self.values.pop(name, None)

    def assign_element(self, name: str, index: str, value: str, adds: bool) -> None:
        """Set an element of an array; the variable is unknown where its place is."""
        place, values = self.arithmetic(index), self.values.get(name, [])
        self.budget.spend(len(values), self.place())
        if not place.isdigit() or int(place) > len(values) or _is_unknown(values):
            self.set_unknown(name, f"{name}[{index}] is set by its index in line {self.line}")
            return
        old = values[int(place) : int(place) + 1] if adds else []
        self.assign(name, [*values[: int(place)], "".join(old) + value, *values[int(place) + 1 :]])

    def set_arguments(self, arguments: list[str]) -> None:
        """Set `$1`, `$2`, ..., or make them unknown where the statement may not be run."""
        self.arguments = arguments if self.why is None else [self.mark(f"the arguments are changed under {self.why}")]

    def expand(self, word: Word, *, split: bool = True, unset: str | None = None, assigned: bool = False) -> list[str]:
        """Return the fields that a word becomes.

        Args:
            word: the word.
            split: whether braces, spaces of values and arrays make several fields of it.
            unset: what a variable that is not set becomes; None: a mark.
            assigned: whether it is the value of an assignment.
        """
        self._depth += 1
        check_depth(self._depth, self.place())
        words = expand_braces(word, self.budget, self.place()) if split else [word]
        fields = [each for one in words for each in self._fields(self._with_home(one.parts, assigned), split, unset)]
        self._depth -= 1
        values = sum(len(self.kept[int(found[1])].value) for each in fields for found in KEPT.finditer(each))
        self.budget.spend(values + sum(map(len, fields)) + len(fields), self.place())
        return fields

    def _with_home(self, parts: tuple[Part, ...], assigned: bool) -> list[Part]:
        """Return parts with the `~` of one's home folder replaced."""
        texts = ["" if part.quoted or part.expands else part.text for part in (*parts, Part("/"))]
        home = Part("$HOME", quoted=True, expands=True)
        named = _NAMED.match("".join(text or "\0" for text in texts))  # an argument that looks like an assignment
        first = {0, *((named.end(),) if named else ())}
        begins = [i in first or ((assigned or named) and texts[i - 1] == ":") for i in range(len(parts))]
        return [
            home if texts[i] == "~" and begins[i] and texts[i + 1] in ("/", ":") else part
            for i, part in enumerate(parts)
        ]

    def _fields(self, parts: Sequence[Part], split: bool, unset: str | None) -> list[str]:
        fields: list[str] = []
        now: str | None = None
        for i, part in enumerate(parts):
            if not part.expands:
                opens = part.quoted and not part.text and i + 1 < len(parts) and parts[i + 1].expands
                if not (opens and _ALL.match(parts[i + 1].text)):  # "$@" without arguments is no field
                    now = (now or "") + (part.text if part.quoted or not split else _with_wild(part.text))
                continue
            values = self._values_of_part(part, unset)
            if split and not part.quoted:
                values = [_with_wild(self._separable(value)) for value in values]
            if self._depends_on_separators(part, values, split):
                values = [self.mark("IFS is set, by which bash joins and splits values")]
            if not split or (part.quoted and not _ALL.match(part.text)):
                now = (now or "") + " ".join(values)
                continue
            for j, value in enumerate(values):
                if now is not None and (j or (not part.quoted and value[:1].isspace())):
                    fields.append(now)
                    now = None
                pieces = [value] if part.quoted else value.split()
                if not pieces:
                    continue
                fields += [(now or "") + pieces[0], *pieces[1:-1]] if len(pieces) > 1 else []
                now = pieces[-1] if len(pieces) > 1 else (now or "") + pieces[0]
                if not part.quoted and value[-1:].isspace():
                    fields.append(now)
                    now = None
        return [self._without_wild(each) for each in (fields if now is None else [*fields, now])]

    def _without_wild(self, field: str) -> str:
        """Return a field as it is where it is no pattern; else a mark, since the names of files are not known."""
        text = field.replace(_WILD, "")
        if _FILES.search(field) and not _SETTING.match(text):
            return self.mark(f"{text[:_LONGEST_SOURCE]} is replaced by the names of files that match it")
        return text

    def _separable(self, text: str) -> str:
        """Return a text with the values of variables that separators make several fields of."""
        kept = [self.kept[int(found[1])] for found in KEPT.finditer(text)]
        separated = any(each.value.split() != [each.value] for each in kept)
        return self.plain(text) if separated else text

    def _depends_on_separators(self, part: Part, values: Sequence[str], split: bool) -> bool:
        """Return whether a script that sets IFS joins or splits values by it."""
        if "IFS" not in self.values:
            return False
        if not split or (part.quoted and not _ALL.match(part.text)):
            return len(values) > 1
        separators = {*" \t\n", *"".join(self.values["IFS"])}
        read = (KEPT.sub(lambda found: self.kept[int(found[1])].value, value) for value in values)
        return not part.quoted and any(separators & {*value} for value in read)

    def _values_of_part(self, part: Part, unset: str | None) -> list[str]:
        name = re.fullmatch(r"\$\{?([A-Za-z_]\w*|\d+)\}?", part.text)
        if unset is not None and name and self.values_of(name[1]) is None:
            return [unset]
        return self._expansion(part.text, quoted=part.quoted)

    def _expansion(self, source: str, *, quoted: bool = False) -> list[str]:
        """Return the values of an expansion: one, or those of an array."""
        self.budget.spend(len(source), self.place())
        shown = source if len(source) <= _LONGEST_SOURCE else f"{source[:_LONGEST_SOURCE]}..."
        if source.startswith("$((") and source.endswith("))"):
            return [self.arithmetic(source[3:-2])]
        if source.startswith("$["):
            return [self.arithmetic(source[2:-1])]
        if source.startswith(("<(", ">(")):
            return [self.mark(f"{shown} is the output of a program")]
        if source.startswith(("$(", "`")):
            return [self._output(source)]
        found = _EXPANSION.fullmatch(source if source.startswith("${") else f"${{{source[1:]}}}")
        form = _FORM.match(found[4]) if found is not None else None
        if found is None or (found[4] and (form is None or found[1])):
            return [self.mark(f"{shown} is not read")]
        counts, name, index, rest = found[1], found[2], found[3] or "", found[4]
        listed = name in ("@", "*") or index in ("[@]", "[*]")
        values = self.values_of(name)
        if index and not listed and values is not None:
            values = self._element(values, index[1:-1])
        elif values is not None and not listed:
            values = values[:1]
        if values is None and not self.sees_all and not name.isdigit():
            return [self.mark(f"the variable {name} may be set by a file or command that is not read")]
        if counts:
            return [self._counted(shown, [*map(self.plain, values or [])], listed)]
        if form is None:
            return [self._not_set(name)] if values is None else values
        operand = rest[form.end() :]
        if form[0].lstrip(":") in ("-", "=", "+", "?"):
            return self._replaced(name, values or None, form[0], operand, quoted)
        if values is None:
            return [self._not_set(name)]
        if form[0] == ":":
            values = [self._path or self._name, *values] if name in ("@", "*") else values
            return self._sliced(shown, values if listed else [*map(self.plain, values)], listed, operand)
        return [self._changed(shown, self.plain(value), form[0], operand) for value in values]

    def _not_set(self, name: str) -> str:
        if name.isdigit():
            return self.mark(f"the script has no argument ${name}")
        self.unset[len(self.unknown)] = name
        return self.mark(f"the variable {name} is not set")

    def _output(self, source: str) -> str:
        statements = BashReader(source[2:-1] if source.startswith("$(") else source[1:-1], self._name).statements()
        known = output_of(statements, self._plain_fields, self.folder(), self._ask)
        if known is None or MARK.search(known):
            return self.mark(f"{source[:_LONGEST_SOURCE]} is the output of a program")
        return known

    def _ask(self, package: str) -> bool:
        """Return whether a package of Python is installed here, which the script asks."""
        found = is_installed(package)
        self.asked[f"line {self.line}: the package {package} is {'' if found else 'not '}installed here"] = None
        return found

    def _plain_fields(self, word: Word) -> list[str]:
        return [*map(self.plain, self.expand(word))]

    def folder(self) -> str | None:
        """Return the folder in which the script is; None where it is not known."""
        return self.plain("".join(self.values.get("PWD", []))) or None

    def _element(self, values: list[str], index: str) -> list[str] | None:
        if _is_unknown(values):
            return values
        self.budget.spend(len(values), self.place())
        place = self.arithmetic(index)
        if MARK.search(place):
            return [place]
        at = int(place) + (len(values) if int(place) < 0 else 0)
        before = [each for each in values[: at + 1] if MARK.search(each)]
        return before[:1] or values[at : at + 1] or None if at >= 0 else None

    def _counted(self, source: str, values: list[str], listed: bool) -> str:
        """Return `${#X}`."""
        if any(MARK.search(each) for each in values):
            return self.mark(f"{source} is not known")
        return str(len(values) if listed else len("".join(values)))

    def _replaced(self, name: str, values: list[str] | None, form: str, operand: str, quoted: bool) -> list[str]:
        """Return `${X:-y}` and its kin."""
        missing = values is None or (form.startswith(":") and not "".join(values))
        sign = form.lstrip(":")
        if sign == "+":
            if values is not None and _is_unknown(values):
                return values
            return [] if missing else [self._text_of(operand, quoted=quoted)]
        if not missing:
            return values or []
        if sign == "?":
            return [self._not_set(name)]
        value = self._text_of(operand, quoted=quoted)
        if sign == "=":
            self.assign(name, [value])
        return [value]

    def _sliced(self, source: str, values: list[str], listed: bool, operand: str) -> list[str]:
        """Return `${X:0:4}`, or the same of arguments or an array."""
        first, _, size = operand.partition(":")
        numbers = [self.arithmetic(each) for each in (first, size or "0")]
        if any(MARK.search(each) for each in (*numbers, *values)):
            return [self.mark(f"{source} is not known")]
        all_: Sequence[str] = values if listed else values[0]
        start, wanted = int(numbers[0]), int(numbers[1])
        start += len(all_) if start < 0 else 0
        end = len(all_) if not size else (len(all_) if wanted < 0 else start) + wanted
        if start < 0:
            return [] if listed else [""]
        if wanted < 0 and (end < start or listed):
            return [self.mark(f"bash refuses {source}")]
        return [*values[start:end]] if listed else [values[0][start:end]]

    def _changed(self, source: str, value: str, form: str, operand: str) -> str:
        """Return `${X%y}`, `${X/y/z}`, `${X^^}` and their kin."""
        if form in ("%", "%%", "#", "##"):
            self.budget.spend(len(value) ** 2 // 100, self.place())
            trimmed = _trimmed(value, form, self.plain(self._text_of(operand)))
            lost = len(MARK.findall(trimmed)) < len(MARK.findall(value)) and len(form) == 1
            return self.mark(f"{source} is not known") if lost else trimmed
        if MARK.search(value):
            return self.mark(f"{source} is not known")
        if form in _CASES and not operand:
            return _CASES[form](value)
        if form in ("^", ",") and not operand:
            return _CASES[form * 2](value[:1]) + value[1:]
        cut = re.search(r"(?<!\\)/", operand)
        pattern, new = (operand[: cut.start()], operand[cut.end() :]) if cut else (operand, "")
        pattern, new = (self.plain(self._text_of(each)) for each in (pattern, new))
        if not form.startswith("/") or not pattern or re.search(r"[*?\[\\&$`]", pattern + new):
            return self.mark(f"{source} is not read")
        if form == "/#":
            return new + value.removeprefix(pattern) if value.startswith(pattern) else value
        if form == "/%":
            return value.removesuffix(pattern) + new if value.endswith(pattern) else value
        self.budget.spend(value.count(pattern) * len(new), self.place())
        return value.replace(pattern, new, -1 if form == "//" else 1)

    def values_of(self, name: str) -> list[str] | None:
        """Return the value of a variable or argument, several of an array; None: it is not set."""
        if name in ("@", "*"):
            return self.arguments
        if name == "0":
            return [self.mark("the name of the script is not known") if self._path is None else self._path]
        if name == "#" or name.isdecimal():
            if len(name) > _DIGITS:
                return None
            if _is_unknown(self.arguments):
                return self.arguments
            return [str(len(self.arguments))] if name == "#" else self.arguments[int(name) - 1 : int(name)] or None
        if name not in self.values and _SET_BY_BASH.fullmatch(name):
            return [self.mark(f"{name} is set by bash itself")]
        return self.values.get(name)

    def _text_of(self, source: str, *, quoted: bool = False) -> str:
        parts: tuple[Part, ...] = BashReader(source, self._name).word_parts(quoted=quoted)
        return "".join(self.expand(Word(parts), split=False))

    def arithmetic(self, source: str) -> str:
        """Return the value of an expression, or marks."""
        text = self.plain(self._text_of(source), number=True)
        if MARK.search(text):
            return "".join(found[0] for found in MARK.finditer(text))
        try:
            return str(evaluate(text, self))
        except _UnknownError as error:
            return str(error)
        except (ValueError, RecursionError) as error:
            return self.mark(f"bash refuses $(({source[:_LONGEST_SOURCE]})): {str(error)[:_LONGEST_SOURCE]}")

    def text(self, name: str, index: int) -> str:
        """Return the text of a variable or element for an expression; "" where it is not set."""
        values = self.values_of(name)
        if values is None and not self.sees_all:
            raise _UnknownError(self.mark(f"the variable {name} may be set by a file or command that is not read"))
        found = "".join((self._element(values, str(index)) if values else None) or "")
        found = self.plain(found, number=True)
        self.budget.spend(len(found) + _EVALUATION, self.place())
        if marks := MARK.search(found):
            raise _UnknownError(marks[0])
        return found

    def set_number(self, name: str, index: int | None, value: int) -> None:
        """Set a variable, or an element of an array, from an expression."""
        if index is None:
            self.assign(name, [str(value)])
        else:
            self.assign_element(name, str(index), str(value), adds=False)


def _with_wild(text: str) -> str:
    """Return a text that is not quoted with its wild characters marked."""
    return re.sub(r"[*?\[]", lambda found: _WILD + found[0], text)


def _is_unknown(values: list[str]) -> bool:
    """Return whether nothing of a variable is known, its number of elements neither."""
    return len(values) == 1 and MARK.sub("", values[0]) == "" and values[0] != ""


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
