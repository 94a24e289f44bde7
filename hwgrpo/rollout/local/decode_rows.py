"""Protocol of a batch of decoded rows; rows by the model's own forward, and rows that decode equal responses once."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

from hwgrpo.errors import ConfigError
from hwgrpo.models.lm_head import causal_lm
from hwgrpo.models.placeholders import ban, placeholder_ids
from hwgrpo.models.rounding import Excess, check_ids, find_excess, measure_rounding
from hwgrpo.models.vision import image_encoder
from hwgrpo.models.windows import describe_windows, shorten_windows, windows_below
from hwgrpo.rollout.local.shared_prefix_attention import ParkedRow
from hwgrpo.values import Prompt, PromptImages, text_axes

CHECK_PROMPTS = ((0, 1, 2, 3, 4), (5, 6, 7))
"""Prompts of startup checks: places of their tokens in `check_ids`."""
EQUAL_LENGTH_PROMPTS = (CHECK_PROMPTS[0], CHECK_PROMPTS[0][::-1])
"""Prompts of one length."""
CHECK_STEPS = 4
CHECK_LENGTH = max(map(len, CHECK_PROMPTS)) + CHECK_STEPS
FIRST_RESPONSE_TOKEN = sum(map(len, CHECK_PROMPTS))
"""Place of the first token of the responses, of which there are up to three."""
CHECK_IDS = FIRST_RESPONSE_TOKEN + 3 * CHECK_STEPS

COMPACT_BELOW = 7 / 8
"""Share of unfinished rows at which `select` is worth its cost, a copy of the cache."""


class Rows(Protocol):
    """B sequences that grow by a token per step, with their keys and values, and the prompts that they begin with."""

    refills: bool
    """Whether prompts and responses may be added while others grow; otherwise `prefill` drops all that there was."""
    parks: bool
    """Whether there are `park` and `extend`."""

    @property
    def compact_below(self) -> float:
        """Share of unfinished rows at or below which finished rows are dropped."""
        ...

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], torch.Tensor]:
        """Run G prompts through the model and hold them.

        Returns:
            The number of each, which no other prompt has or had, and the logits [G, V] after their last tokens.
        """
        ...

    def park(self, source: int, length: int) -> ParkedRow:
        """Return the keys and values of a response, for `extend`.

        Args:
            source: its row; or, before its first step, ~p of the number p that it begins with.
            length: tokens of prompt and response; what was appended after them is left out.
        """
        ...

    def extend(self, rows: Sequence[ParkedRow], sequences: Sequence[Sequence[int]]) -> tuple[list[int], torch.Tensor]:
        """Compute what G sequences have beyond parked responses, their beginnings, and hold them.

        Args:
            rows: G parked responses of these rows.
            sequences: all token ids of each, at least one more than of its parked response.

        Returns:
            As `prefill`. A response that begins with such a number counts the tokens after the sequence only.
        """
        ...

    def free(self, numbers: list[int]) -> None:
        """Hold some prompts or extended responses no longer: no response will begin with them.

        Responses that have not ended may go on without an extended response, but not without a prompt.
        """
        ...

    def arrange(self, source: np.ndarray, left: np.ndarray) -> None:
        """Set the responses of the next steps.

        Args:
            source: [B] int64: each row's number among the rows so far, in any order and some of them several times; or,
                for a response that begins, ~p of its prompt's number p. Other rows are dropped.
            left: [B] int64: most tokens, at least 1, that will be appended to each row; 0 for a row that stays where it
                is and whose response has ended: it overwrites its last token.
        """
        ...

    def weights_changed(self) -> None:
        """Read the model's weights again where they are held as copies: they were updated in place."""
        ...

    def step(self, token_B: torch.Tensor) -> torch.Tensor:
        """Append a token to each response; return the logits [B, V] after it, valid until the next step."""
        ...


class SeenPrompt(tuple[int, ...]):
    """Token ids of a prompt with images; another one with the same tokens equals it only with the same images."""

    images: PromptImages

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SeenPrompt) and other._digests == self._digests and tuple.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((tuple.__hash__(self), self._digests))

    @property
    def _digests(self) -> tuple[str, ...]:
        return digests_of(self)

    def axes(self) -> torch.Tensor:
        """Return [P, 3] int64: positions in time, height and width, also of text that follows the images' prompt."""
        own = self.images.axes
        assert own is not None
        further = text_axes(len(self) - len(own)) + int(own.max()) + 1
        return torch.cat([own, further])


def tokens_of(prompt: Prompt) -> tuple[int, ...]:
    """Return a prompt as the rows take it."""
    if prompt.images is None:
        return prompt.token_ids
    seen = SeenPrompt(prompt.token_ids)
    seen.images = prompt.images
    return seen


def digests_of(prompt: Sequence[int]) -> tuple[str, ...]:
    """Return the digests of a prompt's images, in its order."""
    return tuple(part.digest for part in prompt.images.parts) if isinstance(prompt, SeenPrompt) else ()


def images_after(prompt: Sequence[int], held: int) -> list[PromptImages]:
    """Return the images of a prompt after the first `held` ones: of one prompt, or none."""
    parts = prompt.images.parts[held:] if isinstance(prompt, SeenPrompt) else ()
    return [replace(parts[-1], earlier=parts[:-1])] if parts else []


def shift_of(prompt: Sequence[int]) -> int:
    """Return by how much the position after a prompt is more than its tokens: images take fewer positions."""
    if not isinstance(prompt, SeenPrompt) or prompt.images.axes is None:
        return 0
    return int(prompt.axes().max()) + 1 - len(prompt)


class LeftPadded:
    """Left-padded matrix [G, W] of prompts.

    Args:
        prompts: G sequences of token ids, none empty.
        device: device of the tensors.
    """

    def __init__(self, prompts: Sequence[Sequence[int]], device: torch.device) -> None:
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        width = int(lengths.max())
        # Any id is valid as padding: it is masked.
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        place = torch.arange(width) - (width - lengths)[:, None]
        self.width = width
        self.lengths = lengths.to(device)
        """[G] int64."""
        self.ids = ids.to(device)
        """[G, W] int64."""
        self.positions = place.clamp_min(0).to(device)
        """[G, W] int64."""
        # Rows of equal length need no mask; attention kernels are faster without one.
        self.mask = (place >= 0).to(device) if int(lengths.min()) < width else None
        """[G, W] bool, or None where there is no padding."""


class ModelRows:
    """Rows decoded by the model's own forward and transformers' cache, after `check_cache`.

    They are not refilled: the layers of such a cache have one length for all rows, and a row that begins later would
    need its prompt padded up to it, which recurrent states, windows and selected keys would not mask.

    Args:
        model: in evaluation mode, on `device`.
        device: where the model is.
    """

    compact_below = COMPACT_BELOW
    refills = parks = False

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        self._model = model
        self._device = device
        base = causal_lm(model)
        arguments = inspect.signature(base.forward).parameters
        self._cache_argument = "cache_params" if "cache_params" in arguments else "past_key_values"
        self._makes_its_own = self._cache_argument == "cache_params" or not base._supports_default_dynamic_cache()
        self.cache: Any = None
        # With logits_to_keep the LM head computes the last position only. peft's forward passes keywords on, so the
        # wrapped model's signature counts.
        self._keeps_last = "logits_to_keep" in arguments
        self._held = 0
        self._banned = placeholder_ids(base.config)
        self._images = image_encoder(model)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], torch.Tensor]:
        self.padded = padded = LeftPadded(prompts, self._device)
        self._ids, self._position, self._mask = padded.ids, padded.positions, padded.mask
        self.cache = None if self._makes_its_own else DynamicCache(config=self._model.config)
        self._first, self._held = self._held, self._held + len(prompts)
        options: dict[str, Any] = {}
        if self._images is not None:
            options = self._images.inputs(self._ids, [each for prompt in prompts for each in images_after(prompt, 0)])
            if self._images.uses_axes:
                self._position = _positions(padded, prompts).to(self._device)
        # The last hidden states are contiguous if an index selects them, not a slice. Otherwise a CPU would copy the LM
        # head's weight for each prompt (bmm in bfloat16).
        logits = self._forward(torch.tensor([self._ids.shape[1] - 1], device=self._device), **options)
        if self._position.dim() == 3:  # a response to a prompt that ends with an image begins behind all of it
            self._position[1:, :, -1:] = self._position[1:].amax((0, 2), keepdim=True)
        return list(range(self._first, self._held)), logits

    def prefill_after(
        self, cache: Any, firsts: Sequence[int], sequences: Sequence[Sequence[int]], images: Sequence[PromptImages] = ()
    ) -> torch.Tensor:
        """Run the tokens of G sequences through the model, after those in a cache; return the logits [G, V] after them.

        Args:
            cache: of their first tokens, padded on the left.
            firsts: tokens of each sequence in the cache, at least one as many as it has room for.
            sequences: all tokens of each; as many after the first ones of all sequences that have some in the cache.
            images: those that stand after the first ones, in the order of the sequences.
        """
        tokens = [sequence[first:] for sequence, first in zip(sequences, firsts, strict=True)]
        padded, width = LeftPadded(tokens, self._device), max(firsts)
        first = torch.tensor(firsts, device=self._device)[:, None]
        self.cache, self._ids, self._position, self._mask = cache, padded.ids, padded.positions + first, None
        if padded.mask is not None or min(firsts) < width:
            of_tokens = torch.ones_like(padded.ids, dtype=torch.bool) if padded.mask is None else padded.mask
            in_cache = torch.arange(width, device=self._device) >= width - first
            self._mask = torch.cat([in_cache, of_tokens], dim=1)
        options: dict[str, Any] = {}
        if self._images is not None:
            options = self._images.inputs(self._ids, images)
            if self._images.uses_axes:
                self._position = _positions(padded, sequences, firsts).to(self._device)
        return self._forward(torch.tensor([padded.width - 1], device=self._device), **options)

    def park(self, source: int, length: int) -> ParkedRow:
        raise NotImplementedError

    def extend(self, rows: Sequence[ParkedRow], sequences: Sequence[Sequence[int]]) -> tuple[list[int], torch.Tensor]:
        raise NotImplementedError

    def free(self, numbers: list[int]) -> None:
        pass

    def arrange(self, source: np.ndarray, left: np.ndarray) -> None:
        begins = bool((source < 0).all())
        assert begins or (source >= 0).all(), "no response begins while others grow"
        kept = ~source - self._first if begins else source
        if not np.array_equal(kept, np.arange(len(self._ids))):
            self._select(kept)

    def weights_changed(self) -> None: ...

    def step(self, token_B: torch.Tensor) -> torch.Tensor:
        # One token at a time: layers of Mamba 1 and MiniMax ignore their state where several tokens follow it.
        self._ids = token_B[:, None]
        self._position = self._position[..., -1:] + 1
        if self._mask is not None:
            self._mask = torch.cat([self._mask, self._mask.new_ones(len(token_B), 1)], dim=1)
        return self._forward()

    def _select(self, kept: np.ndarray) -> None:
        index = torch.from_numpy(kept).to(self._device)
        self._ids = self._ids[index]
        # reorder_cache is the one selection that every kind of cache layer has, linear attention included. It leaves
        # out the states of MiniMax, whose own selection fails where the last layer has none (transformers 5.19).
        self.cache.reorder_cache(index)
        states: list[Any] = getattr(self.cache, "linear_cache", [])
        states[:] = [state[index] if len(state) else state for state in states]
        self._position = self._position[..., index, :]
        if self._mask is not None:
            self._mask = self._mask[index]

    def _forward(self, kept: torch.Tensor | int = 1, **options: Any) -> torch.Tensor:
        options |= {"logits_to_keep": kept} if self._keeps_last else {}
        if self.cache is not None:
            options[self._cache_argument] = self.cache
        output = self._model(
            input_ids=self._ids,
            attention_mask=self._mask,
            position_ids=self._position,
            use_cache=True,
            **options,
        )
        if self.cache is None:
            self.cache = getattr(output, self._cache_argument, None)
        if self.cache is None:
            raise TypeError("it returns no cache")
        return ban(output.logits[:, -1], self._banned)


def _positions(
    padded: LeftPadded, prompts: Sequence[Sequence[int]], firsts: Sequence[int] | None = None
) -> torch.Tensor:
    """Return [4, G, W] int64: positions in the sequence, and in time, height and width.

    Args:
        padded: the prompts' tokens, without the first ones.
        prompts: all tokens of each.
        firsts: how many of each are left out; None: none.
    """
    positions = torch.zeros(4, *padded.ids.shape, dtype=torch.int64)
    for row, (prompt, first) in enumerate(zip(prompts, firsts or [0] * len(prompts), strict=True)):
        own = text_axes(len(prompt)) if not isinstance(prompt, SeenPrompt) else prompt.axes()
        positions[0, row, padded.width - len(prompt) + first :] = torch.arange(first, len(prompt))
        positions[1:, row, padded.width - len(prompt) + first :] = own[first:].T
    return positions


def check_cache(model: PreTrainedModel, device: torch.device, longest: int | None = None) -> bool:
    """Compare decoding with the model's cache to forward passes over full sequences, on a few tokens.

    Attention windows shorter than the longest sequence are shortened meanwhile, so that these few tokens exceed them.

    Args:
        model: in evaluation mode, on `device`.
        device: where the model is.
        longest: longest sequence in tokens, prompt and response; None: unknown.

    Returns:
        Whether prompts of unequal length may be in one batch; recurrent states would absorb the padding.

    Raises:
        ConfigError: even prompts of equal length are decoded wrong.
    """
    base = causal_lm(model)
    windows = windows_below(base.config, longest)
    with shorten_windows(base, windows):
        supports_padding = _checked_excess(model, CHECK_PROMPTS, device) is None
        # Attention that selects keys may select the same for some prompts and not for others: both must be right.
        excess = None if supports_padding and not windows else _checked_excess(model, EQUAL_LENGTH_PROMPTS, device)
    if excess is None:
        return supports_padding
    beyond = ""
    if windows and _checked_excess(model, EQUAL_LENGTH_PROMPTS, device) is None:
        beyond = (
            f", once a sequence is longer than {describe_windows(windows)}; keep data.max_prompt_tokens + "
            f"rollout.max_response_tokens at {min(windows.values())} or less"
        )
    raise ConfigError(
        f"rollout.engine='local' cannot sample from {type(model).__name__}: with its cache, logits differ by {excess} "
        f"from those without{beyond}"
    )


def check_prompts(ids: torch.Tensor, places: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the prompts of a startup check, of the tokens at these places of `ids`."""
    return [ids[list(prompt)].tolist() for prompt in places]


def _checked_excess(model: PreTrainedModel, places: Sequence[Sequence[int]], device: torch.device) -> Excess | None:
    """Return `_logit_excess`; raise ConfigError where the model's forward with a cache fails."""
    try:
        return _logit_excess(model, places, device)
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        line = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"rollout.engine='local' cannot sample from {type(model).__name__}: its forward with a cache fails "
            f"({type(error).__name__}: {line})"
        ) from error


def _logit_excess(model: Any, places: Sequence[Sequence[int]], device: torch.device) -> Excess | None:
    """Return how logits differ by more than rounding; None, too, where the expected ones are not finite."""
    embeddings, dtype = model.get_input_embeddings(), next(model.parameters()).dtype
    without = placeholder_ids(causal_lm(model).config)
    ids = check_ids(embeddings.weight.shape[0], CHECK_IDS, without)
    prompts, prompt_of = check_prompts(ids, places), (0, 0, 1)
    tokens = ids[FIRST_RESPONSE_TOKEN:].view(CHECK_STEPS, 3).to(device)
    sequences = [
        torch.cat([torch.tensor(prompts[prompt], device=device), tokens[:, row]])[None]
        for row, prompt in enumerate(prompt_of)
    ]

    def full() -> torch.Tensor:
        logits = [model(input_ids=sequence, use_cache=False).logits[0, -1 - CHECK_STEPS :] for sequence in sequences]
        return ban(torch.stack(logits, dim=1).flatten(0, 1).float(), without, 0.0)

    rows = ModelRows(model, device)
    numbers, logits = rows.prefill(prompts)
    decoded = [logits[list(prompt_of)]]
    rows.arrange(~np.array(numbers)[list(prompt_of)], np.full(len(prompt_of), CHECK_STEPS))
    decoded += [rows.step(step) for step in tokens]
    expected = full()
    if not expected.isfinite().all():
        return None
    # In 16 bits a rounded score may route a token to another expert; states with padding differ by more.
    floor = max(1e-3, 32 * torch.finfo(dtype).eps)
    found = ban(torch.cat(decoded), without, 0.0)
    return find_excess(found, expected, floor, lambda: measure_rounding(embeddings, dtype, full, expected))


class DistinctRows:
    """B responses over as many rows of another batch as there are distinct ones; see `Rows` for the methods.

    Samples of short answers are often equal, or begin alike. The host reads every token, so this is for CPUs.

    Args:
        rows: nothing is prefilled yet.
    """

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.refills, self.parks = rows.refills, rows.parks
        self._row_of = np.empty(0, dtype=np.int64)
        """[B] the source of each response, as for `arrange` of the other batch."""
        self._left = np.empty(0, dtype=np.int64)
        self._count = 0
        """Rows of the other batch."""
        self._all_distinct = False
        self._vocab = 0

    @property
    def compact_below(self) -> float:
        return self._rows.compact_below if self._all_distinct else 1.0

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[list[int], torch.Tensor]:
        if not self.refills:
            self._count = 0
        numbers, logits = self._rows.prefill(prompts)
        self._vocab = logits.shape[-1]
        return numbers, logits

    def park(self, source: int, length: int) -> ParkedRow:
        return self._rows.park(source if source < 0 else int(self._row_of[source]), length)

    def extend(self, rows: Sequence[ParkedRow], sequences: Sequence[Sequence[int]]) -> tuple[list[int], torch.Tensor]:
        numbers, logits = self._rows.extend(rows, sequences)
        self._vocab = logits.shape[-1]
        return numbers, logits

    def free(self, numbers: list[int]) -> None:
        self._rows.free(numbers)

    def arrange(self, source: np.ndarray, left: np.ndarray) -> None:
        kept = source >= 0
        self._row_of = np.where(kept, self._row_of[source.clip(0)], source) if kept.any() else source
        self._left = left
        self._all_distinct = self._all_distinct and bool(kept.all())

    def weights_changed(self) -> None:
        self._rows.weights_changed()

    def step(self, token_B: torch.Tensor) -> torch.Tensor:
        first, row_of = np.arange(len(token_B)), np.arange(len(token_B))
        if not self._all_distinct:
            first, row_of = _distinct(self._row_of * self._vocab + token_B.numpy())
        parents = self._row_of[first]
        if not np.array_equal(parents, np.arange(self._count)):
            left = np.zeros(len(first), dtype=np.int64)
            np.maximum.at(left, row_of, self._left)
            self._rows.arrange(parents, left)
        self._left = np.maximum(self._left - 1, 1)
        self._row_of, self._count = row_of, len(first)
        self._all_distinct = len(first) == len(token_B)
        if self._all_distinct:
            return self._rows.step(token_B)
        return self._rows.step(token_B[torch.from_numpy(first)])[torch.from_numpy(row_of)]


def _distinct(keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the index of the first of each distinct key [N], in order, and the number of each key [B] among them."""
    _, first, number = np.unique(keys, return_index=True, return_inverse=True)
    order = np.argsort(first)
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    return first[order], rank[number]
