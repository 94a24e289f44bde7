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
from collections.abc import Mapping
from typing import Any

from torch import distributed as dist

from .group import library
from .words import ADAPTER, GROUP_ROUTE, LIFELINE_VARIABLE, TOKEN_VARIABLE, VERSION_HEADER, WEIGHTS_ROUTE

LARGEST_ORDER = 1 << 16
"""Bytes of the largest body that this reads itself."""


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
            raise ValueError(f"{TOKEN_VARIABLE} is empty: a server without a token would answer anybody")
        self._token = b"Bearer " + token.encode()
        self._version = -1
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
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] != "http" or not hmac.compare_digest(given, self._token):
            await _answer(send, 401, {"error": "the token is missing or wrong"})
        elif scope["path"] == WEIGHTS_ROUTE:
            await self._weights(scope, receive, send)
        elif scope["path"] == GROUP_ROUTE and scope["method"] == "POST":
            await self._join(scope, receive, send)
        elif scope["path"].startswith("/v1/") and scope["method"] == "POST":
            await self._generate(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _generate(self, scope: Any, receive: Any, send: Any) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._loading)
            self._running += 1
        stamp = (VERSION_HEADER.encode(), str(self._version).encode())

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
        """GET tells what there is; POST {"version": ...} takes new weights.

        They are in {"folder": ..., "adapter": bool}, or come through the group as its {"transfer": ...}th.
        """
        state = scope["app"].state
        if scope["method"] != "POST":
            await _answer(send, 200, {"version": self._version, "group": self._group, **_offer(state)})
            return
        try:
            order = json.loads(await _body(receive))
            version = int(order["version"])
            transfer = int(order["transfer"]) if "transfer" in order else None
            folder, adapter = ("", False) if "transfer" in order else (str(order["folder"]), bool(order["adapter"]))
        except (ValueError, KeyError, TypeError) as error:
            await _answer(send, 400, {"error": f"not an order for weights: {error!r}"})
            return
        await self._alone()
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
            self._version = -1  # half of the new weights may be in place
            if transfer is not None:
                self._group = None
            await _answer(send, 500, {"error": f"{type(error).__name__}: {error}"})
        finally:
            await self._open()

    async def _join(self, scope: Any, receive: Any, send: Any) -> None:
        """Have all workers meet the trainer in a group; the order is `Group`'s arguments by name."""
        try:
            order = json.loads(await _body(receive))
            name = str(order["name"])
        except (ValueError, KeyError, TypeError) as error:
            await _answer(send, 400, {"error": f"not an order for a group: {error!r}"})
            return
        await self._alone()
        try:
            self._group = None
            await scope["app"].state.engine_client.collective_rpc("hwgrpo_join_group", args=(order,))
            self._group = name
            await _answer(send, 200, {"group": name})
        except Exception as error:  # the trainer is told, and sends weights in another way
            await _answer(send, 500, {"error": f"{type(error).__name__}: {error}"})
        finally:
            await self._open()

    async def _alone(self) -> None:
        """Return when no request is running; those that come wait."""
        async with self._changed:
            await self._changed.wait_for(lambda: not self._loading)
            self._loading = True
            await self._changed.wait_for(lambda: self._running == 0)

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


async def _body(receive: Any) -> bytes:
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > LARGEST_ORDER:
            raise ValueError("the request is too large")
        if not message.get("more_body"):
            return body


async def _answer(send: Any, status: int, content: dict[str, Any]) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})
