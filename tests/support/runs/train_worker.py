"""Run by torchrun: one `hwgrpo train` after another, in processes that are started once for all of them.

torchrun --nproc-per-node 2 train_worker.py COMM '[["RECIPE", "key=value", ...], ...]'

COMM is the torch.distributed backend of the device's collectives ("gloo").
"""

import json
import sys

import torch.distributed as dist

from hwgrpo.cli.main import main as hwgrpo
from hwgrpo.cli.process_exit import ended_as_rank
from hwgrpo.config import load_config
from hwgrpo.models.loading import resolve_model_path


def main() -> None:
    runs = json.loads(sys.argv[2])
    for recipe, *words in runs:
        # makes a built-in model: once there is a process group, transformers writes on rank 0 alone
        resolve_model_path(load_config(recipe, words).model.path)
    dist.init_process_group(sys.argv[1])
    for words in runs:
        code = hwgrpo(["train", *words])
        if code:
            sys.exit(code)
    dist.destroy_process_group()


if __name__ == "__main__":
    with ended_as_rank():
        main()
