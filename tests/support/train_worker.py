"""Run by torchrun: one `hwgrpo train` after another, in processes that are started once for all of them.

torchrun --nproc-per-node 2 train_worker.py COMM '[["RECIPE", "key=value", ...], ...]'

COMM is the torch.distributed backend of the device's collectives ("gloo").
"""

import json
import sys

import torch.distributed as dist

from hwgrpo.cli.main import main

if __name__ == "__main__":
    dist.init_process_group(sys.argv[1])
    for words in json.loads(sys.argv[2]):
        code = main(["train", *words])
        if code:
            sys.exit(code)
    dist.destroy_process_group()
