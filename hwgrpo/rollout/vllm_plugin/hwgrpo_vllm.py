"""Taking new weights, and guarding the server's door: the part of hwgrpo that runs inside vLLM.

It must run in the server's environment, which may be much older than the trainer's (vllm-ascend 0.23 has torch 2.10):
it imports only torch and safetensors, and calls only what vLLM 0.23 to 0.33 have alike.
"""

from __future__ import annotations

import asyncio
import hmac
import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

TOKEN_VARIABLE = "HWGRPO_SERVER_TOKEN"
"""Environment variable of the server with the token that every request must bring."""
LIFELINE_VARIABLE = "HWGRPO_SERVER_LIFELINE"
"""Environment variable of a server that ends when its standard input is closed: when the run that started it is
gone."""
ADAPTER = "hwgrpo-adapter"
"""Name of the model that has the adapter."""
WEIGHTS_ROUTE = "/hwgrpo/weights"
VERSION_HEADER = "x-hwgrpo-weight-version"
LARGEST_ORDER = 1 << 16
"""Bytes of the largest body that `WEIGHTS_ROUTE` reads."""


def load_weights(worker: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Give a worker's model new weights, under their names in a Hugging Face checkpoint.

    `model.load_weights` alone will not do: layers have packed their weights, and some have let go of the originals.

    Args:
        worker: a worker of vLLM.
        weights: all of them.
    """
    # vllm-ascend: reformatted weights would be overwritten by plain ones; it says which variable to set.
    check = getattr(worker, "_check_nz_disabled", None)
    if check is not None:
        check()
    with torch.device(worker.device):
        worker.model_runner.reload_weights(weights_iterator=weights)
    for module in worker.model_runner.get_model().modules():
        # On a CPU an LM head tied to the embeddings multiplies with a packed copy, which reloading leaves as it was.
        if hasattr(module, "cpu_linear") and hasattr(module, "quant_method") and module.weight.numel() > 0:
            module.quant_method.process_weights_after_loading(module)


def stored_weights(folder: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of a folder of safetensors files, one at a time."""
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a dict)
                yield name, file.get_tensor(name)


class WorkerExtension:
    """Methods that every worker of the server gets (`--worker-extension-cls hwgrpo_vllm.WorkerExtension`)."""

    def hwgrpo_load_weights(self, folder: str) -> None:
        """Take the weights of a folder."""
        load_weights(self, stored_weights(folder))


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
        """GET tells the version; POST {"folder": ..., "version": ..., "adapter": bool} takes new weights."""
        if scope["method"] != "POST":
            await _answer(send, 200, {"version": self._version})
            return
        try:
            order = json.loads(await _body(receive))
            folder, version, adapter = str(order["folder"]), int(order["version"]), bool(order["adapter"])
        except (ValueError, KeyError, TypeError) as error:
            await _answer(send, 400, {"error": f"not an order for weights: {error!r}"})
            return
        async with self._changed:
            await self._changed.wait_for(lambda: not self._loading)
            self._loading = True
            await self._changed.wait_for(lambda: self._running == 0)
        try:
            state = scope["app"].state
            if adapter:
                await self._take_adapter(state, folder)
            else:
                await state.engine_client.collective_rpc("hwgrpo_load_weights", args=(folder,))
            await state.engine_client.reset_prefix_cache()
            self._version = version
            await _answer(send, 200, {"version": version})
        except Exception as error:  # the trainer is told what went wrong here, and keeps or ends the server
            self._version = -1  # half of the new weights may be in place
            await _answer(send, 500, {"error": f"{type(error).__name__}: {error}"})
        finally:
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
