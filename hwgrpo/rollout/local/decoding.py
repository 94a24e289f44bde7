"""The decoding loop: one prefill per prompt, a token per step for all its samples, finished rows dropped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from hwgrpo.errors import RunError
from hwgrpo.rollout.counter_rng import uniforms
from hwgrpo.rollout.local.decode_rows import Rows
from hwgrpo.rollout.local.token_sampling import Drawn, draw
from hwgrpo.rollout.stopping import StopDetector
from hwgrpo.values import Sampling

UNIFORM_BLOCK = 64
"""Positions whose uniforms are computed and copied to the device at once."""


@dataclass(frozen=True)
class Decoded:
    """S ragged responses of R tokens in total, on the CPU."""

    lengths: np.ndarray
    """[S] int64."""
    finished: np.ndarray
    """[S] bool."""
    rows_decoded: int
    """Drawn tokens, including those of rows that had ended."""
    per_token: Mapping[str, np.ndarray]
    """[R] each: `tokens`, what else `draw` returned for them, and the `versions` int64 of the weights that gave each
    token's logits."""


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
    steps: list[_Step] = []
    unseen: list[Drawn] = []
    versions: list[int] = []
    block = torch.empty(0)
    for position in range(sampling.max_response_tokens):
        if position % UNIFORM_BLOCK == 0 and not sampling.greedy:
            block = uniforms(keys[sequence], position, UNIFORM_BLOCK).to(device)
        drawn = draw(
            logits,
            None if sampling.greedy else block[:, position % UNIFORM_BLOCK],
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
        )
        token = drawn.tokens
        logits = logits.new_empty(0)  # the next step may be recorded, which needs the memory
        unseen.append(drawn)
        versions.append(version)
        last = position + 1 == sampling.max_response_tokens
        if last or len(unseen) == sync_every:
            tokens = torch.stack([each.tokens for each in unseen]).cpu().numpy()
            for token_S, each in zip(tokens, unseen, strict=True):
                if (token_S[growing] < 0).any():
                    raise RunError(
                        f"the model's logits at response position {len(steps)} are not finite: its weights hold NaN "
                        "or infinite values, or the compute dtype overflows (model.dtype: bfloat16 has the range of "
                        "float32)"
                    )
                steps.append(_Step(growing.copy(), sequence, each._replace(tokens=torch.from_numpy(token_S))))
                growing[growing] = ~watch.ended(sequence[growing], token_S[growing])
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


class _Step(NamedTuple):
    """What a step drew for the B rows of the batch."""

    growing: np.ndarray
    """[B] bool: rows that had not ended."""
    sequence: np.ndarray
    """[B] int64: the response that each row holds."""
    drawn: Drawn


def _collect(steps: Sequence[_Step], finished: np.ndarray, versions: np.ndarray) -> Decoded:
    """Turn the steps, and the version of each one's weights, into ragged responses."""
    valid = np.concatenate([step.growing for step in steps])
    sequence = np.concatenate([step.sequence for step in steps])[valid]
    position = np.repeat(np.arange(len(steps)), [len(step.growing) for step in steps])[valid]
    lengths = np.bincount(sequence, minlength=len(finished))
    place = (np.cumsum(lengths) - lengths)[sequence] + position
    drawn = {name: [getattr(step.drawn, name) for step in steps] for name in Drawn._fields}
    in_order = {name: torch.cat(each).cpu().numpy()[valid] for name, each in drawn.items() if each[0] is not None}
    in_order["versions"] = versions[position]
    per_token = {name: np.empty(len(place), dtype=values.dtype) for name, values in in_order.items()}
    for name, values in in_order.items():
        per_token[name][place] = values
    return Decoded(lengths, finished, rows_decoded=len(valid), per_token=per_token)
