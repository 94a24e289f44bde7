"""Commands of a bash script that set variables: assignments, `export`, `unset`, `read`, `shift`, `set --`, `cd`."""

from __future__ import annotations

import re

from hwgrpo.migrate.imports.bash_braces import expand_braces
from hwgrpo.migrate.imports.bash_programs import folder_after
from hwgrpo.migrate.imports.bash_variables import BashVariables
from hwgrpo.migrate.imports.bash_words import Word
from hwgrpo.migrate.imports.script_command import MARK

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^]]*\])?(\+?)=")
_OTHER_PART = "\0"
"""What stands for a part that is quoted or an expansion."""
_FORMS = {"i": "as a number", "u": "in upper case", "l": "in lower case"}
"""Option of `declare` -> how it changes the values that are set."""
_NAME = re.compile(r"[A-Za-z_]\w*")


def assigned_name(word: Word) -> re.Match[str] | None:
    """Return the match of an assignment; it is as long as the parts before the value are many."""
    texts = (_OTHER_PART if part.quoted or part.expands else part.text for part in word.parts)
    return _ASSIGNMENT.match("".join(texts))


class BashSetters:
    """What sets the variables and arguments of a script."""

    def __init__(self, known: BashVariables) -> None:
        self._known = known
        self.functions: set[str] = set()
        """Names of the script's functions."""
        self.in_function = False
        """Whether the statement that is read is in the body of a function."""
        self.exported: list[str] = []
        """Names of variables of the environment that the script sets."""
        self._set_in_functions: set[str] = set()

    def fields(self, words: list[Word]) -> list[str]:
        """Return the fields that words become."""
        return [each for word in words for each in self._known.expand(word)]

    def unset(self, words: list[Word]) -> None:
        """Run `unset`."""
        for each in (name for word in words for name in ([word.literal] if word.literal else self.fields([word]))):
            name, of_array, _ = each.partition("[")
            if self.in_function:
                self._set_in_functions.add(name)
            elif of_array:
                self._known.set_unknown(name, f"an element of {name} is unset")
            elif self._known.why is None:
                self._known.unset_variable(each)
            else:
                self._known.set_unknown(each, f"{each} is unset under {self._known.why}")

    def mark_changed(self, line: int, name: str, words: list[Word]) -> None:
        """Make the variables unknown that a command sets in a way that is not read."""
        texts = [word.literal or "" for word in words[1:]]
        changed: list[str] = []
        if name in self.functions:
            changed = sorted(self._set_in_functions)
            self._known.budget.spend(len(changed), self._known.place())
        elif name == "printf" and texts[:1] == ["-v"]:
            changed = texts[1:2]
        elif name in ("pushd", "popd"):
            changed = ["PWD"]
        elif name in ("mapfile", "readarray"):
            changed = [text for text in texts if _NAME.fullmatch(text)]
        for each in changed:
            self._known.set_unknown(each, f"{each} is set by {name} in line {line}")

    def change_arguments(self, name: str, words: list[Word]) -> None:
        """Let `shift` and `set --` change `$1`, `$2`, ..., but not those of a function."""
        if self.in_function:
            return
        options = [word.literal for word in words]
        if name == "shift":
            fields, arguments = self.fields(words[1:]), self._known.arguments
            count = self._known.plain(fields[0]) if fields else "1"
            if any(map(MARK.search, [count, *arguments[:1]])) or not count.isdecimal() or len(count) > 9:
                self._known.set_arguments([self._known.mark("the number of arguments is not known")])
            elif int(count) <= len(arguments):
                self._known.set_arguments(arguments[int(count) :])
        elif name == "set" and "--" in options:
            self._known.set_arguments(self.fields(words[options.index("--") + 1 :]))

    def change_folder(self, fields: list[str]) -> None:
        """Let `cd` change `$PWD`."""
        folder = folder_after(self._known.folder(), [*map(self._known.plain, fields)])
        if folder is not None and not MARK.search(folder):
            self._known.assign("PWD", [folder])
        else:
            self._known.set_unknown("PWD", f"the folder is changed by cd in line {self._known.line}")

    def declare(self, line: int, name: str, words: list[Word]) -> None:
        """Run `export`, `declare` and their kin."""
        options = "".join(word.literal or "" for word in words if (word.literal or "").startswith("-"))
        before, after = self._known.values, {}
        budget, place = self._known.budget, self._known.place()
        for word in [each for one in words for each in expand_braces(one, budget, place)]:
            budget.spend(len(before), place)
            self._known.values = dict(before)  # bash expands all words before it sets the first
            found = assigned_name(word)
            declared = found[1] if found else word.literal or ""
            if found:
                self.assign(word)
                self.exported += [declared] if name == "export" else []
            elif word.literal is None:  # export "$X"
                self._known.sees_all = False
            for option, form in _FORMS.items():
                if option in options and found:
                    self._known.set_unknown(declared, f"{declared} is declared {form} in line {line}")
            if "A" in options and _NAME.fullmatch(declared):
                self._known.set_unknown(declared, f"{declared} is an associative array, in line {line}")
            after |= {key: value for key, value in self._known.values.items() if before.get(key) is not value}
        self._known.values = before | after

    def assign(self, word: Word) -> None:
        """Set the variable of an assignment."""
        found = assigned_name(word)
        assert found is not None
        name, _, adds = found.groups()
        index = "".join(part.text for part in word.parts[found.start(2) : found.end(2)])
        if self.in_function:
            self._set_in_functions.add(name)  # unknown from the first call on
            return
        old = self._known.values.get(name, [])
        if word.elements is not None:
            if any((each.literal or "").startswith("[") for each in word.elements):
                self._known.set_unknown(name, f"elements of {name} are set by their index")
                return
            values = self.fields([*word.elements])
            self._known.assign(name, [*old, *values] if adds else values)
            return
        value = "".join(self._known.expand(Word(word.parts[len(found[0]) :]), split=False, assigned=True))
        if index:
            self._known.assign_element(name, index[1:-1], value, bool(adds))
        else:
            self._known.assign(name, ["".join(old[:1]) + value, *old[1:]] if adds else [value, *old[1:]])
