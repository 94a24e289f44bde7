"""Which conditions on HIP the code has, and which of their two sides a file of tests takes.

As a script, `seen_branches.py FILE`: runs the tests of FILE with every such condition of our packages recorded, and
prints a line of JSON: condition -> the truth values it had.
"""

import ast
import builtins
import importlib.machinery
import json
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {"hwgrpo": ROOT, "hwgrpo_backends": ROOT / "backends", "hwgrpo_kernels": ROOT / "kernels"}
MARKER = "conditions on HIP: "
RECORD = "__seen_branch__"


def names_hip(node: ast.expr) -> bool:
    """Whether an expression is a condition on HIP: `x.hip`, a comparison, `startswith` or `get` with such a word."""
    if isinstance(node, ast.Attribute):
        return node.attr == "hip" and isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.Compare):
        return any(
            (isinstance(part, ast.Constant) and _is_word(part.value))
            or (isinstance(part, ast.Attribute) and part.attr == "hip")
            for part in ast.walk(node)
        )
    asks = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    if asks and node.func.attr in ("startswith", "get"):
        return any(isinstance(each, ast.Constant) and _is_word(each.value) for each in node.args)
    return False


def _is_word(value: object) -> bool:
    return isinstance(value, str) and (value in ("hip", "rocm") or value.startswith("gfx"))


class Recording(ast.NodeTransformer):
    """Wraps each condition in a call that notes its truth, and lists them all."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.sites: list[str] = []

    def visit(self, node: ast.AST) -> ast.AST:
        if not (isinstance(node, ast.expr) and names_hip(node)):
            return self.generic_visit(node)
        site = f"{Path(self.path).relative_to(ROOT)}: {ast.unparse(node)}"
        self.sites.append(site)
        name = ast.Name(RECORD, ast.Load())
        return ast.copy_location(ast.Call(name, [ast.Constant(site), node], []), node)


def sites() -> set[str]:
    """Return every condition on HIP in the sources of our packages."""
    found: set[str] = set()
    for package, folder in PACKAGES.items():
        for path in sorted((folder / package).rglob("*.py")):
            recording = Recording(str(path))
            recording.visit(ast.parse(path.read_text(encoding="utf-8")))
            found.update(recording.sites)
    return found


class Loader(importlib.machinery.SourceFileLoader):
    """Loads a module with its conditions wrapped, from its source alone."""

    def get_code(self, fullname: str):
        tree = Recording(self.path).visit(ast.parse(self.get_data(self.path)))
        return compile(ast.fix_missing_locations(tree), self.path, "exec")


class Finder:
    """Finds our packages before everyone else."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] not in PACKAGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = Loader(spec.loader.name, spec.loader.path)
        return spec


def main(file: str) -> int:
    import pytest

    seen: defaultdict[str, set[bool]] = defaultdict(set)

    def record(site, value):
        seen[site].add(bool(value))
        return value

    setattr(builtins, RECORD, record)
    sys.meta_path.insert(0, Finder())
    code = pytest.main(["-q", "-p", "no:cacheprovider", "-k", "not every_condition", file])
    print("\n" + MARKER + json.dumps({site: sorted(values) for site, values in seen.items()}))
    return int(code)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
