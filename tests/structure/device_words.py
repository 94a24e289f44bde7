"""Find words that tie code to one vendor's device: the core must not hold any outside a line that says why.

A word is `torch.cuda` / `torch.npu` (used or imported), a call of `.cuda()` / `.npu()`, an import of `torch_npu`, or a
string that is a device, platform, communication library or device module by name ("npu", "cuda:0", "nccl",
"torch.cuda.nccl"). Docstrings may name them.
A line excuses its words with `# hw: <reason>`.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

NAMES = frozenset({"cuda", "hip", "npu", "nccl", "hccl", "rocm"})
INDEXED = ("cuda:", "npu:", "hip:")  # "cuda:0"; also the start of an f-string
MODULES = ("torch.cuda", "torch.npu", "torch_npu")
EXCUSE = re.compile(r"#\s*hw:(?P<reason>.*)")


class Finding(NamedTuple):
    line: int
    what: str


def check_source(source: str) -> list[Finding]:
    """Return the device words of one module's source, and the excuses that excuse nothing or give no reason."""
    tree = ast.parse(source)
    excuses = {
        token.start[0]: match["reason"].strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and (match := EXCUSE.match(token.string))
    }
    findings, used = set(), set()
    for node, what in _words(tree):
        lines = set(range(node.lineno, (node.end_lineno or node.lineno) + 1)) & excuses.keys()
        used |= lines
        if not lines:
            findings.add(Finding(node.lineno, what))
    for line, reason in excuses.items():
        if not reason:
            findings.add(Finding(line, "an excuse `# hw:` without a reason"))
        elif line not in used:
            findings.add(Finding(line, "an excuse `# hw:` on a line without a device word"))
    return sorted(findings)


def check_tree(folder: Path) -> list[str]:
    """Return one `path:line: what` per finding in the Python files below `folder`."""
    return [
        f"{path}:{finding.line}: {finding.what}"
        for path in sorted(folder.rglob("*.py"))
        for finding in check_source(path.read_text(encoding="utf-8"))
    ]


def _words(tree: ast.Module) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    docstrings = {id(text) for text in _docstrings(tree)}
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="torch"), attr="cuda" | "npu"):
                yield node, f"torch.{node.attr}"
            case ast.Call(func=ast.Attribute(attr="cuda" | "npu" as name)):
                yield node, f".{name}()"
            case ast.Import(names=aliases):
                for alias in aliases:
                    if _is_device_module(alias.name):
                        yield node, f"import {alias.name}"
            case ast.ImportFrom(module=module, names=aliases, level=0) if module:
                for alias in aliases:
                    if _is_device_module(module) or _is_device_module(f"{module}.{alias.name}"):
                        yield node, f"from {module} import {alias.name}"
            case ast.Constant(value=str() as text) if id(node) not in docstrings:
                if text in NAMES or text.startswith(INDEXED) or _is_device_module(text):
                    yield node, f"the string {text!r}"


def _is_device_module(name: str) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in MODULES)


def _docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield strings that stand alone as a statement: docstrings of modules, classes, functions and fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value
