"""The assertions in the source of unit tests that depend on the program, found without running it.

A test reads the program through its names: those that the tests use and do not define, and whatever is computed from
them. `def add(a, b): return a + b` in the tests themselves makes `assert add(1, 2) == 3` an assertion on nothing.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

OWN_MODULES = sys.stdlib_module_names | {"pytest"}
"""Modules that tests have of their own, whatever a program calls its names."""
SOLUTION = "solution"
"""The module from which tests may import the program's names."""
FAILING = ("fail", "exit", "_exit", "quit")
"""Functions whose call fails a test."""
BROAD = ("Exception", "BaseException", "AssertionError")
"""Classes of exceptions that a failed assertion belongs to."""
BUILT_IN = frozenset(dir(builtins)) | {"exit", "quit"}
CONTAINERS = frozenset((ast.List, ast.Tuple, ast.Set, ast.Dict, ast.UnaryOp))
"""Expressions that read no names of their own; `-1` is one with a sign."""
Function = ast.FunctionDef | ast.AsyncFunctionDef
Definition = Function | ast.ClassDef
Body = tuple[Sequence[ast.stmt], frozenset[str]]
"""Statements, and the parameters of the functions around them."""
NOTHING: frozenset[str] = frozenset()
READ, BELOW = "_names_read", "_below"
"""Attributes of a node with what was found out about it once."""


@dataclass
class Reached:
    """What is executed from some statements on, as far as their source shows."""

    assertions: list[ast.AST] = field(default_factory=list)
    """Those that depend on the program."""
    others: list[ast.AST] = field(default_factory=list)
    """Assertions that do not."""
    without_effect: list[ast.AST] = field(default_factory=list)
    """Comparisons that nothing reads, and assertions of tuples, which are always true."""
    names: set[str] = field(default_factory=set)
    """Definitions of the tests that are used."""


@dataclass(frozen=True)
class _Scope:
    """Where a node stands."""

    parameters: frozenset[str] = NOTHING
    """Of the functions around it."""
    local: frozenset[str] = NOTHING
    """These, and the variables that these functions set."""
    in_class: bool = False


class Assertions:
    """The assertions of some tests.

    Args:
        body: all statements of the tests.
        given: names that are the program's, also where they are those of built-in functions.
    """

    def __init__(self, body: Sequence[ast.stmt], given: Iterable[str] = ()) -> None:
        self._scoped = list(_scoped(body))
        self.definitions: dict[str, list[tuple[Definition, frozenset[str]]]] = {}
        for node, scope in self._scoped:
            if isinstance(node, Definition):
                self.definitions.setdefault(node.name, []).append((node, scope.parameters))
        self.uses: dict[str, int] = {}
        """Name -> number of its uses."""
        for node, _ in self._scoped:
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                self.uses[node.id] = self.uses.get(node.id, 0) + 1
        self.imported: dict[str, str] = {}
        """Name -> the module that it was imported from, other than the program's."""
        self.own_names = self._names_of_program(frozenset(given))
        """The program's names."""
        self.program = self._computed_from(self.own_names)
        """These, and the variables that depend on them."""

    def reads(self, node: ast.AST | Sequence[ast.AST], parameters: Set[str]) -> bool:
        """Return whether an expression or statement depends on the program.

        Args:
            node: one, or several.
            parameters: of the functions around it, which may have been given anything.
        """
        several = node if isinstance(node, Sequence) else [node]
        return any(names & self.program or names & parameters for names in map(names_read, several))

    def is_assertion(self, node: ast.AST, parameters: Set[str]) -> bool:
        """Return whether a node fails the test where the program is wrong."""
        match node:
            case ast.Assert():
                return not is_true_tuple(node) and self.reads(node.test, parameters)
            case ast.Call():
                given = [*node.args, *(each.value for each in node.keywords)]
                return self.asserts(node) and self.reads(given, parameters)
            case ast.With() | ast.AsyncWith():
                return any(self.asserts(item.context_expr) for item in node.items) and self.reads(node.body, parameters)
            case ast.If():
                fails = self.failing(node.body) or self.failing(node.orelse)
                return fails is not None and self.reads(node.test, parameters)
            case ast.Try():
                fails = self.expects_exception(node) or self.forbids_exception(node)
                return fails and self.reads(node.body, parameters)
        return False

    def failing(self, body: Sequence[ast.stmt]) -> ast.stmt | None:
        """Return the first statement of several that fails the test where it is executed."""
        for each in body:
            constant = each.test if isinstance(each, ast.Assert) and isinstance(each.test, ast.Constant) else None
            calls = isinstance(each, ast.Expr) and called(each.value) in FAILING and not self._is_of_program(each.value)
            if isinstance(each, ast.Raise) or calls or (constant is not None and not constant.value):
                return each
        return None

    def expects_exception(self, node: ast.Try) -> bool:
        """Return whether a `try` fails the test unless there is an exception."""
        return bool(node.handlers) and (self.failing(node.body) or self.failing(node.orelse)) is not None

    def forbids_exception(self, node: ast.Try) -> bool:
        """Return whether a `try` fails the test where there is an exception."""
        return any(self.failing(each.body) is not None for each in node.handlers)

    def asserts(self, node: ast.AST) -> bool:
        """Return whether a node calls a function that asserts, by its name: `self.assertEqual`, `pytest.raises`."""
        name = called(node)
        named = name.startswith(("assert", "raises", "failUnless"))
        return named and name not in self.definitions and not self._is_of_program(node)

    def _is_of_program(self, call: ast.AST) -> bool:
        return isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in self.own_names

    def reached(self, bodies: Iterable[Body], *, main: bool = False) -> Reached:
        """Return what is executed from some statements on.

        Args:
            bodies: the statements, each with the parameters of the functions around them.
            main: whether `__name__` is "__main__".
        """
        result = Reached()
        left = [(body, parameters, False) for body, parameters in bodies]
        while left:
            statements, parameters, excused = left.pop()
            for node, inside in _executed(statements, main, self.asserts):
                expected = inside or excused
                if isinstance(node, ast.Lambda):
                    parameters |= parameters_of(node)
                if self.is_assertion(node, parameters):
                    result.assertions.append(node)
                elif isinstance(node, ast.Assert) or self.asserts(node):
                    result.others.append(node)
                if _has_no_effect(node) and not expected and self.reads(node, parameters):
                    result.without_effect.append(node)
                name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
                if name in self.definitions and name not in result.names:
                    result.names.add(name)
                    for definition, around in self.definitions[name]:
                        left += [(*each, expected) for each in bodies_of(definition, around)]
        return result

    def _names_of_program(self, given: frozenset[str]) -> frozenset[str]:
        defined, bound, attributed = set(), set(), set()
        names, read = set(), set()
        for node, scope in self._scoped:
            match node:
                case ast.Name(id=name, ctx=ast.Load()):
                    if name not in scope.local:
                        read.add(name)
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    if not scope.local and not scope.in_class:
                        defined.add(name)
                case ast.Attribute(value=ast.Name(id=name)):
                    attributed.add(name)
                case ast.Import() | ast.ImportFrom():
                    module = node.module if isinstance(node, ast.ImportFrom) else None
                    for alias in node.names:
                        name = alias.asname or alias.name.partition(".")[0]
                        if SOLUTION in (module, alias.name):
                            names.add(name)
                        else:
                            self.imported[name] = module or alias.name
            if not scope.local:
                bound.update(_bound(node))
        for name in names:
            self.imported.pop(name, None)
        own = {name for name in attributed if name in OWN_MODULES} | BUILT_IN
        names |= given - defined - self.imported.keys()
        names |= {each for each in read - defined - bound - self.imported.keys() - own if not each.startswith("__")}
        return frozenset(names)

    def _computed_from(self, own: frozenset[str]) -> frozenset[str]:
        names: set[str] = set()
        variables = {name for node, _ in self._scoped for name in _bound(node)}
        inert = self.imported.keys() | ((OWN_MODULES | BUILT_IN) - variables - own)
        changed = list(own)
        set_by: dict[str, list[list[str]]] = {}
        for sources, targets in (flow for node, scope in self._scoped for flow in _flows(node, scope.parameters)):
            if sources is None:
                changed += targets
            for name in sources or ():
                set_by.setdefault(name, []).append(targets)
        while changed:
            name = changed.pop()
            if name not in inert:
                names.add(name)
                changed += [target for targets in set_by.pop(name, ()) for target in targets]
        return frozenset(names)


def bodies_of(definition: Definition, around: frozenset[str] = NOTHING) -> list[Body]:
    """Return the bodies, with their parameters, that may run where a function or class is used."""
    if isinstance(definition, Function):
        return [(definition.body, around | parameters_of(definition))]
    return [pair for each in definition.body if isinstance(each, Definition) for pair in bodies_of(each, around)]


def names_read(node: ast.AST) -> frozenset[str]:
    """Return the names that a node reads, without those of its lambdas' parameters and comprehensions' variables."""
    known = node.__dict__.get(READ)
    if known is None:
        known = frozenset().union(*map(names_read, children(node)))
        if isinstance(node, ast.Name):
            known = frozenset([node.id]) if isinstance(node.ctx, ast.Load) else NOTHING
        elif isinstance(node, ast.Lambda):
            known -= parameters_of(node)
        elif isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            known -= {name for each in node.generators for name in _roots(each.target)}
        setattr(node, READ, known)
    return known


def children(node: ast.AST) -> list[ast.AST]:
    """Return the nodes directly below a node as it was parsed, without contexts, operators and those `is_data`."""
    below = node.__dict__.get(BELOW)
    if below is None:
        below = []
        for value in node.__dict__.values():
            if isinstance(value, list):
                below += [each for each in value if isinstance(each, ast.AST) and not is_data(each)]
            elif isinstance(value, ast.AST) and value._fields and not is_data(value):
                below.append(value)
        setattr(node, BELOW, below)
    return below


def is_data(node: ast.AST) -> bool:
    """Return whether a node is a constant, or a container of such: tests may have megabytes of them."""
    kind = type(node)
    return kind is ast.Constant or (kind in CONTAINERS and not children(node))


def walk(node: ast.AST) -> list[ast.AST]:
    """Return a node and all below it but data, as `ast.walk` does, which takes longer."""
    found = [node]
    for each in found:
        found += children(each)
    return found


def called(node: ast.AST) -> str:
    """Return the last name of the function that a node calls, "" for none."""
    function = node.func if isinstance(node, ast.Call) else None
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def is_true_tuple(node: ast.AST) -> bool:
    """Return whether a node asserts a tuple: `assert (a == b, "message")`."""
    return isinstance(node, ast.Assert) and isinstance(node.test, ast.Tuple) and bool(node.test.elts)


def swallows(handler: ast.ExceptHandler) -> bool:
    """Return whether an `except` hides a failed assertion: it catches that, and neither raises nor asserts."""
    broad = is_broad(handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type])
    inner = [each for statement in handler.body for each in walk(statement)]
    asserting = any(isinstance(each, ast.Raise | ast.Assert) or called(each).startswith("assert") for each in inner)
    return broad and not asserting and not any(called(each) in FAILING for each in inner)


def is_broad(kinds: Sequence[ast.expr | None]) -> bool:
    """Return whether one of several classes of exceptions, None for all, is that of failed assertions."""
    return any(each is None or dotted(each).rpartition(".")[2] in BROAD for each in kinds)


def dotted(node: ast.AST) -> str:
    """Return the names of an expression such as `pytest.mark.skip`, "" for another one."""
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return node.id if isinstance(node, ast.Name) else ""


def asks_for_main(node: ast.stmt) -> bool:
    """Return whether a statement is `if __name__ == "__main__":`."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Compare) and "__name__" in names_read(node.test)


def _scoped(body: Sequence[ast.stmt]) -> Iterator[tuple[ast.AST, _Scope]]:
    """Yield all nodes but data in the order of the source, each with its scope."""
    left: list[tuple[ast.AST, _Scope]] = [(each, _Scope()) for each in reversed(body)]
    while left:
        node, scope = left.pop()
        yield node, scope
        if isinstance(node, Function | ast.Lambda):
            given = parameters_of(node)
            own = (name for each in walk(node) for name in _bound(each)) if isinstance(node, Function) else ()
            scope = _Scope(scope.parameters | given, scope.local.union(given, own))
        elif isinstance(node, ast.ClassDef):
            scope = _Scope(scope.parameters, scope.local, in_class=True)
        left += [(each, scope) for each in reversed(children(node))]


def _bound(node: ast.AST) -> list[str]:
    """Return the variables that a node itself sets."""
    match node:
        case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
            return [name]
        case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            return [name]
        case ast.MatchMapping(rest=str(name)):
            return [name]
    return []


def _executed(
    body: Sequence[ast.stmt], main: bool, asserts: Callable[[ast.AST], bool], inside: bool = False
) -> Iterator[tuple[Any, bool]]:
    """Yield the nodes that run with some statements, without the bodies of functions and what cannot be reached.

    With each: whether an exception of it is expected, in `try` or in a context manager that asserts.
    """
    for statement in body:
        yield statement, inside
        blocks: list[tuple[list[ast.stmt], bool]] = []
        for name, value in ast.iter_fields(statement):
            parts = [each for each in (value if isinstance(value, list) else [value]) if isinstance(each, ast.AST)]
            if parts and isinstance(parts[0], ast.stmt):
                blocks.append((value, inside or (isinstance(statement, ast.Try) and name == "body")))
            elif parts and isinstance(parts[0], ast.ExceptHandler | ast.match_case):
                blocks += [(each.body, inside) for each in value]
            else:
                yield from ((node, inside) for each in parts for node in walk(each))
        if isinstance(statement, ast.With | ast.AsyncWith):
            inside_it = inside or any(asserts(each.context_expr) for each in statement.items)
            blocks = [(statement.body, inside_it)]
        elif isinstance(statement, ast.If):
            blocks = [(each, inside) for each in _branches(statement, main)]
        elif isinstance(statement, Function):
            blocks = []
        for block, expected in blocks:
            yield from _executed(block, main, asserts, expected)
        if isinstance(statement, ast.Return | ast.Raise | ast.Break | ast.Continue):
            return


def _branches(statement: ast.If, main: bool) -> list[list[ast.stmt]]:
    """Return the branches of an `if` that may run."""
    if asks_for_main(statement):
        return [statement.body if main else statement.orelse]
    if isinstance(statement.test, ast.Constant):
        return [statement.body if statement.test.value else statement.orelse]
    return [statement.body, statement.orelse]


def _has_no_effect(node: ast.AST) -> bool:
    if isinstance(node, ast.Expr):
        value = node.value.operand if isinstance(node.value, ast.UnaryOp) else node.value
        first = value.values[0] if isinstance(value, ast.BoolOp) else value
        first = first.elts[0] if isinstance(first, ast.Tuple) and first.elts else first
        return isinstance(first, ast.Compare)
    return is_true_tuple(node)


def parameters_of(function: Function | ast.Lambda) -> frozenset[str]:
    """Return the names of all parameters."""
    given = function.args
    rest = [each for each in (given.vararg, given.kwarg) if each is not None]
    return frozenset(each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs, *rest))


def _roots(target: ast.AST) -> list[str]:
    """Return the variables that an assignment to a target changes."""
    match target:
        case ast.Name(id=name):
            return [name]
        case ast.Attribute(value=value) | ast.Subscript(value=value) | ast.Starred(value=value):
            return _roots(value)
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return [name for part in parts for name in _roots(part)]
    return []


def _flows(node: ast.AST, parameters: Set[str]) -> Iterator[tuple[Set[str] | None, list[str]]]:
    """Yield how values flow: the names that are read (None: also a parameter, which may be anything), and those set."""

    def flow(source: Iterable[ast.AST | None], targets: Iterable[ast.AST]) -> tuple[Set[str] | None, list[str]]:
        read = frozenset().union(*(names_read(each) for each in source if each is not None))
        return (None if read & parameters else read), [name for each in targets for name in _roots(each)]

    match node:
        case ast.Assign():
            yield flow([node.value], node.targets)
        case ast.AnnAssign() | ast.AugAssign() | ast.NamedExpr():
            yield flow([node.value], [node.target])
        case ast.comprehension():
            yield flow([node.iter], [node.target])
        case ast.If() | ast.While():
            yield flow([node.test], [])[0], _set_in(node)
        case ast.For() | ast.AsyncFor():
            yield flow([node.iter], [])[0], _set_in(node)
        case ast.Match():
            yield flow([node.subject], [])[0], _set_in(node)
        case ast.Try():
            yield flow(node.body, [])[0], _set_in(node)
        case ast.With() | ast.AsyncWith():
            for item in node.items:
                # `with raises(ValueError) as caught` knows what its body raised
                source = [item.context_expr, *(node.body if isinstance(item.context_expr, ast.Call) else [])]
                yield flow(source, [item.optional_vars] if item.optional_vars else [])
        case ast.Call():
            # the program may change its arguments; `results.append(f(1))` changes `results`
            given = [*node.args, *(each.value for each in node.keywords)]
            changed = [each for part in given for each in walk(part) if isinstance(each, ast.Name)]
            owner = [node.func.value] if isinstance(node.func, ast.Attribute) else []
            yield flow([node], [*changed, *owner])
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            inner = list(_scoped(node.body))
            own = parameters_of(node) if isinstance(node, Function) else NOTHING
            own |= {name for each, _ in inner for name in _bound(each)}
            used = {each.id for each, scope in inner if isinstance(each, ast.Name) and each.id not in scope.local}
            yield used - own, [node.name]


def _set_in(node: ast.AST) -> list[str]:
    return [name for each in walk(node) for name in _bound(each)]
