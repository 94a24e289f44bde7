"""Runs as a script in a child process: one rank of the collectives of strategies. Prints one line of JSON.

Its question: {"plugin", "device": as "cpu" or "xpu:1", "comm", "store": a file the ranks meet in, "rank", "world",
"dtypes": names of torch dtypes}. It stands alone (standard library and torch) and every exception becomes an error in
the output.
"""

import functools
import importlib
import json
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

MARKER = "hwgrpo.conformance_rank/1 "
SECONDS = 60
COUNT = 64
"""Elements that a rank contributes. Values are small integers, which every dtype holds exactly."""


def checks(rank: int, world: int, make: Callable[..., Any]) -> dict[str, Callable[[], tuple[Any, Any]]]:
    """Return the collectives that strategies use: name -> function that returns its result and the expected one.

    Args:
        rank: number of this process.
        world: number of processes.
        make: `(list of numbers) -> tensor on the device`.
    """
    import torch
    import torch.distributed as dist

    def of(each: int, count: int = COUNT) -> list[int]:
        return [each * 2 + index % 3 for index in range(count)]

    everyone = [value for each in range(world) for value in of(each)]
    total = [sum(values) for values in zip(*(of(each) for each in range(world)), strict=True)]

    def all_reduce() -> tuple[Any, Any]:
        tensor = make(of(rank))
        dist.all_reduce(tensor)
        return tensor, total

    def broadcast() -> tuple[Any, Any]:
        tensor = make(of(rank))
        dist.broadcast(tensor, src=world - 1)
        return tensor, of(world - 1)

    def all_gather() -> tuple[Any, Any]:
        parts = [make([0] * COUNT) for _ in range(world)]
        dist.all_gather(parts, make(of(rank)))
        return torch.cat(parts), everyone

    def all_gather_into_tensor() -> tuple[Any, Any]:
        gathered = make([0] * COUNT * world)
        dist.all_gather_into_tensor(gathered, make(of(rank)))
        return gathered, everyone

    def reduce_scatter_tensor() -> tuple[Any, Any]:
        own = make([0] * COUNT)
        dist.reduce_scatter_tensor(own, make([value + rank for each in range(world) for value in of(each)]))
        return own, [world * value + sum(range(world)) for value in of(rank)]

    def all_to_all_single() -> tuple[Any, Any]:
        # uneven: rank r sends r + 1 elements to each rank, with the receiver's number in them
        received = make([0] * sum(each + 1 for each in range(world)))
        sent = make([10 * rank + to for to in range(world) for _ in range(rank + 1)])
        dist.all_to_all_single(received, sent, [each + 1 for each in range(world)], [rank + 1] * world)
        return received, [10 * each + rank for each in range(world) for _ in range(each + 1)]

    named = all_reduce, broadcast, all_gather, all_gather_into_tensor, reduce_scatter_tensor, all_to_all_single
    return {check.__name__: check for check in named}


def compare(rank: int, world: int, device: Any, dtypes: list[str]) -> tuple[list[str], list[str]]:
    """Run every collective in every dtype; return those with the expected values, and what is wrong with others.

    Args:
        rank: number of this process.
        world: number of processes.
        device: this rank's device.
        dtypes: names of torch dtypes.
    """
    import torch

    done, wrong = [], []
    for name in dtypes:
        make = functools.partial(torch.tensor, device=device, dtype=getattr(torch, name))
        for collective, check in checks(rank, world, make).items():
            where = f"{collective} in {name}"
            try:
                got, expected = check()
            except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
                wrong.append(f"{where}: {type(error).__name__}: {str(error)[:200]}")
                continue
            if got.tolist() == expected:
                done.append(where)
            else:
                wrong.append(f"{where} gives {got.tolist()[:4]}..., not {expected[:4]}...")
    return done, wrong


def run_collectives(question: dict[str, Any]) -> dict[str, list[str]]:
    """Join the other ranks; return what `compare` does."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if question["plugin"]:
        importlib.import_module(question["plugin"])
    device = torch.device(question["device"])
    if device.index is not None:
        torch.get_device_module(device.type).set_device(device)
    rank, world = question["rank"], question["world"]
    dist.init_process_group(
        question["comm"], init_method=f"file://{question['store']}", rank=rank,
        world_size=world, timeout=timedelta(seconds=SECONDS),
    )  # fmt: skip
    done, wrong = compare(rank, world, device, question["dtypes"])
    if not wrong:
        dist.barrier()
    dist.destroy_process_group()
    return {"done": done, "wrong": wrong}


def main(question: dict[str, Any]) -> dict[str, Any]:
    """Return what `run_collectives` does, or the error."""
    try:
        return run_collectives(question)
    except (Exception, SystemExit) as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}


if __name__ == "__main__":
    print("\n" + MARKER + json.dumps(main(json.loads(sys.argv[1]))), flush=True)
