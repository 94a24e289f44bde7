"""No part of a run changes another: an attribute of an object is assigned by its own class alone."""

import ast
from collections.abc import Iterator
from pathlib import Path

TRAINING = Path(__file__).parents[2] / "hwgrpo" / "training"
ALLOWED = {
    "parameter.grad": "torch's",
    "config.data.template_date": "the run's own copy of the settings gets the date that it resolves",
    "run.interrupted": "the loop's message to what follows it",
    "self._tensor.shard_specs": "of a helper that the strategy has just made",
}
OPEN_CLASSES = {"StepState"}
"""Classes whose fields are there to be assigned by others."""


def foreign_assignments(source: str) -> list[str]:
    """Return the assigned attributes of parameters and of what `self` holds, unless the class is in the module."""
    tree = ast.parse(source)
    classes = OPEN_CLASSES | {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    found: list[str] = []
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        arguments = function.args
        every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        foreign = {each.arg for each in every if not (each.annotation and ast.unparse(each.annotation) in classes)}
        for target in _targets(function):
            root = target.value
            while isinstance(root, ast.Attribute | ast.Subscript):
                root = root.value
            if not isinstance(root, ast.Name) or (root is target.value and root.id in ("self", "cls")):
                continue
            if root.id in foreign | {"self"}:
                found.append(ast.unparse(target))
    return found


def _targets(function: ast.AST) -> Iterator[ast.Attribute]:
    for node in ast.walk(function):
        targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else [getattr(node, "target", None)]
        for target in targets:
            for each in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
                if isinstance(each, ast.Attribute):
                    yield each


def test_no_part_assigns_an_attribute_of_another():
    found = {
        f"{path.relative_to(TRAINING)}: {target}"
        for path in TRAINING.rglob("*.py")
        for target in foreign_assignments(path.read_text())
        if target not in ALLOWED
    }
    assert not found, "give the value as an argument, or give the owner a method for it"


def test_what_replaces_a_behaviour_is_found():
    source = """
class Guard:
    def act(self, policy: Policy, own: Guard, state: StepState):
        self.level, own.level, state.batch = 1, 2, 3
        policy.options, self._update.loss_fn = 4, 5
        self._update.parts[0].lr += 6
"""
    assert foreign_assignments(source) == ["policy.options", "self._update.loss_fn", "self._update.parts[0].lr"]
