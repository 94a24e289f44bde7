"""Data rows as agents see them: the prompts that environments give, and the tools that the chat template shows."""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from hwgrpo.agents.environments import (
    EnvironmentFailure,
    EnvironmentKind,
    Instances,
    environment_of,
    environments_of,
    load_environments,
)
from hwgrpo.agents.tools import close_tools, load_tools
from hwgrpo.data.formats import Row
from hwgrpo.data.row_schema import read_prompt
from hwgrpo.data.sources import Rows
from hwgrpo.errors import DataError
from hwgrpo.support.event_loops import run_outside_loops
from hwgrpo.support.waits import reported_wait

AT_ONCE = 32
"""Environments that are reset at the same time when prompts are made."""


class OpenedRow(dict[str, Any]):
    """A data row with the prompt that its environment gave it.

    Args:
        original: the row as it was read.
        opening: what `reset` returned for it.
        changes: columns in place of the row's.
    """

    def __init__(self, original: Row, opening: Any, changes: Mapping[str, Any]) -> None:
        super().__init__({**original, **changes})
        self.original, self.opening = original, opening

    def __reduce__(self) -> tuple[Any, ...]:
        return OpenedRow, (self.original, self.opening, dict(self))


class AgentRows(Rows):
    """The rows of the data with the prompts, tools and environments that agents give them.

    Args:
        rows: the data's.
        count: rows that are used; those behind them are left as they are.
        config: the run's settings.
        schemas: JSON schemas of `rollout.agent.tools`.

    Raises:
        ConfigError: a row names an unknown environment.
        DataError: an environment gives a row no valid prompt.
    """

    def __init__(self, rows: Rows, count: int, *, config: Any, schemas: Sequence[Mapping[str, Any]]) -> None:
        super().__init__(rows.parts)
        agent = config.rollout.agent
        self._key, self._seconds = config.data.prompt_key, agent.turn_timeout
        self._schemas = [*schemas]
        self._changed: dict[int, Row] = {}
        self._tools: dict[int, list[Mapping[str, Any]]] = {}
        if kinds := load_environments(environments_of(config.rollout), config.data.ground_truth_key):
            self.columns = tuple(dict.fromkeys((*self.columns, self._key, "environment")))
            with reported_wait(lambda: f"prompts of environments ({len(self._changed)} of {count} rows)", math.inf):
                run_outside_loops(lambda: asyncio.run(self._reset_all(kinds, count)))

    def __getitem__(self, index: Any) -> Any:
        row = self._changed.get(index)
        row = super().__getitem__(index) if row is None else row
        prompt = row.get(self._key)
        if not isinstance(prompt, str):
            return row
        in_template = {self._key: [{"role": "user", "content": prompt}]}  # turns follow one another in it
        if isinstance(row, OpenedRow):
            return OpenedRow(row.original, row.opening, {**row, **in_template})
        return {**row, **in_template}

    def tools(self, index: int) -> list[Mapping[str, Any]]:
        """Return the JSON schemas of the tools that a row's model may call."""
        return self._tools.get(index, self._schemas)

    async def _reset_all(self, kinds: Sequence[EnvironmentKind], count: int) -> None:
        instances, numbers = Instances(self._seconds), iter(range(count))

        async def reset_some() -> None:
            for index in numbers:
                row, place = super(AgentRows, self).__getitem__(index), self.place(index)
                kind = environment_of(kinds, row, index, place)
                instance = instances.get(kind)
                try:
                    opening = await instance.reset(row, self._seconds)
                except EnvironmentFailure as failure:
                    raise DataError(f"{place}: {failure}") from failure
                changes = {"environment": kind.name, **opened(row, opening, self._key, place)}
                self._changed[index] = OpenedRow(row, opening, changes)
                if instance.tools:
                    self._tools[index] = [*self._schemas, *instance.tools]
                instances.put_back(instance)

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(AT_ONCE):
                    group.create_task(reset_some())
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            instances.close()


def opened(row: Row, opening: Any, key: str, place: str) -> dict[str, Any]:
    """Return the prompt of a row after `reset`, as a column; nothing where it is the row's own.

    Args:
        row: the data row.
        opening: what `reset` returned: messages, text or None.
        key: `data.prompt_key`.
        place: file and line, for messages.

    Raises:
        DataError: the row has no prompt, and `reset` returned None.
    """
    if opening is None or (own := row.get(key)) is None:
        if opening is None:
            read_prompt(row, key, place, images=True)  # images are read, or refused, when the prompt is rendered
            return {}
        return {key: [{"role": "user", "content": opening}] if isinstance(opening, str) else opening}
    if not isinstance(opening, str):
        return {key: opening}
    messages = read_prompt(row, key, place, images=True)
    if isinstance(messages, str):
        return {key: [{"role": "user", "content": f"{own}\n\n{opening}"}]}
    *before, last = messages
    if last["role"] != "user":
        return {key: [*messages, {"role": "user", "content": opening}]}
    if isinstance(last["content"], str):
        return {key: [*before, {**last, "content": f"{last['content']}\n\n{opening}"}]}
    return {key: [*before, {**last, "content": [*last["content"], {"type": "text", "text": f"\n\n{opening}"}]}]}


def tool_schemas(agent: Any) -> list[Mapping[str, Any]]:
    """Return the JSON schemas of `rollout.agent.tools`; those of files are read in processes."""
    tools = load_tools(agent.tools, folder=os.getcwd())
    schemas = [tool.schema for tool in tools]
    close_tools(tools)
    return schemas


def rows_of_agents(config: Any) -> Callable[[Rows, int], Rows] | None:
    """Return the change of data rows that the run's workflow needs, for `build_dataset`; None: none."""
    r = config.rollout
    acts = r.workflow in ("environment", "tools") and (r.agent.tools or environments_of(r))
    return partial(AgentRows, config=config, schemas=tool_schemas(r.agent)) if acts else None
