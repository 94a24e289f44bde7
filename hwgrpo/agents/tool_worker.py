"""What the process of a tool does: receives calls and sends back their results.

Its calls share no seed: a tool that draws random numbers seeds them itself.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

from hwgrpo.agents.tool_results import pack_result, shorten
from hwgrpo.agents.tool_schema import make_schema
from hwgrpo.errors import ConfigError, error_text
from hwgrpo.rewards.processes.worker_process import Link
from hwgrpo.user_code import describe_error, import_plugins, load_function, raised_by_user_code


def serve(setup: Mapping[str, Any], link: Link) -> None:
    """Load the function and serve its calls until the trainer closes the pipe.

    Args:
        setup: plugins, tool (its setting), kwargs, key, describe: whether the trainer needs the schema, max_chars,
            truncate.
        link: the pipes to and from the trainer.
    """
    try:
        import_plugins(setup["plugins"])
        function = load_function(setup["tool"], f"{setup['key']}.name")
        ready = {}
        if setup["describe"]:
            if inspect.isclass(function):
                raise ConfigError(f"{setup['key']}.name={setup['tool']!r} is a class; a tool is a function")
            _leave_torch_out()
            schema = make_schema(function, setup["kwargs"], setup["key"])
            ready = {"schema": schema, "is_async": inspect.iscoroutinefunction(function)}
    except ConfigError as error:
        link.send({"refused": str(error)})
        return
    link.send({"ready": ready})
    calls = _Calls(functools.partial(function, **setup["kwargs"]), setup, link)
    if inspect.iscoroutinefunction(function):
        asyncio.run(calls.serve_concurrently())
    else:
        calls.serve()


def _leave_torch_out() -> None:
    """Let `get_json_schema` not import torch, which takes seconds and hundreds of MiB, for hints of tensors alone."""
    if "torch" not in sys.modules:
        from transformers.utils import chat_template_utils

        setattr(chat_template_utils, "is_torch_available", lambda: False)  # noqa: B010 - it is an import there


class _Calls:
    """The calls of a function.

    Args:
        function: with the config's arguments bound.
        setup: max_chars, truncate.
        link: the pipes to and from the trainer.
    """

    def __init__(self, function: Callable[..., Any], setup: Mapping[str, Any], link: Link) -> None:
        self._function, self._link = function, link
        self._max_chars, self._side = setup["max_chars"], setup["truncate"]
        self._raised = False

    def serve(self) -> None:
        """Make one call after the other."""
        while (request := self._link.receive()) is not None:
            try:
                fields = pack_result(self._function(**request["arguments"]), self._max_chars, self._side)
            except BaseException as error:
                fields = self._failure(error)
            self._send(request, fields)

    async def serve_concurrently(self) -> None:
        """Make the calls of an async function as they arrive."""
        ended = asyncio.Event()
        running: set[asyncio.Task[None]] = set()

        def receive() -> None:
            request = self._link.receive()
            if request is None:
                loop.remove_reader(self._link.requests)
                ended.set()
                return
            task = loop.create_task(self._answer(request))
            running.add(task)
            task.add_done_callback(running.discard)

        loop = asyncio.get_running_loop()
        loop.add_reader(self._link.requests, receive)
        await ended.wait()

    async def _answer(self, request: Mapping[str, Any]) -> None:
        limit = asyncio.timeout(request["timeout"])
        try:
            async with limit:
                value = await self._function(**request["arguments"])
            fields = pack_result(value, self._max_chars, self._side)
        except asyncio.CancelledError:
            fields = {"text": "Error: the call was cancelled", "failure": "error"}
        except BaseException as error:
            overran = limit.expired() and isinstance(error, TimeoutError)
            fields = {"overran": True} if overran else self._failure(error)
        self._send(request, fields)

    def _failure(self, error: BaseException) -> dict[str, Any]:
        """Return the fields of a call that raised; the first one's place is printed for whoever wrote the tool."""
        if not raised_by_user_code(error):
            raise error
        if not self._raised:
            self._raised = True
            name = getattr(self._function, "func", self._function).__name__
            print(
                f"tool {name} raised {describe_error(error)}; the model reads this, and later ones are not printed",
                file=sys.stderr,
            )
        text = error_text(error, max(self._max_chars, 1))
        text = f"Error: {type(error).__name__}{f': {text}' if text else ''}"
        return {"text": shorten(text, self._max_chars, self._side), "failure": "error"}

    def _send(self, request: Mapping[str, Any], fields: Mapping[str, Any]) -> None:
        self._link.send({"number": request["number"], **fields})
