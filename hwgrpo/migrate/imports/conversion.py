"""What a setting of another project becomes: assignments of settings here, remarks, refusals, processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Assignment:
    """A setting here that follows from others."""

    key: str
    value: Any
    origins: tuple[str, ...]
    """The keys of the other project that it follows from."""
    note: str = ""


@dataclass(frozen=True)
class Remark:
    """Why keys of the other project set nothing here."""

    origins: tuple[str, ...]
    note: str


@dataclass(frozen=True)
class Refusal:
    """A value of the other project without a counterpart."""

    origin: str
    value: Any
    why: str
    instead: str


@dataclass(frozen=True)
class Launch:
    """How many processes, one per device, start a run.

    Example:
        >>> Launch(("trainer.n_gpus_per_node", "trainer.nnodes"), devices=8, nodes=2).command("recipe.yaml")
        'hwgrpo launch recipe.yaml --devices 8 --nodes 2'
    """

    origins: tuple[str, ...]
    devices: int | None
    """Devices per node; None: not known."""
    nodes: int | None = 1
    """None: not known."""

    @property
    def processes(self) -> int | None:
        """The number of all processes; None: not known."""
        return None if self.devices is None or self.nodes is None else self.devices * self.nodes

    def command(self, recipe: str = "RECIPE") -> str:
        """Return the command that starts a recipe so."""
        devices = "" if self.devices is None else f" --devices {self.devices}"
        nodes = "" if self.nodes in (None, 1) else f" --nodes {self.nodes}"
        return f"hwgrpo launch {recipe}{devices}{nodes}"


Converted = Assignment | Remark | Refusal | Launch


def lower_clip(value: float, origins: tuple[str, ...]) -> Assignment:
    """Return the lower bound `1 - value` of a ratio; one of 0 or less is none, because ratios are positive."""
    note = "the ratio has no lower bound" if value > 1 else ""
    return Assignment("algorithm.loss.clip_low", min(value, 1.0), origins, note)
