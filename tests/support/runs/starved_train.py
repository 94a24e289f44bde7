"""Run by torchrun: `hwgrpo train`, where some ranks have no memory for micro-batches of more than LIMIT tokens.

torchrun --nproc-per-node 2 starved_train.py LIMIT RANK[,RANK...] train RECIPE [key=value ...]
"""

import os
import sys

import torch

from hwgrpo.cli.main import main
from hwgrpo.cli.process_exit import ended_as_rank
from hwgrpo.training.policy.policy_model import PolicyModel


def starve(limit: int) -> list[int]:
    """Let a policy's forward ask for more memory than there is where its batch has over `limit` tokens.

    Returns:
        The tokens of each forward that found no memory, as they come.
    """
    plain = PolicyModel.forward
    refused: list[int] = []

    def forward(self, batch, *arguments, **options):
        if batch.input_ids.numel() > limit:
            refused.append(batch.input_ids.numel())
            torch.empty(10**15, dtype=torch.uint8)
        return plain(self, batch, *arguments, **options)

    PolicyModel.forward = forward
    return refused


if __name__ == "__main__":
    limit, ranks, *words = sys.argv[1:]
    if os.environ["RANK"] in ranks.split(","):
        starve(int(limit))
    with ended_as_rank():
        raise SystemExit(main(words))
