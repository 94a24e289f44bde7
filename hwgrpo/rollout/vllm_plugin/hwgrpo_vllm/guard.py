"""ASGI middleware of the server: checks the token, and swaps weights between requests."""

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

from .engine_images import generate, until_disconnect, why_without_images
from .group import communication_library
from .http_protocol import (
    ADAPTER,
    GROUP_ROUTE,
    IMAGES_ROUTE,
    LEASE,
    LIFELINE_VARIABLE,
    NO_WEIGHTS,
    OWNER_HEADER,
    PROTOCOL,
    TOKEN_VARIABLE,
    VERSION_HEADER,
    WEIGHTS_ROUTE,
)

MAX_BODY_BYTES = 1 << 16
"""Limit on a request body that the middleware reads itself."""
MAX_IMAGE_BYTES = 1 << 31
"""Limit on one with images."""
MAX_LABEL_CHARS = 4096
"""Limit on the label of weights, which is sent in a header."""
QUIET_TIMEOUT = 600.0
"""Seconds that a weight update waits for running requests to end, and requests for a weight update."""


class RequestRefused(Exception):
    """A request that is rejected.

    Args:
        status: status of the HTTP response.
        content: its body.
    """

    def __init__(self, status: int, **content: str) -> None:
        super().__init__(content)
        self.status, self.content = status, content


class OwnerLease:
    """Exclusive claim of one trainer on the server.

    Other trainers are rejected until the holder has sent no request for `LEASE` seconds. A restart of the same run gets
    the server at once, and its earlier session is rejected from then on.
    """

    def __init__(self) -> None:
        self._holder_info: dict[str, Any] | None = None
        self._last_heard = 0.0
        self._superseded: set[str] = set()

    def hear(self, session: str) -> None:
        """Record that a trainer has sent a request."""
        if self._holder_info is not None and self._holder_info["session"] == session:
            self._last_heard = time.monotonic()

    def claim(self, owner: Mapping[str, Any]) -> str | None:
        """Give the server to a trainer; return the holder's name where that is rejected, else None.

        Args:
            owner: its "run", "session", "name" and whether to "take_over", as `server_owner.Owner` has them.
        """
        holder, session = self._holder_info, str(owner["session"])
        if holder is not None and holder["session"] != session:
            silent = time.monotonic() - self._last_heard
            free = holder["run"] == owner["run"] or owner.get("take_over") is True or silent > LEASE
            if session in self._superseded or not free:
                same = ", another process of this same run" if holder["run"] == owner["run"] else ""
                return f"{holder['name']}{same}, last heard of {silent:.0f} s ago"
            self._superseded.add(holder["session"])
        self._holder_info = {name: str(owner[name]) for name in ("run", "session", "name")}
        self.hear(session)
        return None

    def release(self, session: str) -> None:
        """Leave the server to whoever comes next."""
        if self._holder_info is not None and self._holder_info["session"] == session:
            self._holder_info = None


class Guard:
    """ASGI middleware (`--middleware hwgrpo_vllm.Guard`): checks the token, and swaps weights between requests.

    Every generation response carries the version of the weights that sampled it: requests wait while weights load, and
    weights wait until no request is running. vLLM's development mode is not needed.

    Args:
        app: the wrapped application.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        token = os.environ.get(TOKEN_VARIABLE, "")
        if not token:
            raise ValueError(f"{TOKEN_VARIABLE} is empty: a server without a token would serve anybody")
        self._token = b"Bearer " + token.encode()
        self._version = NO_WEIGHTS
        self._holder = OwnerLease()
        self._running = 0
        self._changed = asyncio.Condition()
        self._loading = False
        self._asleep = False
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
        authorization = headers.get(b"authorization", b"")
        if scope["type"] != "http" or not hmac.compare_digest(authorization, self._token):
            await _respond(send, 401, {"error": "the token is missing or wrong"})
            return
        self._holder.hear(headers.get(OWNER_HEADER.encode(), b"").decode("latin-1"))
        if scope["path"] == WEIGHTS_ROUTE:
            await self._handle_weights(scope, receive, send)
        elif scope["path"] == GROUP_ROUTE and scope["method"] == "POST":
            await self._join_group(scope, receive, send)
        elif scope["path"].startswith("/v1/") and scope["method"] == "POST":
            await self._generate(self._app, scope, receive, send)
        elif scope["path"] == IMAGES_ROUTE and scope["method"] == "POST":
            await self._generate(_answer_images, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _generate(self, app: Any, scope: Any, receive: Any, send: Any) -> None:
        """Have `app` answer a request, with the version of the weights in a header."""
        try:
            async with self._changed:
                await self._wait_until(lambda: not self._loading, "new weights are still on their way")
                if self._asleep:
                    raise RequestRefused(503, error="this server sleeps until it gets new weights")
                self._running += 1
        except RequestRefused as refusal:
            await _respond(send, refusal.status, refusal.content)
            return
        stamp = (VERSION_HEADER.encode(), self._version.encode())

        async def stamped(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), stamp]}
            await send(message)

        try:
            await app(scope, receive, stamped)
        finally:
            async with self._changed:
                self._running -= 1
                self._changed.notify_all()

    async def _handle_weights(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle the weights route.

        GET returns the status; POST {"owner": ...} claims the server, and with {"version": ...} loads weights. They are
        in {"folder": ..., "adapter": bool}, or are received through the group as transfer number {"transfer": ...}.
        {"sleep": level} frees weights and cache until weights are loaded, {"release": true} releases the server.
        """
        state = scope["app"].state
        if scope["method"] != "POST":
            await _respond(send, 200, _status(self._version, self._group, state))
            return
        try:
            body = await _read_body(receive)
            owner = _parse_owner(body["owner"])
            version = _check_label(body["version"]) if "version" in body else None
            transfer = int(body["transfer"]) if "transfer" in body else None
            level = int(body["sleep"]) if "sleep" in body else None
            from_folder = version is not None and transfer is None
            folder, adapter = (str(body["folder"]), bool(body["adapter"])) if from_folder else ("", False)
        except (ValueError, KeyError, TypeError) as error:
            await _respond(send, 400, {"error": f"not a request for weights: {error!r}"})
            return
        if body.get("release") is True:
            self._holder.release(owner["session"])
            await _respond(send, 200, {})
            return
        try:
            if level is not None:
                await self._sleep(owner, state, level)
                await _respond(send, 200, {"version": self._version})
                return
            if version is None:
                self._claim(owner)
                await _respond(send, 200, {"version": self._version})
                return
            await self._pause_requests(owner)
        except RequestRefused as refusal:
            await _respond(send, refusal.status, refusal.content)
            return
        try:
            if self._asleep:
                await state.engine_client.wake_up(["weights"])
            if transfer is not None:
                await state.engine_client.collective_rpc("hwgrpo_receive_weights", args=(transfer,))
            elif adapter:
                await self._load_adapter(state, folder)
            else:
                await state.engine_client.collective_rpc("hwgrpo_load_weights", args=(folder,))
            if self._asleep:
                await state.engine_client.wake_up(["kv_cache"])  # when the weights are there: loading takes memory
                self._asleep = False
            await state.engine_client.reset_prefix_cache()
            if not why_without_images(state.engine_client.vllm_config.model_config):
                # loading drops the features, and another run's weights may have the same version
                await state.engine_client.reset_encoder_cache()
            self._version = version
            await _respond(send, 200, {"version": version})
        except Exception as error:  # the response carries the error to the trainer, which keeps or stops the server
            self._version = NO_WEIGHTS  # the new weights may be loaded in part
            if transfer is not None:
                self._group = None
            await _respond(send, 500, {"error": f"{type(error).__name__}: {error}"})
        finally:
            await self._resume_requests()

    async def _sleep(self, owner: Mapping[str, Any], state: Any, level: int) -> None:
        """Free weights and cache: level 1 keeps the weights in host memory, 2 drops them. On a CPU nothing is freed.

        Raises:
            RequestRefused: the server cannot, or belongs to another trainer.
        """
        if not _can_sleep(state):
            raise RequestRefused(400, error="this server cannot free its memory: start it with --enable-sleep-mode")
        await self._pause_requests(owner)
        try:
            self._asleep = True
            await state.engine_client.sleep(level)
        except Exception as error:  # the response carries it to the trainer
            raise RequestRefused(500, error=f"{type(error).__name__}: {error}") from error
        finally:
            await self._resume_requests()

    async def _join_group(self, scope: Any, receive: Any, send: Any) -> None:
        """Have all workers join the trainer's group; the body has `Group`'s arguments by name."""
        try:
            body = await _read_body(receive)
            owner = _parse_owner(body.pop("owner"))
            name = str(body["name"])
        except (ValueError, KeyError, TypeError) as error:
            await _respond(send, 400, {"error": f"not a request for a group: {error!r}"})
            return
        try:
            await self._pause_requests(owner)
        except RequestRefused as refusal:
            await _respond(send, refusal.status, refusal.content)
            return
        try:
            self._group = None
            await scope["app"].state.engine_client.collective_rpc("hwgrpo_join_group", args=(body,))
            self._group = name
            await _respond(send, 200, {"group": name})
        except Exception as error:  # the trainer gets the error, and sends weights through a folder
            await _respond(send, 500, {"error": f"{type(error).__name__}: {error}"})
        finally:
            await self._resume_requests()

    def _claim(self, owner: Mapping[str, Any]) -> None:
        holder = self._holder.claim(owner)
        if holder is not None:
            raise RequestRefused(409, error="this server has the weights of another run", holder=holder)

    async def _pause_requests(self, owner: Mapping[str, Any]) -> None:
        """Hold new requests back and wait until none is running.

        Raises:
            RequestRefused: the server belongs to another trainer, or running requests do not end in time.
        """
        async with self._changed:
            await self._wait_until(lambda: not self._loading, "other weights are still on their way")
            self._claim(owner)  # only now: another trainer may have claimed the server meanwhile
            self._loading = True
            try:
                await self._wait_until(lambda: self._running == 0, "requests are still running")
            except BaseException:
                self._loading = False
                self._changed.notify_all()
                raise

    async def _wait_until(self, ready: Callable[[], bool], problem: str) -> None:
        """Wait until `ready()`; the caller holds `_changed`."""
        try:
            await asyncio.wait_for(self._changed.wait_for(ready), QUIET_TIMEOUT)
        except TimeoutError as error:
            raise RequestRefused(503, error=f"{problem} after {QUIET_TIMEOUT:g} s") from error

    async def _resume_requests(self) -> None:
        async with self._changed:
            self._loading = False
            self._changed.notify_all()

    async def _load_adapter(self, state: Any, folder: str) -> None:
        await state.engine_client.collective_rpc("hwgrpo_check_files", args=(folder,))
        old, self._adapter = self._adapter, self._adapter + 1
        request = importlib.import_module("vllm.lora.request").LoRARequest(ADAPTER, self._adapter, folder)
        if old:
            await state.engine_client.remove_lora(old)
        await state.engine_client.add_lora(request)
        state.openai_serving_models.lora_requests[ADAPTER] = request


def _status(version: str, group: str | None, state: Any) -> dict[str, Any]:
    status = {"protocol": PROTOCOL, "version": version, "group": group, "can_sleep": _can_sleep(state)}
    without_images = why_without_images(state.engine_client.vllm_config.model_config)
    return {**status, "without_images": without_images, **_group_support(state)}


async def _answer_images(scope: Any, receive: Any, send: Any) -> None:
    """Answer a request to sample a prompt with images."""
    try:
        request = await _read_body(receive, MAX_IMAGE_BYTES)
        found = await until_disconnect(receive, generate(scope["app"].state, request))
    except (KeyError, TypeError, ValueError) as error:
        await _respond(send, 400, {"error": f"not a request for a prompt with images: {error!r}"})
        return
    except Exception as error:  # the response carries it to the trainer; vLLM's own has no text
        cause = f" ({error.__cause__!r})" if error.__cause__ is not None else ""
        await _respond(send, 500, {"error": f"{type(error).__name__}: {error}{cause}"})
        return
    if found is not None:
        await _respond(send, 200, found)


def _can_sleep(state: Any) -> bool:
    """Return whether the weights were loaded so that their memory can be freed; a CPU takes the call and frees none."""
    platform = importlib.import_module("vllm.platforms").current_platform
    enabled = state.engine_client.vllm_config.model_config.enable_sleep_mode
    return bool(enabled) or not platform.is_sleep_mode_available()


def _group_support(state: Any) -> Mapping[str, Any]:
    """Return the parameters for a group with this server's workers; empty with data parallelism."""
    parallel = state.engine_client.vllm_config.parallel_config
    if parallel.data_parallel_size > 1:
        return {}
    device_type = importlib.import_module("vllm.platforms").current_platform.device_type
    backend = dist.get_default_backend_for_device(device_type)  # vllm-ascend does not name its own
    return {"library": communication_library(backend), "workers": parallel.world_size}


def _end_with_standard_input() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)


def _parse_owner(owner: Any) -> Mapping[str, Any]:
    """Return the trainer that sent a request.

    Raises:
        KeyError, TypeError: a field is missing.
    """
    return {**owner, **{name: str(owner[name]) for name in ("run", "session", "name")}}


def _check_label(version: Any) -> str:
    """Return the label of a trainer's weights, which is sent in a header.

    Raises:
        ValueError: it is not valid in a header.
    """
    if not isinstance(version, str) or not 0 < len(version) <= MAX_LABEL_CHARS or not version.isascii():
        raise ValueError(f"version={version!r:.80} does not fit a header")
    if not version.isprintable():
        raise ValueError("version has characters that do not fit a header")
    return version


async def _read_body(receive: Any, largest: int = MAX_BODY_BYTES) -> dict[str, Any]:
    """Read the JSON object in a request's body of at most `largest` bytes.

    Raises:
        ValueError, TypeError: it is no JSON object, or too large.
    """
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > largest:
            raise ValueError("the request is too large")
        if not message.get("more_body"):
            break
    try:
        content = json.loads(body)
    except RecursionError as error:
        raise ValueError("it is nested too deep") from error
    if not isinstance(content, dict):
        raise TypeError("it is no object")
    return content


async def _respond(send: Any, status: int, content: dict[str, Any]) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})
