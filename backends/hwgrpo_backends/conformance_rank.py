"""Runs as a script in a child process: one rank of an all-reduce of a device's tensors. Prints one line of JSON.

Its question: {"plugin", "device": as "cpu" or "xpu:1", "comm", "store": a file the ranks meet in, "rank", "world"}.
It stands alone (standard library and torch) and every exception becomes an error in the output.
"""

import importlib
import json
import sys
from datetime import timedelta
from typing import Any

MARKER = "hwgrpo.conformance_rank/1 "
SECONDS = 60


def all_reduce(question: dict[str, Any]) -> float:
    """Return the all-reduced sum of the ranks' numbers 1, 2, ..."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if question["plugin"]:
        importlib.import_module(question["plugin"])
    device = torch.device(question["device"])
    if device.index is not None:
        torch.get_device_module(device.type).set_device(device)
    dist.init_process_group(
        question["comm"], init_method=f"file://{question['store']}", rank=question["rank"],
        world_size=question["world"], timeout=timedelta(seconds=SECONDS),
    )  # fmt: skip
    tensor = torch.full((1024,), float(question["rank"] + 1), device=device)
    dist.all_reduce(tensor)
    low, high = tensor.min().item(), tensor.max().item()
    dist.destroy_process_group()
    return low if low == high else float("nan")


def main(question: dict[str, Any]) -> dict[str, Any]:
    """Return the sum, or the error."""
    try:
        return {"sum": all_reduce(question)}
    except (Exception, SystemExit) as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}


if __name__ == "__main__":
    print("\n" + MARKER + json.dumps(main(json.loads(sys.argv[1]))), flush=True)
