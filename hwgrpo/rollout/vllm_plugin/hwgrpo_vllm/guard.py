"""The guard of the server's door: asks for the token, and changes weights between requests."""

from __future__ import annotations

import asyncio
import hmac
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import distributed as dist

from .group import library
from .words import (
    ADAPTER,
    GROUP_ROUTE,
    LEASE,
    LIFELINE_VARIABLE,
    NO_WEIGHTS,
    OWNER_HEADER,
    TOKEN_VARIABLE,
    VERSION_HEADER,
    WEIGHTS_ROUTE,
)

LARGEST_ORDER = 1 << 16
"""Bytes of the largest body that this reads itself."""
LONGEST_LABEL = 4096
"""Characters of the longest name of weights, which goes into a header."""
QUIET_TIMEOUT = 600.0
"""Seconds that an order waits for running requests to end, and requests for an order."""


class Refusal(Exception):
    """A request that is not carried out.

    Args:
        status: of the HTTP response.
        content: its body.
    """

    def __init__(self, status: int, **content: str) -> None:
        super().__init__(content)
        self.status, self.content = status, content


class Holder:
    """The trainer whose weights the server has. One server has the weights of one trainer at a time.

    Another one is refused while the holder is heard of. The same run takes the server at once, since it was started
    again, and what it was before is refused from then on.
    """

    def __init__(self) -> None:
        self._held: dict[str, Any] | None = None
        self._heard = 0.0
        self._superseded: set[str] = set()

    def hear(self, session: str) -> None:
        """Note that a trainer has sent a request."""
        if self._held is not None and self._held["session"] == session:
            self._heard = time.monotonic()

    def claim(self, owner: Mapping[str, Any]) -> str | None:
        """Give the server to a trainer; return the name of the one that has it where that is refused.

        Args:
            owner: its "run", "session", "name" and whether to "take_over", as `server_owner.Owner` has them.
        """
        held, session = self._held, str(owner["session"])
        if held is not None and held["session"] != session:
            silent = time.monotonic() - self._heard
            free = held["run"] == owner["run"] or owner.get("take_over") is True or silent > LEASE
            if session in self._superseded or not free:
                same = ", another process of this same run" if held["run"] == owner["run"] else ""
                return f"{held['name']}{same}, last heard of {silent:.0f} s ago"
            self._superseded.add(held["session"])
        self._held = {name: str(owner[name]) for name in ("run", "session", "name")}
        self.hear(session)
        return None

    def release(self, session: str) -> None:
        """Leave the server to whoever comes next."""
        if self._held is not None and self._held["session"] == session:
            self._held = None


class Guard:
    """ASGI middleware (`--middleware hwgrpo_vllm.Guard`): asks for the token, and swaps weights between requests.

    Every answer to a generation carries the version of the weights that sampled it: requests wait while weights are
    taken, and weights wait until no request is running. No part of vLLM's development mode is needed.

    Args:
        app: what is guarded.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        token = os.environ.get(TOKEN_VARIABLE, "")
        if not token:
            raise ValueError(f"{TOKEN_VARIABLE} is empty: a server without a token would serve anybody")
        self._token = b"Bearer " + token.encode()
        self._version = NO_WEIGHTS
        self._holder = Holder()
        self._running = 0
        self._changed = asyncio.Condition()
        self._loading = False
        self._adapter = 0
        self._group: str | None = None
        if os.environ.get(LIFELINE_VARIABLE):
            threading.Thread(target=_end_with_standard_input, daemon=True).start()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle a connection."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = dict(scope.get("headers", ()))
        given = headers.get(b"authorization", b"")
        if scope["type"] != "http" or not hmac.compare_digest(given, self._token):
            await _answer(send, 401, {"error": "the token is missing or wrong"})
            return
        self._holder.hear(headers.get(OWNER_HEADER.encode(), b"").decode("latin-1"))
        if scope["path"] == WEIGHTS_ROUTE:
            await self._weights(scope, receive, send)
        elif scope["path"] == GROUP_ROUTE and scope["method"] == "POST":
            await self._join(scope, receive, send)
        elif scope["path"].startswith("/v1/") and scope["method"] == "POST":
            await self._generate(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _generate(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            async with self._changed:
                await self._changes(lambda: not self._loading, "new weights are still on their way")
                self._running += 1
        except Refusal as refusal:
            await _answer(send, refusal.status, refusal.content)
            return
        stamp = (VERSION_HEADER.encode(), self._version.encode())

        async def stamped(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), stamp]}
            await send(message)

        try:
            await self._app(scope, receive, stamped)
        finally:
            async with self._changed:
                self._running -= 1
                self._changed.notify_all()

    async def _weights(self, scope: Any, receive: Any, send: Any) -> None:
        """GET reports what there is; POST {"owner": ...} claims the server, and with {"version": ...} takes weights.

        They are in {"folder": ..., "adapter": bool}, or come through the group as its {"transfer": ...}th.
        {"release": true} leaves the server to whoever comes next.
        """
        state = scope["app"].state
        if scope["method"] != "POST":
            await _answer(send, 200, {"version": self._version, "group": self._group, **_offer(state)})
            return
        try:
            order = await _order(receive)
            owner = _checked(order["owner"])
            version = _label(order["version"]) if "version" in order else None
            transfer = int(order["transfer"]) if "transfer" in order else None
            from_folder = version is not None and transfer is None
            folder, adapter = (str(order["folder"]), bool(order["adapter"])) if from_folder else ("", False)
        except (ValueError, KeyError, TypeError) as error:
            await _answer(send, 400, {"error": f"not an order for weights: {error!r}"})
            return
        if order.get("release") is True:
            self._holder.release(owner["session"])
            await _answer(send, 200, {})
            return
        try:
            if version is None:
                self._claim(owner)
                await _answer(send, 200, {"version": self._version})
                return
            await self._alone(owner)
        except Refusal as refusal:
            await _answer(send, refusal.status, refusal.content)
            return
        try:
            if transfer is not None:
                await state.engine_client.collective_rpc("hwgrpo_receive_weights", args=(transfer,))
            elif adapter:
                await self._take_adapter(state, folder)
            else:
                await state.engine_client.collective_rpc("hwgrpo_load_weights", args=(folder,))
            await state.engine_client.reset_prefix_cache()
            self._version = version
            await _answer(send, 200, {"version": version})
        except Exception as error:  # the trainer is told what went wrong here, and keeps or ends the server
            self._version = NO_WEIGHTS  # half of the new weights may be in place
            if transfer is not None:
                self._group = None
            await _answer(send, 500, {"error": f"{type(error).__name__}: {error}"})
        finally:
            await self._open()

    async def _join(self, scope: Any, receive: Any, send: Any) -> None:
        """Have all workers meet the trainer in a group; the order is `Group`'s arguments by name."""
        try:
            order = await _order(receive)
            owner = _checked(order.pop("owner"))
            name = str(order["name"])
        except (ValueError, KeyError, TypeError) as error:
            await _answer(send, 400, {"error": f"not an order for a group: {error!r}"})
            return
        try:
            await self._alone(owner)
        except Refusal as refusal:
            await _answer(send, refusal.status, refusal.content)
            return
        try:
            self._group = None
            await scope["app"].state.engine_client.collective_rpc("hwgrpo_join_group", args=(order,))
            self._group = name
            await _answer(send, 200, {"group": name})
        except Exception as error:  # the trainer is told, and sends weights in another way
            await _answer(send, 500, {"error": f"{type(error).__name__}: {error}"})
        finally:
            await self._open()

    def _claim(self, owner: Mapping[str, Any]) -> None:
        holder = self._holder.claim(owner)
        if holder is not None:
            raise Refusal(409, error="this server has the weights of another run", holder=holder)

    async def _alone(self, owner: Mapping[str, Any]) -> None:
        """Return when no request is running, and those that come wait.

        Raises:
            Refusal: the server belongs to another trainer, or what runs does not end in time.
        """
        async with self._changed:
            await self._changes(lambda: not self._loading, "other weights are still on their way")
            self._claim(owner)  # only now: another trainer may have got the server meanwhile
            self._loading = True
            try:
                await self._changes(lambda: self._running == 0, "requests are still running")
            except BaseException:
                self._loading = False
                self._changed.notify_all()
                raise

    async def _changes(self, ready: Callable[[], bool], problem: str) -> None:
        """Return when `ready`; `_changed` is held."""
        try:
            await asyncio.wait_for(self._changed.wait_for(ready), QUIET_TIMEOUT)
        except TimeoutError as error:
            raise Refusal(503, error=f"{problem} after {QUIET_TIMEOUT:g} s") from error

    async def _open(self) -> None:
        async with self._changed:
            self._loading = False
            self._changed.notify_all()

    async def _take_adapter(self, state: Any, folder: str) -> None:
        old, self._adapter = self._adapter, self._adapter + 1
        request = importlib.import_module("vllm.lora.request").LoRARequest(ADAPTER, self._adapter, folder)
        if old:
            await state.engine_client.remove_lora(old)
        await state.engine_client.add_lora(request)
        state.openai_serving_models.lora_requests[ADAPTER] = request


def _offer(state: Any) -> Mapping[str, Any]:
    """Return what a group with this server's workers would be like, or nothing where they are of several engines."""
    parallel = state.engine_client.vllm_config.parallel_config
    if parallel.data_parallel_size > 1:
        return {}
    device_type = importlib.import_module("vllm.platforms").current_platform.device_type
    backend = dist.get_default_backend_for_device(device_type)  # vllm-ascend does not name its own
    return {"library": library(backend), "workers": parallel.world_size}


def _end_with_standard_input() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)


def _checked(owner: Any) -> Mapping[str, Any]:
    """Return the trainer that an order is from.

    Raises:
        KeyError, TypeError: the order does not say.
    """
    return {**owner, **{name: str(owner[name]) for name in ("run", "session", "name")}}


def _label(version: Any) -> str:
    """Return what a trainer calls its weights, which goes into a header.

    Raises:
        ValueError: no header may hold it.
    """
    if not isinstance(version, str) or not 0 < len(version) <= LONGEST_LABEL or not version.isascii():
        raise ValueError(f"version={version!r:.80} does not fit a header")
    if not version.isprintable():
        raise ValueError("version has characters that do not fit a header")
    return version


async def _order(receive: Any) -> dict[str, Any]:
    """Return what a trainer asks for.

    Raises:
        ValueError, TypeError: it is no JSON object, or too large.
    """
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > LARGEST_ORDER:
            raise ValueError("the request is too large")
        if not message.get("more_body"):
            break
    try:
        order = json.loads(body)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    if not isinstance(order, dict):
        raise TypeError("it is no object")
    return order


async def _answer(send: Any, status: int, content: dict[str, Any]) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})
