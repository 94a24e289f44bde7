"""The decoding loop: one prefill per prompt, a token per step for all its samples, finished rows dropped."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from peft import PeftModel
from transformers import DynamicCache, PreTrainedModel

from hwgrpo.errors import RunError
from hwgrpo.rollout.engine import Sampling
from hwgrpo.rollout.sampling import draw, uniforms
from hwgrpo.rollout.stopping import StopWatch

UNIFORM_BLOCK = 64
"""Positions whose uniforms are made and moved to the device at once."""

COMPACT_BELOW = 7 / 8
"""Rows are dropped once this share or less is unfinished: it costs one copy of the cache, as every step does anyway."""


@dataclass(frozen=True)
class Decoded:
    """S responses, ragged, on the CPU; R tokens in all."""

    lengths: np.ndarray
    """[S] int64."""
    tokens: np.ndarray
    """[R] int64."""
    logprobs: np.ndarray
    """[R] fp32."""
    finished: np.ndarray
    """[S] bool."""


class _Rows:
    """The rows that are decoded together: their key-value cache, padding mask and next positions."""

    def __init__(self, model: PreTrainedModel, prompts: Sequence[Sequence[int]], device: torch.device) -> None:
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        width = int(lengths.max())
        # Any id will do for padding: it is masked.
        self._ids = torch.zeros(len(prompts), width, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            self._ids[row, width - len(prompt) :] = torch.tensor(prompt)
        self._ids = self._ids.to(device)
        self._position = (torch.arange(width) - (width - lengths)[:, None]).clamp_min(0).to(device)
        # Rows of equal length need no mask; attention kernels are faster without one.
        padded = int(lengths.min()) < width
        self._mask = (torch.arange(width) >= (width - lengths)[:, None]).to(device) if padded else None
        self._model = model
        self._cache = DynamicCache(config=model.config)
        # peft's forward passes keywords on, so the wrapped model's signature counts.
        base = model.get_base_model() if isinstance(model, PeftModel) else model
        # With it, the head sees the last position only.
        takes_it = "logits_to_keep" in inspect.signature(base.forward).parameters
        self._keep_last = {"logits_to_keep": 1} if takes_it else {}

    def prefill(self) -> torch.Tensor:
        """Run the prompts through the model; return the logits [B, V] after their last tokens."""
        return self._forward()

    def step(self, token_B: torch.Tensor) -> torch.Tensor:
        """Append a token to each row; return the logits [B, V] after it."""
        self._ids = token_B[:, None]
        self._position = self._position[:, -1:] + 1
        if self._mask is not None:
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(token_B), 1)], dim=1)
        return self._forward()

    def select(self, index: torch.Tensor) -> None:
        """Make row i what row index[i] was; rows may be repeated and left out."""
        # reorder_cache is the one selection that every kind of cache layer has, linear attention included.
        self._cache.reorder_cache(index)  # pyright: ignore[reportArgumentType]  (annotated as LongTensor)
        self._position = self._position[index]
        if self._mask is not None:
            self._mask = self._mask[index]

    def _forward(self) -> torch.Tensor:
        output = self._model(
            input_ids=self._ids,
            attention_mask=self._mask,
            position_ids=self._position,
            past_key_values=self._cache,
            use_cache=True,
            **self._keep_last,
        )
        return output.logits[:, -1]


def decode(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    prompt_of: np.ndarray,
    keys: np.ndarray,
    sampling: Sampling,
    watch: StopWatch,
    device: torch.device,
) -> Decoded:
    """Generate S responses to G distinct prompts; each prompt goes through the model once.

    Args:
        model: a causal language model in evaluation mode, on `device`.
        prompts: G sequences of token ids, none empty.
        prompt_of: [S] int64, the prompt of each response.
        keys: [S] uint64 of `stream_keys`.
        sampling: how tokens are drawn, and how many at most.
        watch: says which responses have ended.
        device: where the model is.

    Raises:
        RunError: the model's logits are not finite.
    """
    rows = _Rows(model, prompts, device)
    logits = rows.prefill()
    if not np.array_equal(prompt_of, np.arange(len(prompts))):
        index = torch.from_numpy(prompt_of).to(device)
        rows.select(index)
        logits = logits[index]

    finished = np.zeros(len(prompt_of), dtype=bool)
    sequence = np.arange(len(prompt_of))  # the response that each row of the batch holds
    growing = np.ones(len(prompt_of), dtype=bool)  # rows of the batch that have not ended
    steps: list[tuple[np.ndarray, np.ndarray, np.ndarray, torch.Tensor]] = []
    block = torch.empty(0)
    for position in range(sampling.max_response_tokens):
        if position % UNIFORM_BLOCK == 0 and not sampling.greedy:
            block = uniforms(keys[sequence], position, UNIFORM_BLOCK).to(device)
        token, logprob = draw(
            logits,
            None if sampling.greedy else block[:, position % UNIFORM_BLOCK],
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
        )
        drawn = token.cpu().numpy()
        if (drawn[growing] < 0).any():
            raise RunError(
                f"the model's logits at response position {position} are not finite: its weights hold NaN or infinite "
                "values, or the compute dtype overflows (model.dtype: bfloat16 has the range of float32)"
            )
        steps.append((growing.copy(), sequence, drawn, logprob))
        growing[growing] = ~watch.ended(sequence[growing], drawn[growing])
        finished[sequence[~growing]] = True
        if not growing.any() or position + 1 == sampling.max_response_tokens:
            break
        if growing.mean() <= COMPACT_BELOW:
            kept = np.flatnonzero(growing)
            index = torch.from_numpy(kept).to(device)
            rows.select(index)
            token, sequence, growing = token[index], sequence[kept], growing[kept]
            block = block if sampling.greedy else block[index]
        # Rows that have ended but are still in the batch go on with what they drew; nobody reads it.
        logits = rows.step(token.clamp_min(0))
    return _collect(steps, finished)


def _collect(steps: list[tuple[np.ndarray, np.ndarray, np.ndarray, torch.Tensor]], finished: np.ndarray) -> Decoded:
    """Turn steps of (growing [B], sequence [B], token [B], logprob [B]) into ragged responses."""
    valid = np.concatenate([growing for growing, _, _, _ in steps])
    sequence = np.concatenate([row for _, row, _, _ in steps])[valid]
    position = np.repeat(np.arange(len(steps)), [len(row) for _, row, _, _ in steps])[valid]
    lengths = np.bincount(sequence, minlength=len(finished))
    place = (np.cumsum(lengths) - lengths)[sequence] + position
    tokens = np.empty(len(place), dtype=np.int64)
    tokens[place] = np.concatenate([token for _, _, token, _ in steps])[valid]
    logprobs = np.empty(len(place), dtype=np.float32)
    logprobs[place] = torch.cat([logprob for _, _, _, logprob in steps]).cpu().numpy()[valid]
    return Decoded(lengths=lengths, tokens=tokens, logprobs=logprobs, finished=finished)
