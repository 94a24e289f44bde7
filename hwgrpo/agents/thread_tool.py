"""Tools whose own code limits the time of a call, called by threads of the trainer's process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any, Protocol

from hwgrpo.agents.action import ToolResult, nothing
from hwgrpo.agents.tool_results import pack_result, shorten, unpack_result
from hwgrpo.agents.tool_schema import MalformedCall, make_schema, typed_arguments
from hwgrpo.errors import error_text


class Registered(Protocol):
    """A registered tool: an object of one of the classes in `hwgrpo.catalog.TOOLS`.

    Its class gets `kwargs` of the config and, where it has parameters of these names, `timeout`, `workers`, `folder`
    and `key`, the setting.
    """

    def run(self, *arguments: Any, **named: Any) -> Any:
        """Return the result, or (text, kind of the failure); its hints and docstring are the tool's schema.

        It is called in a thread, `workers` at once, and must end within the tool's timeout by itself.
        """
        ...

    def close(self) -> None:
        """Free its resources."""
        ...


class ThreadTool:
    """A registered tool as a `Tool`.

    Args:
        name: by which the policy calls it.
        registered: the tool.
        key: the tool's setting, for messages ("rollout.agent.tools.0").
        workers: calls that are made at once.
        max_chars: longest result.
        truncate: side of a longer one that is left out.

    Raises:
        ConfigError: its function has no schema.
    """

    def __init__(
        self, name: str, registered: Registered, *, key: str, workers: int, max_chars: int, truncate: str
    ) -> None:
        self.name = name
        self.schema: Mapping[str, Any] = make_schema(registered.run, {}, key, name)
        self._registered, self._max_chars, self._side = registered, max_chars, truncate
        self._threads = ThreadPoolExecutor(workers, f"tool {name}")

    async def call(self, arguments: Mapping[str, Any], begun: Callable[[], None] = nothing) -> ToolResult:
        """Return the result for arguments of the policy's; failures are results, too."""
        try:
            checked = typed_arguments(self.schema, arguments)
        except MalformedCall as error:
            return ToolResult(shorten(f"Error: {error}", self._max_chars, self._side), "malformed")
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._run, checked, begun)

    def close(self) -> None:
        """End the threads, after the calls that are being made."""
        self._threads.shutdown(cancel_futures=True)
        self._registered.close()

    def _run(self, arguments: Mapping[str, Any], begun: Callable[[], None]) -> ToolResult:
        begun()
        started = monotonic()
        failure = ""
        try:
            value = self._registered.run(**arguments)
            if isinstance(value, tuple):
                value, failure = value
        except Exception as error:
            value, failure = f"Error: {type(error).__name__}: {error_text(error)}", "error"
        fields = pack_result(value, self._max_chars, self._side)
        return unpack_result({**fields, "failure": failure or fields.get("failure", "")}, monotonic() - started)
