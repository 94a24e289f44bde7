"""TRL's `ChunkedLogProbFunction`, its default head for GRPO. Signature: trl 1.16.0, trl/kernels/chunked_logprob.py."""

from functools import cache

from torch import Tensor

from hwgrpo.bench.kernels.peers.peer import Peer, Score, anywhere

CHUNK_COLUMNS = 32768
"""Vocabulary entries of a tile: `_CHUNKED_LOGPROB_CHUNK_SIZE` of trl/trainer/utils.py."""


@cache
def _load() -> Score:
    from trl.kernels import ChunkedLogProbFunction  # pyright: ignore[reportMissingImports]

    def score(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        found = ChunkedLogProbFunction.apply(hidden, weight, None, targets, 1.0, CHUNK_COLUMNS, None, 1.0, ("entropy",))
        return found[0], found[1]

    return score


CHUNKED = Peer("TRL chunked", "trl", ("trl", "accelerate"), anywhere, score=_load)
