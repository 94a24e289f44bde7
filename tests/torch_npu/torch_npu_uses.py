"""What our sources ask of torch-npu, read from their syntax: its operators, and names of the device module.

Two roots lead there: `torch.ops.npu` (and `torch_npu` itself) to operators, `torch.get_device_module(...)` (and
`torch.npu`, and `hwgrpo_backends.device.runtime(...)`) to the device module. Names that a root or an operator is bound
to are followed within a file, so that a use is found however it is spelled; a name that cannot be read from the syntax
is an error and not a use less.
"""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.processes.launch import ROOT

SOURCES = tuple(ROOT / folder for folder in ("backends/hwgrpo_backends", "kernels/hwgrpo_kernels", "hwgrpo"))
OPS = ("torch.ops.npu", "torch_npu")
MODULES = ("torch.npu",)
OP_ENDS = ("default",)  # torch.ops.npu.NAME.default(...) calls an overload by name


@dataclass(frozen=True)
class Use:
    """One place where a name is used."""

    kind: str
    """"op", or "name" of the device module."""
    name: str
    where: str
    """FILE:LINE."""
    positional: int | None = None
    """How many arguments are given by position; None where it is not called, or the number cannot be read."""
    keywords: tuple[str, ...] = ()


def uses_in(folders: Iterable[Path] = SOURCES) -> list[Use]:
    """Return every use in the Python files below `folders`.

    Raises:
        ValueError: a name is computed, so it cannot be read.
    """
    files = sorted(file for folder in folders for file in folder.rglob("*.py"))
    return [use for file in files for use in uses_of(file.read_text(), str(file))]


def uses_of(source: str, file: str) -> list[Use]:
    """Return every use in one file."""
    if not any(root in source for root in (*OPS, *MODULES, "get_device_module", "runtime(")):
        return []
    return list(_File(ast.parse(source), file).uses())


class _File:
    """One file: what its names are bound to, and the uses in it."""

    def __init__(self, tree: ast.Module, file: str) -> None:
        self.tree, self.file = tree, file
        self.constants: dict[str, str] = {}
        self.modules = set(MODULES)
        self.ops = set(OPS)
        self.bound_ops: dict[str, str] = {}
        """A name -> the operator it is bound to."""
        self.dicts: dict[str, set[str]] = {}
        """A name -> the keys of all dicts that are written out for it; calls unpack them as keywords."""
        for node in ast.walk(tree):
            for target, value in _bindings(node):
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    self.constants[target] = value.value
                elif any(_gives_module(branch) for branch in _branches(value)):
                    self.modules.add(target)
                elif isinstance(value, ast.Dict) and all(isinstance(key, ast.Constant) for key in value.keys):
                    keys = {key.value for key in value.keys if isinstance(key, ast.Constant)}
                    self.dicts.setdefault(target, set()).update(map(str, keys))
                elif ast.unparse(value) in OPS:
                    self.ops.add(target)
        for node in ast.walk(tree):
            for target, value in _bindings(node):
                if op := self.op_of(value):
                    self.bound_ops[target] = op

    def uses(self) -> Iterator[Use]:
        called = {id(node.func): node for node in ast.walk(self.tree) if isinstance(node, ast.Call)}
        inner = {id(node.value) for node in ast.walk(self.tree) if isinstance(node, ast.Attribute)}
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.expr):
                continue
            call, where = called.get(id(node)), f"{self.file}:{node.lineno}"
            if op := self.op_of(node):
                if call is None and id(node) in inner and not isinstance(node, ast.Name):
                    continue  # torch.ops.npu.NAME.default: its end is the use
                if call is not None or not isinstance(node, ast.Name):
                    yield Use("op", op, where, *self.arguments(call))
            elif name := self.attribute(node, self.is_module):
                yield Use("name", name, where, *self.arguments(call))

    def op_of(self, node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return self.bound_ops.get(node.id)
        if isinstance(node, ast.Attribute) and node.attr in OP_ENDS:
            return self.op_of(node.value)
        return self.attribute(node, lambda base: ast.unparse(base) in self.ops)

    def is_module(self, node: ast.expr) -> bool:
        return ast.unparse(node) in self.modules or _gives_module(node)

    def attribute(self, node: ast.expr, is_root) -> str | None:
        """Return NAME of `root.NAME`, getattr(root, NAME) and hasattr(root, NAME), or None for anything else."""
        if isinstance(node, ast.Attribute):
            return node.attr if is_root(node.value) and not node.attr.startswith("__") else None
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr") and is_root(node.args[0]):
            name = node.args[1]
            if isinstance(name, ast.Constant):
                return str(name.value)
            if isinstance(name, ast.Name) and name.id in self.constants:
                return self.constants[name.id]
            if ast.unparse(node.func) == "hasattr":
                return None  # whoever asks whether a name is there does without it; the call has a name that is read
            raise ValueError(
                f"{self.file}:{node.lineno}: {ast.unparse(node)} asks for a name that is computed; "
                "write it as a string, or as a constant of the module"
            )
        return None

    def arguments(self, call: ast.Call | None) -> tuple[int | None, tuple[str, ...]]:
        """Return how many arguments a call gives by position, and the names of the others."""
        if call is None:
            return None, ()
        open_ended = any(isinstance(argument, ast.Starred) for argument in call.args)
        keywords: list[str] = []
        for keyword in call.keywords:
            unpacked = self.dicts.get(ast.unparse(keyword.value))
            if keyword.arg is not None:
                keywords.append(keyword.arg)
            elif unpacked is not None:
                keywords += sorted(unpacked)
            else:
                open_ended = True
        return None if open_ended else len(call.args), tuple(keywords)


def _bindings(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, ast.Assign):
        for target in node.targets:
            yield ast.unparse(target), node.value
    elif isinstance(node, ast.AnnAssign | ast.NamedExpr) and node.value is not None:
        yield ast.unparse(node.target), node.value


def _branches(value: ast.expr) -> tuple[ast.expr, ...]:
    return (value.body, value.orelse) if isinstance(value, ast.IfExp) else (value,)


def _gives_module(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.get_device_module", "runtime")
