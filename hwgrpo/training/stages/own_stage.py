"""Stages of the user's own (`trainer.stages`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from hwgrpo.catalog import STAGES
from hwgrpo.errors import ConfigError, RunError, choice_error
from hwgrpo.support.torch_settings import kept_torch_settings
from hwgrpo.training.stages.stage import Stage, Stages, StepState
from hwgrpo.training.strategies.strategy import Strategy, raise_on_all_ranks
from hwgrpo.user_code import describe_error, raised_by_user_code


class OwnStage:
    """Runs a stage of the user's own; if it fails on one rank, all end.

    Args:
        name: value of the setting.
        stage: the user's object.
        strategy: reaches the other ranks.
    """

    def __init__(self, name: str, stage: Any, strategy: Strategy) -> None:
        self._name, self._stage, self._strategy = name, stage, strategy
        self.timed: str | None = getattr(stage, "timed", None)

    def __call__(self, state: StepState) -> None:
        """Run it.

        Raises:
            RunError: it failed.
        """

        def work() -> None:
            try:
                with kept_torch_settings(f"trainer.stages={self._name!r}"):
                    self._stage(state)
            except BaseException as error:  # one that exits must not pass for the end of the run
                if not raised_by_user_code(error):
                    raise
                raise RunError(f"trainer.stages={self._name!r}: {describe_error(error)}") from error

        raise_on_all_ranks(self._strategy, work)


def own_stages(names: Sequence[str], run: Any) -> list[tuple[str, Stage]]:
    """Return the slot and the stage of each of these names.

    Args:
        names: `trainer.stages`.
        run: given to each class.

    Raises:
        ConfigError: a class cannot be imported or made, or names no slot.
    """
    slots = [field.name for field in fields(Stages)]
    made: list[tuple[str, Stage]] = []
    for name in names:
        kind = STAGES.load(name)
        slot = getattr(kind, "slot", None)
        if slot not in slots:
            raise choice_error(f"the attribute `slot` of trainer.stages={name!r}", slot, slots)
        try:
            stage = kind(run)
        except BaseException as error:
            if not raised_by_user_code(error):
                raise
            raise ConfigError(f"trainer.stages={name!r}: {describe_error(error)}") from error
        made.append((slot, OwnStage(name, stage, run.strategy)))
    return made
