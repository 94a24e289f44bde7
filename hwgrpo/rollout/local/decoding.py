"""The decoding loop: one prefill per prompt, a token per step for all its samples, finished rows dropped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from hwgrpo.errors import RunError
from hwgrpo.rollout.counter_rng import uniforms
from hwgrpo.rollout.local.decode_rows import Rows
from hwgrpo.rollout.local.token_sampling import draw
from hwgrpo.rollout.stopping import StopDetector
from hwgrpo.values import Sampling

UNIFORM_BLOCK = 64
"""Positions whose uniforms are computed and copied to the device at once."""


@dataclass(frozen=True)
class Decoded:
    """S ragged responses of R tokens in total, on the CPU."""

    lengths: np.ndarray
    """[S] int64."""
    tokens: np.ndarray
    """[R] int64."""
    logprobs: np.ndarray
    """[R] fp32."""
    finished: np.ndarray
    """[S] bool."""
    rows_decoded: int
    """Drawn tokens, including those of rows that had ended."""
    versions: np.ndarray
    """[R] int64: version of the weights that gave each token's logits."""
    floors: np.ndarray | None
    """[R] fp32: `Completions.floors`; None without filters."""


def decode(
    rows: Rows,
    prompt_of: np.ndarray,
    keys: np.ndarray,
    sampling: Sampling,
    watch: StopDetector,
    device: torch.device,
    sync_every: int = 1,
    apply_new_weights: Callable[[], int] = lambda: 0,
    overdue: Callable[[np.ndarray], bool] = lambda growing: False,
) -> Decoded:
    """Generate S responses to G distinct prompts; each prompt goes through the model once.

    Args:
        rows: rows of the G prompts, not prefilled yet.
        prompt_of: [S] int64, the prompt of each response.
        keys: [S] uint64 of `stream_keys`.
        sampling: filters, temperature and length limit.
        watch: detects the end of responses.
        device: device of the rows.
        sync_every: steps between reads of the drawn tokens by the host. Results do not depend on it. Each read waits
            for the device; in between, responses that have ended are decoded on.
        apply_new_weights: called before each forward; lets weights be exchanged and returns the current version.
        overdue: returns whether to leave off, given the responses [B] int64 that have not ended.

    Raises:
        RunError: the model's logits are not finite.
    """
    version = apply_new_weights()
    logits = rows.prefill()[torch.from_numpy(prompt_of).to(device)]
    rows.spread(prompt_of)

    finished = np.zeros(len(prompt_of), dtype=bool)
    sequence = np.arange(len(prompt_of))  # the response that each row of the batch holds
    growing = np.ones(len(prompt_of), dtype=bool)  # rows of the batch that have not ended
    steps: list[tuple[np.ndarray, np.ndarray, np.ndarray, list[torch.Tensor | None]]] = []
    unseen: list[tuple[torch.Tensor, list[torch.Tensor | None]]] = []
    versions: list[int] = []
    block = torch.empty(0)
    for position in range(sampling.max_response_tokens):
        if position % UNIFORM_BLOCK == 0 and not sampling.greedy:
            block = uniforms(keys[sequence], position, UNIFORM_BLOCK).to(device)
        token, *stats = draw(
            logits,
            None if sampling.greedy else block[:, position % UNIFORM_BLOCK],
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
        )
        logits = logits.new_empty(0)  # the next step may be recorded, which needs the memory
        unseen.append((token, stats))
        versions.append(version)
        last = position + 1 == sampling.max_response_tokens
        if last or len(unseen) == sync_every:
            tokens = torch.stack([token for token, _ in unseen]).cpu().numpy()
            for drawn, (_, stats) in zip(tokens, unseen, strict=True):
                if (drawn[growing] < 0).any():
                    raise RunError(
                        f"the model's logits at response position {len(steps)} are not finite: its weights hold NaN "
                        "or infinite values, or the compute dtype overflows (model.dtype: bfloat16 has the range of "
                        "float32)"
                    )
                steps.append((growing.copy(), sequence, drawn, stats))
                growing[growing] = ~watch.ended(sequence[growing], drawn[growing])
            unseen.clear()
            finished[sequence[~growing]] = True
            if last or not growing.any() or overdue(sequence[growing]):
                break
            if growing.mean() <= rows.compact_below:
                kept = np.flatnonzero(growing)
                rows.select(kept)
                index = torch.from_numpy(kept).to(device)
                token, sequence, growing = token[index], sequence[kept], growing[kept]
                block = block if sampling.greedy else block[index]
        version = apply_new_weights()
        # Rows that have ended but are still in the batch decode on; their tokens are discarded.
        logits = rows.step(token.clamp_min(0))
    return _collect(steps, finished, np.array(versions, dtype=np.int64))


def _collect(
    steps: list[tuple[np.ndarray, np.ndarray, np.ndarray, list[torch.Tensor | None]]],
    finished: np.ndarray,
    versions: np.ndarray,
) -> Decoded:
    """Turn steps of (growing [B], sequence [B], token [B], (logprob [B], floor [B])) into ragged responses."""
    valid = np.concatenate([growing for growing, _, _, _ in steps])
    sequence = np.concatenate([row for _, row, _, _ in steps])[valid]
    position = np.repeat(np.arange(len(steps)), [len(row) for _, row, _, _ in steps])[valid]
    lengths = np.bincount(sequence, minlength=len(finished))
    place = (np.cumsum(lengths) - lengths)[sequence] + position
    tokens = np.empty(len(place), dtype=np.int64)
    tokens[place] = np.concatenate([token for _, _, token, _ in steps])[valid]
    per_token: list[np.ndarray | None] = []
    for stat in zip(*(stats for *_, stats in steps), strict=True):
        values = [each for each in stat if each is not None]
        per_token.append(np.empty(len(place), dtype=np.float32) if values else None)
        if per_token[-1] is not None:
            per_token[-1][place] = torch.cat(values).cpu().numpy()[valid]
    logprobs, floors = per_token
    assert logprobs is not None
    of_token = np.empty(len(place), dtype=np.int64)
    of_token[place] = versions[position]
    return Decoded(lengths, tokens, logprobs, finished, rows_decoded=len(valid), versions=of_token, floors=floors)
