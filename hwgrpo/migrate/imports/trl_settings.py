"""The settings of a TRL run, and its batches in the units of here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hwgrpo.errors import ConfigError
from hwgrpo.migrate.imports.peer_settings import PeerSettings
from hwgrpo.migrate.tables.peer_names import PeerNames
from hwgrpo.migrate.tables.trl_names import TRL

_PER, _ACCUMULATION, _N = "per_device_train_batch_size", "gradient_accumulation_steps", "num_generations"
_SIZE, _STEPS, _PASSES = "generation_batch_size", "steps_per_generation", "num_iterations"


@dataclass(frozen=True)
class Batches:
    """The batches of a TRL run, in prompts."""

    prompts_per_step: int
    prompts_per_update: int
    updates_per_step: int


@dataclass
class TrlSettings(PeerSettings):
    """What a TRL run is set to."""

    names: PeerNames = TRL
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of torchrun and `accelerate launch`."""
    prompts: int | None = None
    """Rows of the training data; None: not known."""
    longest_prompt: int | None = None
    """Tokens of the longest prompt; None: not known."""
    evaluates: bool = False
    """Whether validation data is given as an object."""
    agents: bool = False
    """Whether the script has tools or environments."""

    def world_size(self) -> int:
        """Return the number of devices."""
        return self["num_processes"] if self.is_given("num_processes") else int(self.environment.get("WORLD_SIZE", 1))

    def batches(self) -> Batches:
        """Return the batches in prompts.

        Raises:
            ConfigError: a combination that TRL refuses, or one without a counterpart, with the nearest legal value.
        """
        for key in (_PER, _ACCUMULATION, _STEPS, _SIZE, _PASSES, "num_processes"):
            if self[key] is not None and self[key] < 1:
                raise ConfigError(f"{key}={self[key]} must be at least 1")
        n, processes, accumulation = self[_N], self.world_size(), self[_ACCUMULATION]
        device = self[_PER] * processes
        size, steps = self._generation(device)
        if n < 2:
            raise ConfigError(f"{_N}={n}: a group needs at least 2 responses, as in TRL; use {_N}=2 or more")
        if size % n:
            raise ConfigError(
                f"{_SIZE}={size} ({_PER}={self[_PER]} x {processes} processes x {_STEPS}={steps}) must be divisible by "
                f"{_N}={n}, as in TRL, since it counts completions; {self._nearest(size, n, device)}"
            )
        if steps % accumulation == 0:
            update, updates = device * accumulation, steps // accumulation * self[_PASSES]
        elif accumulation % steps == 0 and self[_PASSES] == 1:
            size, update, updates = device * accumulation, device * accumulation, 1
        else:
            raise ConfigError(
                f"{_ACCUMULATION}={accumulation} with {_STEPS}={steps} and {_PASSES}={self[_PASSES]}: an update would "
                f"mix responses of several policies; use {_STEPS}={accumulation}, or a multiple of it"
            )
        if update % n:
            raise ConfigError(
                f"an update has {update} completions ({_PER}={self[_PER]} x {processes} processes x {_ACCUMULATION}="
                f"{accumulation}), which are no whole groups of {_N}={n}; updates are of whole groups here: use "
                f"{_ACCUMULATION}={math.lcm(device, n) // device}, or {_STEPS}={accumulation}"
            )
        return Batches(size // n, update // n, updates)

    def _generation(self, device: int) -> tuple[int, int]:
        """Return the completions of a generation, and the micro-batches that they are in TRL."""
        size, steps = self[_SIZE], self[_STEPS]
        if size is not None and steps is not None:
            raise ConfigError(f"{_SIZE}={size} and {_STEPS}={steps} are one setting, as in TRL; leave one of them out")
        if size is None:
            steps = self[_ACCUMULATION] if steps is None else steps
            return device * steps, steps
        if size % device:
            nearest = max(1, round(size / device)) * device
            raise ConfigError(
                f"{_SIZE}={size} must be divisible by {_PER} x processes = {device}, as in TRL; use {_SIZE}={nearest}"
            )
        return size, size // device

    def _nearest(self, size: int, n: int, device: int) -> str:
        """Return the nearest legal values of a generation that is no whole number of groups."""
        divisors = [each for each in range(2, size + 1) if size % each == 0]
        if self.is_given(_SIZE):
            unit = math.lcm(device, n)
            other = f"{_SIZE}={max(1, round(size / unit)) * unit}"
        else:
            key = _STEPS if self.is_given(_STEPS) else _ACCUMULATION
            unit = math.lcm(device, n) // device
            other = f"{key}={max(1, round(size / device / unit)) * unit}"
        if not divisors:
            return f"use {other}"
        return f"use {_N}={min(divisors, key=lambda each: (abs(each - n), -each))}, or {other}"

    def total_updates(self) -> int | None:
        """Return the optimizer updates of the run; None where they follow from data that is not known."""
        if self["max_steps"] > 0:
            return self["max_steps"]
        epoch = self.updates_per_epoch()
        return None if epoch is None else math.ceil(self["num_train_epochs"] * epoch)

    def updates_per_epoch(self) -> int | None:
        """Return the optimizer updates of a pass over the data; TRL drops a generation that is not full."""
        if self.prompts is None:
            return None
        batches = self.batches()
        return max(1, self.prompts // batches.prompts_per_step) * batches.updates_per_step

    def count_of_updates(self, key: str, value: float) -> int | None:
        """Return a number of updates of which a value below 1 is a share; None where the total is not known."""
        if value >= 1 or value == 0:
            return int(value)
        total = self.total_updates()
        return None if total is None else math.ceil(total * value)

    def in_steps(self, updates: int) -> tuple[int, str]:
        """Return a number of updates in steps, rounded up, and what a reader should know of it."""
        per_step = self.batches().updates_per_step
        return -(-updates // per_step), f"{updates} updates, {per_step} a step" if per_step > 1 else ""


def trl_value(settings: PeerSettings, key: str) -> Any:
    """Return the value here of a choice; "" where it is refused."""
    return settings.names.rows[key].values[settings[key]].partition(" | ")[0]
