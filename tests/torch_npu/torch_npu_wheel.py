"""torch-npu's wheel without loading it: the schemas of its operators, and what `torch.npu` has, from its own files."""

import ast
import warnings
from pathlib import Path

import torch
import yaml

from tests.support.processes import wheels
from tests.torch_npu.torch_npu_uses import Use

VERSIONS = {
    "2.10.0.post4": "rollout-vllm-ascend",
    "2.10.0.post7": "torch-npu-2.10",
    "2.13.0": "npu",
    "2.14.0": "torch-npu-2.14",
}
"""Version -> the file in scripts/constraints that pins it. Set-up installs 2.13.0."""
OPS = "torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml"


def folder(version: str) -> Path:
    """Return the folder with the package torch_npu and its record; fetch it first."""
    return wheels.fetched(VERSIONS[version], ["torch-npu"])


class Wheel:
    """What one torch-npu has.

    Args:
        path: the folder it was installed into.
    """

    def __init__(self, path: Path) -> None:
        self.schemas: dict[str, list[str]] = {}
        """Operator -> the schemas of its overloads."""
        sections = yaml.load((path / OPS).read_text(), Loader=yaml.CSafeLoader).values()
        entries = [each for section in sections if isinstance(section, list) for each in section]
        for text in (str(entry["func"]) for entry in entries if isinstance(entry, dict) and "func" in entry):
            if text.startswith("npu_"):
                self.schemas.setdefault(text.split("(")[0].split(".")[0], []).append(text)
        self._package = path / "torch_npu"
        self._trees: dict[Path, ast.Module] = {}

    def problem(self, use: Use) -> str | None:
        """Return what is wrong with a use of this wheel, or None."""
        return self._op_problem(use) if use.kind == "op" else self._name_problem(use)

    def _op_problem(self, use: Use) -> str | None:
        schemas = self.schemas.get(use.name)
        if schemas is None:
            return f"there is no operator {use.name}"
        if any(takes(torch._C.parse_schema(f"npu::{schema}"), use) for schema in schemas):
            return None
        given = f"{use.positional} by position and {', '.join(use.keywords) or 'none'} by keyword"
        return f"{use.name} does not take {given}: {'; '.join(schemas)}"

    def _name_problem(self, use: Use) -> str | None:
        found = self._definition("npu/__init__.py", use.name)
        if found is None:
            return f"torch.npu has no {use.name}"
        parameters = _parameters(found)
        if use.positional is None or parameters is None:
            return None
        if _fits(parameters, use):
            return None
        return f"torch.npu.{use.name}({ast.unparse(parameters)}) is called otherwise"

    def _definition(self, module: str, name: str) -> ast.AST | None:
        """Return the node that binds `name` in a file of the package, where that is imported from elsewhere in it."""
        file = self._package / module
        if file not in self._trees:
            with warnings.catch_warnings(action="ignore", category=SyntaxWarning):  # their escapes
                self._trees[file] = ast.parse(file.read_text())
        found = None
        for node in _statements(self._trees[file]):
            if isinstance(node, ast.ImportFrom):
                target = self._module(file, node)
                for alias in node.names if target else ():
                    if alias.name == "*" and self._offers(target, name):
                        found = self._definition(target, name) or found
                    elif (alias.asname or alias.name) == name:
                        found = self._definition(target, alias.name) or node
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                found = node if node.name == name else found
            elif isinstance(node, ast.Assign) and any(ast.unparse(target) == name for target in node.targets):
                found = node
        return found

    def _module(self, file: Path, node: ast.ImportFrom) -> str | None:
        """Return the file that a statement of `file` imports from, or None where it is not of this package."""
        if node.level:
            base = file.parents[node.level - 1]
        elif (node.module or "").startswith("torch_npu"):
            base = self._package.parent
        else:
            return None
        target = base.joinpath(*(node.module or "").split("."))
        found = next((each for each in (target.with_suffix(".py"), target / "__init__.py") if each.is_file()), None)
        return str(found.relative_to(self._package)) if found else None

    def _offers(self, module: str, name: str) -> bool:
        """Whether `from module import *` brings `name`."""
        shown = self._definition(module, "__all__")
        if isinstance(shown, ast.Assign):
            return name in ast.literal_eval(shown.value)
        return not name.startswith("_")


def _statements(tree: ast.Module):
    """Yield the statements that run on import, those under if and try too."""
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop(0)
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            waiting = [*ast.iter_child_nodes(node), *waiting]


def takes(schema: torch._C.FunctionSchema, use: Use) -> bool:
    """Whether an operator of this schema can be called so."""
    by_position = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    if use.positional is not None and use.positional > len(by_position):
        return False
    first = set(by_position[: use.positional or 0])
    rest = {argument.name: argument for argument in schema.arguments if argument.name not in first}
    needed = {name for name, argument in rest.items() if not argument.has_default_value()}
    # Without a number of positional arguments only the keywords can be judged.
    return set(use.keywords) <= set(rest) and (use.positional is None or needed <= set(use.keywords))


def _parameters(node: ast.AST) -> ast.arguments | None:
    """Return the parameters of a function, or of what makes an object of a class, without self."""
    if isinstance(node, ast.FunctionDef):
        return node.args
    makers = [each for each in getattr(node, "body", ()) if isinstance(each, ast.FunctionDef)]
    maker = next((each for name in ("__new__", "__init__") for each in makers if each.name == name), None)
    if maker is None:
        return None
    maker.args.args = [each for each in maker.args.args if each.arg not in ("cls", "self")]
    return maker.args


def _fits(parameters: ast.arguments, use: Use) -> bool:
    names = [each.arg for each in (*parameters.posonlyargs, *parameters.args)]
    given = use.positional or 0
    if given > len(names) and not parameters.vararg:
        return False
    rest = {*names[given:], *(each.arg for each in parameters.kwonlyargs)}
    needed = set(names[given : len(names) - len(parameters.defaults)])
    return (set(use.keywords) <= rest or parameters.kwarg is not None) and needed <= set(use.keywords)
