"""What the process of a reward function does: receives calls and sends back their results."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from hwgrpo.errors import ConfigError
from hwgrpo.rewards.failures import Cancelled
from hwgrpo.rewards.functions import RewardFunction, run_concurrently, wait_for
from hwgrpo.rewards.processes.messages import pack_all, pack_one
from hwgrpo.rewards.processes.worker_process import Link, describe_raised
from hwgrpo.rewards.randomness import CONCURRENT, seeded
from hwgrpo.rewards.signatures import load_function, make_reward_function, refuse_class
from hwgrpo.user_code import import_plugins, raised_by_user_code


def serve(setup: Mapping[str, Any], link: Link) -> None:
    """Load the reward function and serve its calls until the trainer closes the pipe.

    Args:
        setup: plugins, reward, name, kwargs, context, key.
        link: the pipes to and from the trainer.
    """
    try:
        import_plugins(setup["plugins"])
        _, call = load_function(setup["reward"], f"{setup['key']}.name")
        refuse_class(call, setup["name"], setup["key"])
        function = make_reward_function(setup["name"], call, setup["kwargs"], setup["context"], setup["key"])
        if function.form == "batch":
            import torch  # noqa: F401 - its arguments are tensors: not within the first call's timeout
    except ConfigError as error:
        link.send({"refused": str(error)})
        return
    link.send({"ready": _description(function)})
    while (request := link.receive()) is not None:
        if function.is_async and function.form == "verl":
            with seeded(*request["seed"], CONCURRENT, with_torch=True):
                _serve_concurrently(function, request, link)
        else:
            for number, arguments in request["calls"]:
                with seeded(*request["seed"], number, with_torch=True):
                    reply = _serve(function, arguments, request["size"])
                link.send({"number": number, **reply})


def _serve(function: RewardFunction, arguments: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Make one call; return its part of the reply."""
    extras: list[dict[str, Any]] = [{} for _ in range(size)]
    try:
        value = wait_for(function.start(arguments, extras))
        packed = pack_one(value) if function.form == "verl" else pack_all(value)
    except BaseException as error:
        if not raised_by_user_code(error):
            raise
        return describe_raised(error)
    return {"value": packed, "extras": extras} if any(extras) else {"value": packed}


def _serve_concurrently(function: RewardFunction, request: Mapping[str, Any], link: Link) -> None:
    """Make the calls of an async function concurrently, and reply to each when it is done."""

    async def serve(number: int, arguments: Mapping[str, Any]) -> None:
        limit = asyncio.timeout(request["timeout"])
        try:
            async with limit:
                reply: dict[str, Any] = {"value": pack_one(await function.start(arguments, []))}
        except BaseException as error:
            if not raised_by_user_code(error):
                raise
            reply = {"overran": True} if limit.expired() and isinstance(error, TimeoutError) else describe_raised(error)
        link.send({"number": number, **reply})

    ended = run_concurrently([serve(number, arguments) for number, arguments in request["calls"]])
    for (number, _), result in zip(request["calls"], ended, strict=True):
        if isinstance(result, Cancelled):
            link.send({"number": number, **describe_raised(result)})
        elif isinstance(result, BaseException):
            raise result


def _description(function: RewardFunction) -> dict[str, Any]:
    return {
        "form": function.form,
        "parameters": sorted(function.parameters),
        "required": sorted(function.required),
        "open_ended": function.open_ended,
        "given": sorted(function.given),
        "is_async": function.is_async,
    }
