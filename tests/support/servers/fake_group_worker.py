"""A worker of a server without a model: the plugin's own methods, and what it took is written to a file.

python fake_group_worker.py RANK RESULT.safetensors; each line of its input is [method, arguments] in JSON.
"""

import json
import sys
import traceback
from types import SimpleNamespace
from typing import Any

import torch
from hwgrpo_vllm import WorkerExtension  # pyright: ignore[reportMissingImports]
from safetensors.torch import save_file


class Worker(WorkerExtension):
    """What vLLM's worker has that the plugin uses."""

    def __init__(self, rank: int, result: str) -> None:
        self.rank, self.device = rank, torch.device("cpu")
        self.fails = False

        def reload_weights(weights_iterator: Any) -> None:
            taken = {}
            for name, weight in weights_iterator:
                taken[name] = weight.clone()
                if self.fails:
                    raise ValueError(f"no room for {name}")
            save_file(taken, result)

        self.model_runner = SimpleNamespace(reload_weights=reload_weights, get_model=torch.nn.Module)

    def set_fails(self, fails: bool) -> None:
        self.fails = fails

    def die(self, number: int) -> None:
        """End in the middle of a transfer."""
        assert self._hwgrpo_group is not None
        next(self._hwgrpo_group.receive(number))
        sys.exit(9)


worker = Worker(int(sys.argv[1]), sys.argv[2])
for line in sys.stdin:
    method, arguments = json.loads(line)
    try:
        getattr(worker, method)(*arguments)
        told = None
    except Exception as error:
        traceback.print_exc()
        told = f"{type(error).__name__}: {error}"
    print(json.dumps(told), flush=True)
