"""The verl command in a bash run script: its arguments, found by reading. Nothing of a script is ever run.

Read are assignments, arrays, `export`, quotes, `$X`, `${X:-y}` and its kin, `$((...))`, and arguments (`"$@"`).
Commands other than verl's are left out. Conditions that compare known variables are evaluated (shell_conditions.py);
what depends on another condition, a loop or another program is unknown, which is an error only where the verl command
needs it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hwgrpo.errors import ConfigError
from hwgrpo.migrate.imports.bash_setters import BashSetters, assigned_name
from hwgrpo.migrate.imports.bash_variables import BashVariables
from hwgrpo.migrate.imports.bash_words import BashReader, Statement, Word
from hwgrpo.migrate.imports.reading_budget import check_depth
from hwgrpo.migrate.imports.script_command import MARK, VerlCommand
from hwgrpo.migrate.imports.shell_conditions import Block, Operand, Truth, both, either, evaluate_test, negated
from hwgrpo.migrate.imports.variable_secrets import looks_secret
from hwgrpo.support.text import is_secret

MODULES = (
    "verl.trainer.main_ppo",
    *(f"verl.trainer.main_ppo_{each}" for each in ("v0", "sync")),
    "recipe.dapo.main_dapo",
    "recipe.entropy.main_entropy",
)
"""Programs whose arguments are verl's settings; the last two read main_ppo's, and methods that main_ppo has by now."""
ENTRY = re.compile(rf"(?:.*/)?(?:{'|'.join(each.replace('.', '[./]') for each in MODULES)})(?:\.py)?")
"""What names one of them in a command."""
_OTHER = re.compile(r"(?:verl|recipe)\.[\w.]*main\w*")
ANY_ENTRY = re.compile(r"(?:.*/)?(?:verl|recipe)[./][\w./]*main\w*")
"""What names any program of verl in a command."""
_OPENS = ("if", "for", "while", "until", "case", "select", "{", "(")
_CLOSES = ("fi", "done", "esac", "}", ")")
_PIPES = ("|", "|&")
_IN_SUBSHELLS = (*_PIPES, "&")
"""What ends a command that runs in a shell of its own."""
_GO_ON = (";&", ";;&")
"""What ends a branch of `case` and lets others run."""
_WILD = re.compile(r"[*?\[\\]")
_THEN = ("then", "else", "elif", "do", "!", "time")
_DECLARES = ("export", "declare", "local", "readonly", "typeset")
_TESTS = ("[", "[[", "test")
_CONSTANTS = {"true": True, ":": True, "false": False}
_NEVER = ("echo", "printf", *_CONSTANTS, *_TESTS)
"""Commands that only print or compare."""
_ASKS = ("grep", "command", "which", "type", "false", "ls", "nvidia-smi", "npu-smi")
"""Commands that fail as often as they succeed."""
_SUCCEEDS = ("echo", *_DECLARES, "set", "unset", "shift")
"""Commands that do not fail."""
_RUNS_PROGRAM = re.compile(r"\$\((?!\()|`")
_SETS = ("{", *_DECLARES, "exit", "let")
"""What counts only where it is known to be run, beside assignments."""
_CHANGED = re.compile(r"([A-Za-z_]\w*)\s*(?:[-+*/%]?=(?!=)|\+\+|--)")
MOST_SCRIPT = 100_000
"""Characters of a script that is read; the longest known has 20,000."""
_SETS_ANYTHING = ("source", ".", "eval")
"""Commands after which a variable that seems unset may be set."""
_SETS_PATHS = re.compile(r"/set_env\.sh|/activate|/conda\.sh|conda shell\.\w+ hook")
"""What they read that sets the paths of programs alone: CANN's file, environments of Python."""


def read_script(
    text: str,
    name: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    module: re.Pattern[str] = ENTRY,
    path: str | None = None,
    fixed: Mapping[str, str] | None = None,
) -> VerlCommand:
    """Return the verl command of a script.

    Args:
        text: the script.
        name: its name, for messages.
        arguments: those of the script, `$1`, `$2`, ...; `key=value` ones that it does not use are added to the command.
        environment: variables that are set when it starts.
        module: what names verl's program in a command.
        path: that of the script, `$0`; None: not known.
        fixed: variables whose value is this one, whatever the script sets.

    Raises:
        ConfigError: there is no such command, there are several, or one depends on a condition; it names the line.
    """
    known = BashVariables(name, arguments, environment, path, fixed)
    return _Script(text, name, known, arguments, module).read()


@dataclass(frozen=True)
class _Group:
    """`{ ...; }` or `( ... )`, whose status counts in the list of commands around it."""

    block: Block
    before: Truth
    """The status of the command before it."""
    likely: Truth
    """The same, if what seldom fails did not."""
    after: str
    """The operator before it."""
    begins: bool
    """Whether it begins a condition."""
    inverted: bool


@dataclass(frozen=True)
class _State:
    """What a shell of its own cannot change for the script."""

    values: dict[str, list[str]]
    arguments: list[str]
    stops_at_failure: bool


@dataclass
class _Starts:
    """Where the commands that are read at a level of compound commands began; None: where nothing is forgotten."""

    listed: _State | None = None
    """Before the list of commands that `&&` and `||` join."""
    command: _State | None = None
    """Before the command of a pipeline."""
    is_piped: bool = False
    """Whether the command is behind `|`."""


class _Script:
    def __init__(
        self,
        text: str,
        name: str,
        known: BashVariables,
        arguments: Sequence[str],
        module: re.Pattern[str],
    ) -> None:
        self._module = module
        self._reader = BashReader(text, name)
        if len(text) > MOST_SCRIPT:
            raise ConfigError(
                f"{name} has {len(text)} characters, more than {MOST_SCRIPT}, as no run script has; copy the command "
                "alone into a file"
            )
        self._name = name
        self._arguments = arguments
        self._known, self._setters = known, BashSetters(known)
        self._left_out: list[str] = []
        self._blocks: list[Block] = []
        self._groups: list[_Group] = []
        self._defines = False
        self._subshells: list[tuple[Block, _State]] = []
        self._starts: list[_Starts] = [_Starts()]
        """One for each open block, and one for the script."""
        self._last: Truth = True
        """The status of the last command."""
        self._likely: Truth = True
        """The same, if the programs that seldom fail did not: enough to reach the verl command behind `&&`."""
        self._succeeds = True
        """Whether a status that is not known is of a program that seldom fails."""
        self._runs: Truth = True
        """Whether the pipeline that is read is run."""
        self._why_ends = ""
        self._stops_at_failure = False
        """Whether a command that fails ends the script, `set -e`."""
        self._ends_in = ""
        """The operator behind the command that is read."""
        self._ends: int | None = None
        """The line that ends the script, or the shell in which it turns out to be run."""
        self._ends_at = 0
        """The number of blocks around it that are still open."""
        self._ends_listed = False
        """Whether it is in the list of commands that is read, which `&` may end."""
        self._found: list[tuple[int, VerlCommand]] = []

    def read(self) -> VerlCommand:
        """Interpret the statements."""
        statements = self._reader.statements()
        may_be_in_subshell = _may_be_in_subshell(statements)
        for each, isolated in zip(statements, may_be_in_subshell, strict=True):
            self._known.line = each.line
            if not self._is_pattern(each):
                self._begin(each, isolated)
                self._run(each)
                self._finish(each)
            if self._ends is not None and self._is_end(each):
                break
        if not self._found:
            if self._ends is not None:
                raise ConfigError(
                    f"{self._name}, line {self._ends}: the script ends here{self._why_ends}, before the verl command"
                )
            raise ConfigError(
                f"{self._name} has no command `python3 -m {MODULES[0]}`: name a run script that has one, or give "
                "its settings as key=value"
            )
        if len(self._found) > 1:
            lines = " and ".join(str(line) for line, _ in self._found)
            raise ConfigError(f"{self._name} has {len(self._found)} verl commands, in lines {lines}: keep one of them")
        command = self._found[0][1]
        command.kept, command.unset = self._known.kept, self._known.unset
        unused = [each for each in self._arguments if "=" in each and not any(each in it for it in command.marked)]
        if unused:
            command.marked += unused
            command.notices.append(
                f'the script has no "$@" that passes {" ".join(unused)} to its command, so that bash would ignore it'
            )
        command.notices = [*map(command.named, [*command.notices, *self._reader.notices, *self._summary()])]
        return command

    def _summary(self) -> list[str]:
        notices = [
            f"{each}, which decides the script's test for it; the other way is --set NAME=VALUE"
            for each in self._known.asked
        ]
        if self._setters.exported:
            names = ", ".join(dict.fromkeys(self._setters.exported))
            notices.append(f"environment variables of the script are not part of a recipe: {names}")
        if self._left_out:
            notices.append(f"left out: {', '.join(dict.fromkeys(self._left_out))}")
        return notices

    def _begin(self, statement: Statement, isolated: bool) -> None:
        """Keep the state before a command that may run in a shell of its own."""
        starts, self._ends_in = self._starts[-1], statement.ends
        state = self._state() if isolated else None
        if statement.after not in (*_PIPES, "&&", "||"):
            starts.listed = state
        starts.command, starts.is_piped = state, statement.after in _PIPES

    def _finish(self, statement: Statement) -> None:
        """Forget what a command set in a shell of its own: behind or before `|`, or before `&`."""
        starts = self._starts[-1]
        if starts.command is not None and (starts.is_piped or statement.ends in _PIPES):
            self._restore(starts.command)
        if starts.listed is not None and statement.ends == "&":
            self._restore(starts.listed)

    def _state(self) -> _State:
        self._known.budget.spend(len(self._known.values), self._known.place())
        return _State(dict(self._known.values), self._known.arguments, self._stops_at_failure)

    def _restore(self, state: _State) -> None:
        self._known.values, self._known.arguments = dict(state.values), state.arguments
        self._stops_at_failure = state.stops_at_failure

    def _end_at(self, line: int, why: str = "") -> None:
        """End the script, unless a block around the command turns out to run in a shell of its own."""
        self._ends, self._why_ends = line, why
        self._ends_at, self._ends_listed = len(self._blocks), True

    def _is_end(self, statement: Statement) -> bool:
        """Return whether the script is known to end, once the end of the blocks around its last command is read."""
        depth = len(self._blocks)
        closed = depth < self._ends_at
        if depth > self._ends_at or not (closed or self._ends_listed):
            return False
        self._ends_at = depth
        if statement.ends == "&" or (closed and statement.ends in _PIPES):
            self._ends, self._why_ends = None, ""
            return False
        self._ends_listed = statement.ends in ("&&", "||", *_PIPES)
        return depth == 0 and not self._ends_listed

    def _run(self, statement: Statement) -> None:
        """Interpret a statement, which is run or not by the status of the one before it."""
        first = statement.words[0].literal
        if statement.after not in _PIPES:
            sets = first in _SETS or assigned_name(statement.words[0]) or (first or "").startswith("((")
            passed = self._last if sets else self._likely
            self._runs = {"&&": passed, "||": negated(self._last)}.get(statement.after, True)
        if self._runs is not False or first in (*_OPENS, *_CLOSES, *_THEN, "function"):
            self._interpret(statement, self._runs)

    def _is_pattern(self, statement: Statement) -> bool:
        """Return whether a statement is of the patterns of a branch of `case`, which are taken in."""
        block = self._blocks[-1] if self._blocks else None
        if block is None or block.kind != "case":
            return False
        if statement.after in (";;", *_GO_ON) and not block.in_patterns:
            block.begin_patterns(statement.after)
        if not block.in_patterns or statement.words[0].literal == "esac":
            return False
        self._add_patterns(block, statement.words)
        return True

    def _add_patterns(self, block: Block, words: Sequence[Word]) -> None:
        for word in words:
            if word.literal == ")":
                block.begin_case_branch()
            elif word.literal == "(" and block.patterns:  # of an extended pattern, @(a|b)
                block.condition, block.subject = None, Operand(None, plain=False)
            elif word.literal != "(":
                fields = self._known.expand(word, split=False, unset="" if self._known.sees_all else None)
                plain = not any(part.expands or (part.quoted and _WILD.search(part.text)) for part in word.parts)
                block.add_pattern(self._operand("".join(fields), plain))

    def _interpret(self, statement: Statement, runs: Truth) -> None:
        """Interpret a statement that is run, is not, or may be (None)."""
        words, after, inverted, begins = list(statement.words), statement.after, False, False
        while words:
            literal = words[0].literal
            block = self._blocks[-1] if self._blocks else None
            if literal == "function":
                self._setters.functions |= {words[1].literal or ""} if len(words) > 1 else set()
                self._defines, words = True, [word for word in words[2:] if word.literal != "()"]
            elif literal in _OPENS:
                if self._open(literal, statement.line, words, runs):
                    group = _Group(self._blocks[-1], self._last, self._likely, after, begins, inverted)
                    self._groups.append(group)
                    self._last, self._likely, after, inverted = True, True, ";", False
                begins = literal == "if"
                words = words[1:] if literal in ("if", "while", "until", "{", "(") else []
            elif literal in _CLOSES:
                self._close(literal)
                words = words[1:]
                if not words:
                    return
            elif literal in _THEN:
                if block is not None and block.kind == "if" and literal == "elif":
                    block.begin_condition()
                    begins = True
                elif block is not None and block.kind == "if" and literal in ("then", "else"):
                    block.begin_branch(block.condition if literal == "then" else True)
                inverted = inverted != (literal == "!")
                words = words[1:]
            else:
                break
        is_command = bool(words)
        status = self._status(words, statement.line, runs)
        if is_command and status is False and not inverted and after not in _PIPES:
            self._end_by_failure(statement)
        likely = True if status is None and self._succeeds else status
        self._end(status, likely, (self._last, self._likely), after, inverted, begins=begins, tested=is_command)

    def _end_by_failure(self, statement: Statement) -> None:
        """End the script after `set -e` where a command fails that no condition or `&&` asks for."""
        asked = statement.ends in ("&&", "||", *_IN_SUBSHELLS) or any(block.testing for block in self._blocks)
        if not self._stops_at_failure or asked or self._known.why is not None:
            return
        if all(block.kind in ("if", "case") for block in self._blocks):
            self._end_at(statement.line, ", by a command that fails after set -e")
        else:
            self._reader.notices.append(f"line {statement.line}: a command fails, which may end the script by set -e")

    def _end(
        self,
        status: Truth,
        likely: Truth,
        before: tuple[Truth, Truth],
        after: str,
        inverted: bool,
        *,
        begins: bool,
        tested: bool = True,
    ) -> None:
        """Take in the status of a command or group behind an operator, and behind `!` if it is inverted."""
        if inverted:
            status = likely = negated(status)
        if after in _PIPES:
            status = None  # `!` before a pipeline is that of its last command
        if tested:
            self._add_to_condition(status, ";" if begins else after)
        self._last, self._likely = _joined(after, before[0], status), _joined(after, before[1], likely)

    def _add_to_condition(self, status: Truth, after: str) -> None:
        if self._blocks and self._blocks[-1].testing:
            self._blocks[-1].add_to_condition(status, after)

    def _open(self, kind: str, line: int, words: list[Word], runs: Truth) -> bool:
        """Open a compound command; return whether it is a group, whose status is that of its last command."""
        if kind in ("for", "select") and len(words) > 1 and (name := words[1].literal) and not self._is_dead(runs):
            for changed in [found[1] for found in _CHANGED.finditer(name)] if name.startswith("((") else [name]:
                self._known.set_unknown(changed, f"{changed} is set by the loop in line {line}")
        is_group = kind == "(" or (kind == "{" and not self._defines)
        check_depth(len(self._blocks), self._known.place())
        kind, self._defines = "function" if self._defines else kind, False
        block = Block(kind, line, runs, runs if is_group else None if runs else runs)
        self._blocks.append(block)
        before = self._starts[-1]
        self._starts.append(_Starts(before.command, before.command))
        if kind == "(":
            self._subshells.append((block, self._state()))
        if kind == "if":
            block.begin_condition()
        if kind == "case":
            unset = "" if self._known.sees_all else None
            text = "".join(self._known.expand(words[1], split=False, unset=unset)) if len(words) > 1 else ""
            block.subject = self._operand(text, plain=False)
            block.why = "; ".join(["is not evaluated", *VerlCommand([], unknown=self._known.unknown).reasons(text)])
            block.begin_patterns(";;")
            self._add_patterns(block, words[3:])
        return is_group

    def _close(self, literal: str) -> None:
        """Close a compound command, and take in its status; what a subshell set is forgotten."""
        status, likely = self._last, self._likely
        self._last = self._likely = None
        if literal == ")" and self._blocks and self._blocks[-1].kind != "(":  # of an extended pattern in `case`
            return
        closed = self._blocks.pop() if self._blocks else None
        self._starts[1:] = self._starts[1:-1]
        self._runs = closed.runs if closed is not None else True
        if self._subshells and self._subshells[-1][0] is closed:
            self._restore(self._subshells.pop()[1])
        if self._groups and self._groups[-1].block is closed:
            group = self._groups.pop()
            before = group.before, group.likely
            self._end(status, likely, before, group.after, group.inverted, begins=group.begins)

    def _is_dead(self, runs: Truth) -> bool:
        """Return whether a statement is known not to be run."""
        return runs is False or self._ends is not None or any(block.live is False for block in self._blocks)

    def _status(self, words: list[Word], line: int, runs: Truth) -> Truth:
        """Run a simple command; return whether it succeeds, None where that is not known."""
        if not words or words[-1].literal == "()":  # the body of a function is read as one that may be called
            self._setters.functions |= {word.literal or "" for word in words[:-1]}
            self._defines = self._defines or bool(words)
            return True
        self._succeeds, name = False, words[0].literal or ""
        if self._is_dead(runs):
            return None
        self._known.why = self._condition(runs is not True)
        self._setters.in_function = any(block.kind == "function" for block in self._blocks)
        if name.startswith("(("):
            return self._is_number_true(name[2:-2])
        if name == "let":
            sources = ["".join(self._known.expand(word, split=False)) for word in words[1:]]
            return [None, *map(self._is_number_true, sources)][-1]
        if name in _TESTS:
            return self._test(words)
        asks_python = len(words) > 1 and words[1].literal == "-c"
        self._succeeds = name not in _ASKS and not asks_python
        succeeds = name in _SUCCEEDS or all(map(_is_plain_assignment, words))
        self._simple(line, words)
        return _CONSTANTS.get(name, True if succeeds else None)

    def _is_number_true(self, source: str) -> Truth:
        """Return whether the value of an expression is another than 0."""
        value = self._known.arithmetic(source)
        if MARK.search(value):
            for changed in _CHANGED.finditer(source):
                self._known.set_unknown(changed[1], f"{changed[1]} is set by (({source}))")
            return None
        return value != "0"

    def _test(self, words: list[Word]) -> Truth:
        double, ends = words[0].literal == "[[", {"[": "]", "[[": "]]"}.get(words[0].literal or "")
        inner = words[1:]
        if ends is not None:
            if not inner or inner[-1].literal != ends:
                return None
            inner = inner[:-1]
        operands: list[Operand] = []
        for word in inner:
            fields = self._known.expand(word, split=not double, unset="" if self._known.sees_all else None)
            plain = word.literal is not None
            operands += [self._operand(each, plain) for each in fields]
            if double and not fields:
                operands.append(Operand("", plain))
        return evaluate_test(operands, double=double)

    def _operand(self, text: str, plain: bool) -> Operand:
        command = VerlCommand([], kept=self._known.kept)
        secret = any(is_secret(each.name) or looks_secret(each.value) for each in command.kept_in(text))
        return Operand(None if MARK.search(text) else command.in_bash(text), plain, secret)

    def _condition(self, conditional: bool) -> str | None:
        """Return why a statement may not be run, or None if it is."""
        for block in self._blocks:
            if block.live is None:
                return f"the `{block.kind}` in line {block.line}, which {block.why}"
        return f"the condition in line {self._known.line}, which is not evaluated" if conditional else None

    def _set_options(self, words: Sequence[Word]) -> None:
        """Read the options of `set` that begin or end `set -e`, as far as it is known to be run."""
        rest = iter([word.literal or "" for word in words])
        for option in rest:
            if not re.fullmatch(r"[-+][A-Za-z]+", option):
                return  # from here on they are the script's arguments
            names = [next(rest, "") for _ in range(option.count("o"))]
            if "e" in option or "errexit" in names:
                self._stops_at_failure = option.startswith("-") and self._known.why is None

    def _is_isolated(self) -> bool:
        """Return whether the command that is read is known to run in a shell of its own."""
        return self._ends_in in _IN_SUBSHELLS or any(each.is_piped for each in self._starts)

    def _simple(self, line: int, words: list[Word]) -> None:
        why = self._known.why
        assigned = []
        while words and assigned_name(words[0]):
            assigned.append(words.pop(0))
        if not words:
            for word in assigned:
                self._setters.assign(word)
            return
        name = words[0].literal or "".join(self._known.expand(words[0])[:1])
        if name in _DECLARES:
            self._setters.declare(line, name, words[1:])
            return
        if name == "read":
            for word in words[1:]:
                self._known.set_unknown(word.literal or "", f"it is read from the terminal in line {line}")
        if name == "unset":
            self._setters.unset(words[1:])
            return
        if name == "exit" and why is None:
            if not self._subshells and not self._is_isolated():
                self._end_at(line)
            return
        if name == "set" and not self._setters.in_function and not self._subshells:
            self._set_options(words[1:])
        self._setters.mark_changed(line, name, words)
        self._setters.change_arguments(name, words)
        text = " ".join("".join(part.text for part in word.parts) for word in words[1:])
        self._known.sees_all = self._known.sees_all and (
            name not in _SETS_ANYTHING or _SETS_PATHS.search(text) is not None
        )
        fields = self._setters.fields(words)  # also of `: ${X:=5}`, which sets X
        if name in _NEVER or not fields:
            return
        if name == "cd":
            self._setters.change_folder(fields[1:])
        passed = VerlCommand([], kept=self._known.kept)
        place = next((i for i, each in enumerate(fields) if self._module.fullmatch(passed.in_bash(each))), None)
        if place is None:
            self._refuse_look_alikes(line, [*map(passed.named, fields)])
            self._left_out.append(
                MARK.sub("...", " ".join(fields[:2] if name in ("ray", "pip", "set") else fields[:1]))
            )
            return
        if name == "eval":
            raise ConfigError(f"{self._name}, line {line}: eval reads the command again; write the command itself")
        if why is not None:
            raise ConfigError(
                f"{self._name}, line {line}: the verl command depends on {why}; copy the command alone into a file"
            )
        self._setters.exported += [found[1] for word in assigned if (found := assigned_name(word))]
        self._found.append((line, self._command(line, fields[place + 1 :])))

    def _refuse_look_alikes(self, line: int, fields: list[str]) -> None:
        other = next((each for each in fields if _OTHER.fullmatch(each)), None)
        if other is not None and "main_generation" not in other:
            raise ConfigError(
                f"{self._name}, line {line}: {other} is no entry point whose settings are known, as those of "
                f"{', '.join(MODULES)}; with --entry main_ppo they are read as its settings"
            )
        if re.match(r"[+~]{0,2}[A-Za-z_]\w*\.[\w.]+=", fields[0]):
            raise ConfigError(
                f"{self._name}, line {line}: {fields[0]!r} is outside the verl command; end the line before with a "
                "backslash"
            )

    def _command(self, line: int, fields: list[str]) -> VerlCommand:
        command = VerlCommand([], unknown=self._known.unknown)
        rest = iter(fields)
        for each in rest:
            option, equals, value = each.partition("=")
            if option in ("--config-name", "-cn", "--config-path", "-cp"):
                value = value if equals else next(rest, "")
                if option in ("--config-name", "-cn"):
                    command.config_name = value.removesuffix(".yaml")
                else:
                    command.config_path = value
            elif each.startswith("-") or not each:
                command.notices.append(f"left out: {each}" if each else f"line {line}: an empty argument")
            else:
                command.marked.append(each)
        return command


def _may_be_in_subshell(statements: Sequence[Statement]) -> list[bool]:
    """Return of each statement whether it may be, or begin, a command that runs in a shell of its own."""
    found: list[bool] = []
    after, isolated = "", False
    for each in reversed(statements):
        opens = any(word.literal in _OPENS for word in each.words)
        joined = isolated and after in ("&&", "||")
        after, isolated = each.after, joined or opens or each.ends in _IN_SUBSHELLS or each.after in _PIPES
        found.append(isolated)
    return found[::-1]


def _is_plain_assignment(word: Word) -> bool:
    """Return whether a word is an assignment whose status is not that of a program, `X=$(...)`."""
    parts = [part for each in (word, *(word.elements or ())) for part in each.parts]
    return bool(assigned_name(word)) and not any(part.expands and _RUNS_PROGRAM.search(part.text) for part in parts)


def _joined(after: str, before: Truth, status: Truth) -> Truth:
    """Return the status of a list of commands: of what was before an operator, and of the command behind it."""
    return {"&&": both(before, status), "||": either(before, status)}.get(after, status)
