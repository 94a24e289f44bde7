"""The fused modules applied to a model, and replacing and restoring a module's forward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Any

from torch import nn

MARK = "fused_module"
"""Attribute of a fused forward function: the fused module's name."""


@dataclass
class AppliedModules:
    """The fused modules in one model.

    `replaced` maps each fused module to the names of the sub-modules it replaced; `skipped` maps it to
    {name: reason}, where the name "" is for the full model. `in_compute_dtype` maps the sub-modules that write the
    compute dtype to the linear layers that read them, for norms; of rotary embeddings it has the names alone.
    """

    replaced: dict[str, tuple[str, ...]] = field(default_factory=dict)
    skipped: dict[str, dict[str, str]] = field(default_factory=dict)
    in_compute_dtype: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _undo: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def undo(self) -> None:
        """Restore the model from before `apply`; a second call does nothing.

        Raises:
            ValueError: a forward was replaced again since; it and earlier replacements stay.
        """
        while self._undo:
            self._undo[-1]()
            self._undo.pop()
        self.replaced.clear()
        self.in_compute_dtype.clear()

    def reject(self, modules: Sequence[str], reason: str) -> None:
        """Restore the model, for a reason that concerns all modules."""
        self.undo()
        for module in modules:
            self.replaced[module] = ()
            self.skipped.setdefault(module, {})[""] = reason

    def line(self) -> str:
        """Return one line: how many sub-modules each fused module replaced, and the reasons for skipping others."""
        parts = []
        for module in dict.fromkeys([*self.replaced, *self.skipped]):
            reasons: dict[str, int] = {}
            for reason in self.skipped.get(module, {}).values():
                reasons[reason] = reasons.get(reason, 0) + 1
            summary = "; ".join(f"{count} x {reason}" if count > 1 else reason for reason, count in reasons.items())
            count = len(self.replaced.get(module, ()))
            parts.append(
                f"{module}: {count or 'none'}" + (f" ({'skipped: ' if count else ''}{summary})" if summary else "")
            )
        return "fused modules: " + ", ".join(parts)

    def skip_reasons(self, module: str) -> str:
        """Return the distinct reasons for skipping sub-modules of a fused module."""
        return "; ".join(dict.fromkeys(self.skipped[module].values()))

    def as_json(self) -> dict[str, Any]:
        """Return the replaced and skipped sub-modules as plain values, as environment.json stores them."""
        replaced, lower = (
            {name: list(of) for name, of in each.items()} for each in (self.replaced, self.in_compute_dtype)
        )
        return {"replaced": replaced, "skipped": self.skipped, "in_compute_dtype": lower}


def in_triton(device_type: str) -> bool:
    """Return whether a device's fused modules are those of `module_triton`; the others are torch-npu's ops."""
    return device_type == "cuda"  # hw: the type of the Triton kernels, NVIDIA's and AMD's


def is_fused(module: nn.Module) -> bool:
    """Return whether a module's forward is a fused one."""
    return getattr(vars(module).get("forward"), MARK, None) is not None


def mark(function: FunctionType, name: str) -> None:
    """Mark a function as the forward of a fused module."""
    setattr(function, MARK, name)


def replace_forward(module: nn.Module, function: Callable[..., Any]) -> Callable[[], None]:
    """Replace one instance's forward; return a function that restores it.

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
