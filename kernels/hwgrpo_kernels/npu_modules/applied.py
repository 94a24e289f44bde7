"""What was done to a model, and how it is put back."""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any

from torch import nn

MARK = "fused_module"
"""Attribute of a forward function that is one of ours: the fused module's name."""


@dataclass
class Applied:
    """The fused modules in one model.

    `taken` maps each fused module to the names of the sub-modules it was taken for; `left` maps it to
    {name: why it was not}, with the name "" for a reason that concerns the whole model.
    """

    taken: dict[str, tuple[str, ...]] = field(default_factory=dict)
    left: dict[str, dict[str, str]] = field(default_factory=dict)
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Put the model back as it was before `apply`; a second call does nothing.

        Raises:
            ValueError: a forward was replaced again since; nothing from there on is put back.
        """
        while self._undo:
            self._undo[-1]()
            self._undo.pop()
        self.taken.clear()

    def line(self) -> str:
        """Say in one line what was taken, how often, and why the rest was not."""
        parts = []
        for module in dict.fromkeys([*self.taken, *self.left]):
            reasons: dict[str, int] = {}
            for reason in self.left.get(module, {}).values():
                reasons[reason] = reasons.get(reason, 0) + 1
            why = "; ".join(f"{count} x {reason}" if count > 1 else reason for reason, count in reasons.items())
            count = len(self.taken.get(module, ()))
            parts.append(f"{module}: {count or 'none'}" + (f" ({'not: ' if count else ''}{why})" if why else ""))
        return "fused modules: " + ", ".join(parts)

    def why_left(self, module: str) -> str:
        """Return the reasons for which a fused module was left, each once."""
        return "; ".join(dict.fromkeys(self.left[module].values()))

    def as_json(self) -> dict[str, Any]:
        """Return what was taken and left as plain values."""
        return {"taken": {name: list(of) for name, of in self.taken.items()}, "left": self.left}


def is_fused(module: nn.Module) -> bool:
    """Whether a module's forward is one of ours, which computes what the module's own does."""
    return getattr(vars(module).get("forward"), MARK, None) is not None


def mark(function: FunctionType, name: str) -> None:
    """Make a function known as the forward of a fused module."""
    setattr(function, MARK, name)


def replace_forward(module: nn.Module, function: Callable[..., Any]) -> Callable[[], None]:
    """Give one instance another forward; return what takes it back.

    The function is bound to the module, so that a deep copy of the module has a forward bound to the copy.
    """
    assert "forward" not in vars(module)
    bound = MethodType(function, module)
    module.forward = bound

    def undo() -> None:
        if vars(module).get("forward") is not bound:
            raise ValueError(
                f"{type(module).__name__}: its forward was replaced again after the fused module; undo that first"
            )
        del module.forward

    return undo
