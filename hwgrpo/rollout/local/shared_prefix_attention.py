"""Attention of one new token per row over a prompt that several rows share and over each row's own response.

Keys and values of a prompt are stored once, those of responses in buffers that are written in place and doubled when
full. Heads are the first dimension, rows the second: the n rows of a prompt are then n times as many queries against
its keys, which is one matrix product, and a view of the same tensor by row multiplies each row's own keys.

Rows have lengths of their own: a row that takes another response begins anew in its place, while the others go on.
They have positions of their own, too: after images, which take fewer positions than tokens, they are shifted.

A kernel (`decode_attention`) reads these lengths on the device. torch's operations attend to columns that all rows
share, in a grid of prompts, with masks.

Shapes: P prompts of W tokens (padded on the left), B rows, H key-value heads of G queries each, head size D, response
buffers of C tokens, of which row b has filled T[b].
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch.nn.functional import pad

from hwgrpo.models.shared_prefix_masks import LEAST_COLUMNS

FIRST_CAPACITY = 64
"""Initial capacity of the buffers, in response tokens."""


@dataclass(frozen=True)
class StepPlaces:
    """Where the rows' newest tokens stand, the same in all layers."""

    positions: torch.Tensor
    """[B] int64: position of each row's newest token, prompt and shift included."""
    columns: int
    """Columns of the buffers that are read."""
    newest: torch.Tensor | None
    """[B] int64: place of the newest token among the B * C of the buffers; None: the last of `columns` in every row."""
    bias: torch.Tensor | None
    """[B, 1, columns] fp32: 0 where a row's buffer is filled, else -inf; None: all are filled."""


@dataclass(frozen=True, eq=False)
class ParkedPrompt:
    """Keys and values of a prompt, of W tokens; one copy for all parked responses to it."""

    number: int
    """Of the prompt."""
    layers: list[torch.Tensor]
    """Per layer [2, H, W, D]."""

    @property
    def length(self) -> int:
        """Its tokens."""
        return self.layers[0].shape[2]


@dataclass(frozen=True, eq=False)
class ParkedRow:
    """Keys and values of a response that left its row, of T tokens, to go on later: `SharedPromptCache.add_parked`."""

    prompt: ParkedPrompt
    layers: list[torch.Tensor]
    """Per layer [2, H, T, D]."""
    images: tuple[str, ...] = ()
    """Digests of the images that stand in prompt and response."""

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return self.prompt.length + self.layers[0].shape[2]

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values per token."""
        return sum(layer.nbytes for layer in self.prompt.layers) // self.prompt.length


class SharedPromptCache:
    """Cache of the keys and values of all layers.

    `add_prompts` stores prompts, `arrange` begins and drops responses, and a step is an `advance`, `places`, and an
    `attend` per layer; with a kernel, an `advance` and an `attend_in_kernel` per layer. What a row may read is in
    tensors: `_filled`, its prompt's grid slot and `_bias`; with a kernel, `_filled`, `_place` and `_prompt_tokens`.

    `park` copies a response out of its row, `add_parked` holds it as a beginning of rows, as prompts are held. Prompts
    of parked responses are in the grid only while a row or a held beginning needs them.

    Args:
        fixed: run the same operations on the same tensors until `advance` returns True, so that they can be recorded.
            Prompts and responses that fit are then written in place. torch's operations attend to full response
            buffers, masked where they are not filled; with a kernel the buffers have room for full responses at once.
        kernel: the op `decode_attention`; None: torch's operations.
        room: tokens that a row may come to have beyond its prompt, for buffers with room for full responses; 0: as many
            as the responses so far.
    """

    def __init__(self, fixed: bool = False, kernel: Callable[..., torch.Tensor] | None = None, room: int = 0) -> None:
        self._fixed = fixed
        self._kernel = kernel
        self._least_room = room
        self._moved = False
        self._regrid = False
        """Prompts were added since rows were assigned to the grid: their places, width and mask may be others."""
        self._prompt: list[torch.Tensor] = []
        """Per layer [2, H, P, W, D]."""
        self._prompt_lengths = np.empty(0, dtype=np.int64)
        """[P] tokens."""
        self._bias_of_prompt: torch.Tensor | None = None
        """[P, W] fp32, -inf at padding; None where there is none."""
        self._place_of: dict[int, int] = {}
        """Number of each prompt that is held -> its place, 0 <= place < P."""
        self._number_at = np.empty(0, dtype=np.int64)
        """[P] number of the prompt at each place."""
        self._holders: Counter[int] = Counter()
        """Number of a prompt -> how many hold it: itself, and each held parked response to it."""
        self._shift_of: dict[int, int] = {}
        """Number of each prompt and parked response that is held -> positions less tokens of it."""
        self._parked: dict[int, ParkedRow] = {}
        """Number of each parked response that is held."""
        self._parked_prompts: WeakValueDictionary[int, ParkedPrompt] = WeakValueDictionary()
        self._added = 0
        self._response: list[torch.Tensor] = []
        """Per layer [2, H, B, C, D]."""
        self._prompt_of = np.empty(0, dtype=np.int64)
        """[B] place of each row's prompt."""
        self._length = np.empty(0, dtype=np.int64)
        """[B] tokens of each row's response: `_filled` on the host."""
        self._shift = np.empty(0, dtype=np.int64)
        """[B] positions less tokens of what each row began with."""
        self._most = np.empty(0, dtype=np.int64)
        """[B] tokens beyond which a row does not grow: it overwrites its last one."""
        self._per_prompt = 1
        self._slot: torch.Tensor | None = None
        self._bias: torch.Tensor | None = None
        self._filled = self._limit = self._offset = self._before_first = torch.empty(0)
        """[B] int64 each, on the device: length, `_most`, the position before the row's first token, and the place
        before it among the B * C of the buffers."""
        self._place = self._prompt_tokens = torch.empty(0)
        """[B] int64 each, on the device, with a kernel: `_prompt_of`, and the prompt's length."""
        self._columns = torch.empty(0)
        """[C] int64, 0 to C - 1."""
        self._shown = self._hidden = torch.empty(0)
        """[] fp32, 0 and -inf."""

    @property
    def capacity(self) -> int:
        """Capacity of the buffers, in response tokens."""
        return self._response[0].shape[3]

    @property
    def longest(self) -> int:
        """Most positions that a row can have before the buffers or the prompts are reallocated."""
        return self._prompt[0].shape[3] + self.capacity + max(0, int(self._shift.max(initial=0)))

    def add_prompts(
        self, keys: list[torch.Tensor], values: list[torch.Tensor], lengths: np.ndarray, shifts: np.ndarray
    ) -> np.ndarray:
        """Hold G prompts until `free`; return their numbers [G] int64.

        Args:
            keys: per layer [G, H, W, D], rotated, padded on the left.
            values: per layer [G, H, W, D].
            lengths: [G] int64, tokens of each prompt.
            shifts: [G] int64, by how much the position after each prompt is more than its tokens.
        """
        added = [torch.stack([k, v]).transpose(1, 2).contiguous() for k, v in zip(keys, values, strict=True)]
        numbers = self._numbers(shifts)
        self._place_prompts(added, lengths, numbers)
        return numbers

    def _numbers(self, shifts: np.ndarray) -> np.ndarray:
        """Return the next numbers [G], with these shifts [G]."""
        numbers = np.arange(self._added, self._added + len(shifts))
        self._added += len(shifts)
        self._shift_of |= zip(numbers.tolist(), shifts.tolist(), strict=True)
        return numbers

    def _place_prompts(self, added: list[torch.Tensor], lengths: np.ndarray, numbers: np.ndarray) -> None:
        """Store prompts [2, H, G, W, D] of these lengths and numbers [G], and hold each."""
        places = self._make_room(added[0], lengths)
        width = self._prompt[0].shape[3] if self._prompt else added[0].shape[3]
        added = [pad(each, (0, 0, width - each.shape[3], 0)) for each in added]
        if not self._prompt:
            self._prompt = added
        else:
            index = torch.from_numpy(places).to(added[0].device)
            for prompt, each in zip(self._prompt, added, strict=True):
                prompt.index_copy_(2, index, each)
        self._prompt_lengths[places], self._number_at[places] = lengths, numbers
        self._place_of |= zip(numbers.tolist(), places.tolist(), strict=True)
        self._holders.update(numbers.tolist())
        self._update_prompt_bias()
        self._regrid = True

    def add_parked(self, rows: list[ParkedRow], shifts: np.ndarray) -> np.ndarray:
        """Hold parked responses until `free`, for rows to begin with; return their numbers [G] int64.

        Args:
            rows: G responses.
            shifts: [G] int64, by how much the position after each of them is more than its tokens, prompt included.
        """
        missing: dict[int, ParkedPrompt] = {}
        of_rows = {int(self._number_at[place]): place for place in np.unique(self._prompt_of).tolist()}
        for number, prompt in ((row.prompt.number, row.prompt) for row in rows):
            if number not in self._place_of and number in of_rows:
                self._place_of[number] = of_rows[number]
            if number in self._place_of or number in missing:
                self._holders[number] += 1
            else:
                missing[number] = prompt
        if missing:
            lengths = np.array([prompt.length for prompt in missing.values()])
            padding = [(0, 0, int(lengths.max()) - length, 0) for length in lengths.tolist()]
            layers = zip(*(prompt.layers for prompt in missing.values()), strict=True)
            padded = [torch.stack([*map(pad, layer, padding)], dim=2) for layer in layers]
            self._place_prompts(padded, lengths, np.array([*missing]))
        numbers = self._numbers(shifts)
        self._parked |= zip(numbers.tolist(), rows, strict=True)
        return numbers

    def _make_room(self, added: torch.Tensor, lengths: np.ndarray) -> np.ndarray:
        """Return places [G] for more prompts, after reallocating the others where there are too few or too narrow."""
        used = self._used_places()
        places, width = len(self._prompt_lengths), int(lengths.max())
        free = np.setdiff1d(np.arange(places), used)
        wanted = len(lengths)
        if self._prompt:
            old = self._prompt[0].shape[3]
            # A recording stays valid while nothing moves; without one, exact sizes cost least.
            width = max(width, old if self._fixed else int(self._prompt_lengths[used].max(initial=0)))
            more = max(0, wanted - len(free))
            if self._fixed and more:
                more = max(more, places // 2)
            if more or width != old:
                for layer, prompt in enumerate(self._prompt):
                    # a negative pad trims columns that no prompt in use has
                    self._prompt[layer] = pad(prompt, (0, 0, width - old, 0, 0, more))
                self._moved = True
            wanted, places = more, places + more
        else:
            places = wanted
        self._prompt_lengths = np.concatenate([self._prompt_lengths, np.zeros(wanted, dtype=np.int64)])
        self._number_at = np.concatenate([self._number_at, np.full(wanted, -1)])
        return np.concatenate([free, np.arange(places - wanted, places)])[: len(lengths)]

    def _used_places(self) -> np.ndarray:
        """Return the places of prompts that are held or that a row has, ascending."""
        return np.union1d(self._prompt_of, np.fromiter(self._place_of.values(), np.int64, len(self._place_of)))

    def _update_prompt_bias(self) -> None:
        """Mask the padding of prompts; without any, attention is faster without a mask, and a kernel needs none."""
        if self._kernel is not None:
            return
        width, shared = self._prompt[0].shape[3], self._prompt_lengths
        if not self._fixed:
            shared = shared[self._used_places()]
        if (shared >= width).all() and not (self._fixed and self._bias_of_prompt is not None):
            self._bias_of_prompt = self._bias = None
            return
        padding = torch.from_numpy(width - self._prompt_lengths)[:, None]
        bias = torch.zeros(len(padding), width).masked_fill_(torch.arange(width) < padding, -torch.inf)
        self._bias_of_prompt = bias.to(self._prompt[0].device)

    def free(self, numbers: list[int]) -> None:
        """Hold some prompts or parked responses no longer: no response will begin with them, nor go on with a prompt.

        Rows that have begun with a parked response go on.
        """
        for number in numbers:
            parked = self._parked.pop(number, None)
            del self._shift_of[number]
            prompt = number if parked is None else parked.prompt.number
            self._holders[prompt] -= 1
            if not self._holders[prompt]:
                del self._holders[prompt], self._place_of[prompt]

    def arrange(self, source: np.ndarray, left: np.ndarray) -> None:
        """Begin, keep, drop or repeat responses; see `Rows.arrange`.

        Where no row moves and none is dropped, responses begin in place. Prompts that are neither held nor used are
        dropped, unless a recording reads them.
        """
        kept = source >= 0
        old_of = source.clip(0)
        rows = len(self._prompt_of)
        in_place = len(source) == rows and np.array_equal(source[kept], np.flatnonzero(kept))
        length, shift = np.zeros((2, len(source)), dtype=np.int64)
        prompt_of = np.empty(len(source), dtype=np.int64)
        if rows:
            prompt_of[kept] = self._prompt_of[source[kept]]
            length[kept], shift[kept] = self._length[source[kept]], self._shift[source[kept]]
        begun: dict[int, ParkedRow] = {}
        for row in np.flatnonzero(~kept).tolist():
            number = ~int(source[row])
            shift[row] = self._shift_of[number]
            if number in self._parked:
                begun[row] = parked = self._parked[number]
                number, length[row] = parked.prompt.number, parked.layers[0].shape[2]
            prompt_of[row] = self._place_of[number]
        self._length, self._shift, self._most = length, shift, length + left
        if not in_place:
            self._moved = True
            self._move_buffers(old_of, rows)
        self._grow(int(length.max(initial=0)), set_places=False)
        for row, parked in begun.items():
            for buffer, layer in zip(self._response, parked.layers, strict=True):
                buffer[:, :, row, : layer.shape[2]] = layer
        self._prompt_of = prompt_of
        if not (in_place and self._fixed):
            self._drop_prompts()
        self._arrange_grid(keep_shape=in_place and self._fixed)

    def park(self, source: int, length: int) -> ParkedRow:
        """Return the first tokens of a row's prompt and response, before another one takes the row.

        Args:
            source: the row; or, for a response that has not begun, ~p of the number p that it was to begin with.
            length: tokens of prompt and response; at least the prompt's.
        """
        if ~source in self._parked:
            parked = self._parked[~source]
            assert parked.length == length
            return parked
        number = ~source if source < 0 else int(self._number_at[self._prompt_of[source]])
        prompt = self._parked_prompts.get(number)
        if prompt is None:
            place = self._place_of[number] if source < 0 else int(self._prompt_of[source])
            first = self._prompt[0].shape[3] - int(self._prompt_lengths[place])
            prompt = ParkedPrompt(number, [layer[:, :, place, first:].clone() for layer in self._prompt])
            self._parked_prompts[number] = prompt
        of_response = length - prompt.length
        if source < 0:
            assert of_response == 0
            return ParkedRow(prompt, [layer[:, :, :0] for layer in prompt.layers])
        assert 0 <= of_response <= self._length[source]
        return ParkedRow(prompt, [layer[:, :, source, :of_response].clone() for layer in self._response])

    def _move_buffers(self, old_of: np.ndarray, rows: int) -> None:
        """Make the buffers those of the rows [B] among the old ones, of which there were `rows`."""
        if not rows:
            capacity = self._room() if self._at_once else min(FIRST_CAPACITY, int(self._most.max()))
            self._response = [_buffer(prompt, len(old_of), capacity) for prompt in self._prompt]
            return
        index = torch.from_numpy(old_of).to(self._prompt[0].device)
        for layer, buffer in enumerate(self._response):
            self._response[layer] = buffer.index_select(2, index)

    def _drop_prompts(self) -> None:
        used = self._used_places()
        if len(used) == len(self._prompt_lengths):
            return
        alive = torch.from_numpy(used).to(self._prompt[0].device)
        for layer, prompt in enumerate(self._prompt):
            self._prompt[layer] = prompt.index_select(2, alive)
        if self._bias_of_prompt is not None:
            self._bias_of_prompt = self._bias_of_prompt[alive]
        self._prompt_lengths, self._number_at = self._prompt_lengths[used], self._number_at[used]
        self._prompt_of = np.searchsorted(used, self._prompt_of)
        self._place_of = {number: int(np.searchsorted(used, place)) for number, place in self._place_of.items()}
        self._moved = True

    def _arrange_grid(self, keep_shape: bool) -> None:
        """Assign each row a slot in a grid of prompts by rows per prompt, and set what the device knows of the rows.

        Args:
            keep_shape: leave the grid's shape as it is, where the rows fit.
        """
        device, prompts, prompt_of = self._prompt[0].device, len(self._prompt_lengths), self._prompt_of
        offset = self._prompt_lengths[prompt_of] - 1 + self._shift
        self._regrid = False
        if self._kernel is not None:
            self._set_rows(
                _filled=self._length,
                _limit=self._most,
                _offset=offset,
                _place=prompt_of,
                _prompt_tokens=self._prompt_lengths[prompt_of],
            )
            return
        count = np.bincount(prompt_of, minlength=prompts)
        per_prompt = max(int(count.max()), self._per_prompt if keep_shape else 1)
        self._moved |= per_prompt != self._per_prompt
        self._per_prompt = per_prompt
        by_prompt = np.argsort(prompt_of, kind="stable")
        rank = np.empty_like(prompt_of)
        rank[by_prompt] = np.arange(len(prompt_of)) - (np.cumsum(count) - count)[prompt_of[by_prompt]]
        slot = prompt_of * per_prompt + rank
        # Where rows fill the grid in order, as they do until the first has ended, the grid is a view of the rows.
        in_order = len(slot) == prompts * per_prompt and np.array_equal(slot, np.arange(len(slot)))
        in_order = in_order and not (keep_shape and self._slot is not None)
        self._set("_slot", None if in_order else torch.from_numpy(slot).to(device))
        if self._bias_of_prompt is not None:
            self._set("_bias", self._bias_of_prompt[torch.from_numpy(prompt_of).to(device)][:, None])
        self._set_rows(_filled=self._length, _limit=self._most, _offset=offset)
        self._set_places()

    def _set_rows(self, **values: np.ndarray) -> None:
        """Set tensors [B] of the rows, in one copy to the device."""
        rows = torch.from_numpy(np.stack([*values.values()])).to(self._prompt[0].device)
        for name, each in zip(values, rows, strict=True):
            self._set(name, each)

    def _set_places(self) -> None:
        device = self._prompt[0].device
        self._set("_before_first", torch.arange(len(self._length), device=device) * self.capacity - 1)
        self._set("_columns", torch.arange(self.capacity, device=device))
        for name, value in (("_shown", 0.0), ("_hidden", -torch.inf)):
            self._set(name, torch.full((), value, device=device))

    def _set(self, name: str, value: torch.Tensor | None) -> None:
        """Set a tensor that a step reads; in place, where it may have been recorded."""
        old: torch.Tensor | None = getattr(self, name)
        if self._fixed and old is not None and value is not None and old.shape == value.shape:
            old.copy_(value)
        elif old is not None or value is not None:
            setattr(self, name, value)
            self._moved = True

    def advance(self) -> bool:
        """Append a place for a token in every row and layer; return whether tensors moved since the last step."""
        if self._regrid:  # no response to the new prompts has a row: all ended with their first tokens
            self._arrange_grid(keep_shape=self._fixed)
        self._length = np.minimum(self._length + 1, self._most)
        self._grow(int(self._length.max()))
        self._filled.add_(1)
        torch.minimum(self._filled, self._limit, out=self._filled)
        moved, self._moved = self._moved, False
        return moved

    def _grow(self, longest: int, set_places: bool = True) -> None:
        """Double the buffers' capacity until a response of so many tokens fits."""
        if longest <= self.capacity:
            return
        capacity = self._room() if self._at_once else self.capacity
        while capacity < longest:
            capacity = min(2 * capacity, int(self._most.max()))
        for layer, buffer in enumerate(self._response):
            wider = _buffer(buffer, buffer.shape[2], capacity)
            wider[:, :, :, : buffer.shape[3]] = buffer
            self._response[layer] = wider
        if self._kernel is None and set_places:
            self._set_places()
        self._moved = True

    @property
    def _at_once(self) -> bool:
        """Whether buffers have room for full responses from the start; their capacity costs a kernel nothing."""
        return self._fixed and self._kernel is not None

    def _room(self) -> int:
        """Return the capacity for full responses, and a token: `arrange` lets one that has ended go one further."""
        return max(int(self._most.max()), self._least_room) + 1

    def places(self) -> StepPlaces:
        """Return where the newest tokens stand, after `advance`; the same for every layer."""
        positions = self._offset + self._filled
        columns = self.capacity if self._fixed else int(self._length.max())
        if not self._fixed and (self._length == columns).all():
            return StepPlaces(positions, columns, None, None)
        empty = self._columns[:columns] >= self._filled[:, None, None]
        bias = torch.where(empty, self._hidden, self._shown)
        return StepPlaces(positions, columns, self._before_first + self._filled, bias)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        places: StepPlaces,
    ) -> torch.Tensor:
        """Store the newest tokens' keys and values and return their attention outputs, after `advance`.

        Idempotent for the same tokens.

        Args:
            layer: index of the decoder layer.
            query: [B, H * G, D], rotated.
            key: [B, H, D], rotated.
            value: [B, H, D].
            scaling: factor of the scores.
            places: of the newest tokens.

        Returns:
            [B, H * G * D].
        """
        buffer = self._response[layer]
        _, heads, rows, capacity, size = buffer.shape
        length = places.columns
        if places.newest is None:
            buffer[0, :, :, length - 1] = key.transpose(0, 1)
            buffer[1, :, :, length - 1] = value.transpose(0, 1)
        else:
            in_rows = buffer.view(2, heads, rows * capacity, size)
            in_rows[0].index_copy_(1, places.newest, key.transpose(0, 1))
            in_rows[1].index_copy_(1, places.newest, value.transpose(0, 1))
        own_key, own_value = buffer.flatten(1, 2)[:, :, :length]
        prompt_key, prompt_value = self._prompt[layer]
        width = prompt_key.shape[2]
        group = query.shape[1] // heads
        query = query.reshape(rows, heads, group, size).transpose(0, 1).contiguous()

        # Scores are fp32 whatever the dtype: a softmax in half precision would not be the trainer's.
        columns = max(width + length, LEAST_COLUMNS)
        scores = torch.empty(heads, rows, group, columns, dtype=torch.float32, device=query.device)
        scores[..., width + length :] = -torch.inf
        of_prompt = self._to_grid(query).flatten(1, 2).view(-1, self._per_prompt * group, size)
        of_prompt = self._from_grid(torch.bmm(of_prompt, prompt_key.flatten(0, 1).transpose(1, 2)), rows, group)
        if self._bias is None:
            torch.mul(of_prompt, scaling, out=scores[..., :width])
        else:
            torch.add(self._bias, of_prompt, alpha=scaling, out=scores[..., :width])
        of_own = torch.bmm(query.view(heads * rows, group, size), own_key.transpose(1, 2))
        of_own = of_own.view(heads, rows, group, length)
        if places.bias is None:
            torch.mul(of_own, scaling, out=scores[..., width : width + length])
        else:
            torch.add(places.bias, of_own, alpha=scaling, out=scores[..., width : width + length])

        weights = scores.softmax(dim=-1).to(query.dtype)
        of_prompt = self._to_grid(weights[..., :width]).flatten(1, 2).view(-1, self._per_prompt * group, width)
        output = self._from_grid(torch.bmm(of_prompt, prompt_value.flatten(0, 1)), rows, group)
        output = output.reshape(heads * rows, group, size)
        output.baddbmm_(weights.view(heads * rows, group, columns)[..., width : width + length], own_value)
        return output.view(heads, rows, group * size).transpose(0, 1).reshape(rows, -1)

    def attend_in_kernel(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        """Rotate, then do as `attend`, in one kernel, which reads where the newest tokens stand.

        Args:
            layer: index of the decoder layer.
            query: [B, H * G, D], not rotated; may be a slice, as key and value.
            key: [B, H, D], not rotated.
            value: [B, H, D].
            cos: [positions, D].
            sin: [positions, D].
            scaling: factor of the scores.

        Returns:
            [B, H * G * D].
        """
        assert self._kernel is not None
        prompts, responses = self._prompt[layer], self._response[layer]
        rows = (self._place, self._prompt_tokens)
        return self._kernel(query, key, value, cos, sin, self._offset, prompts, *rows, responses, self._filled, scaling)

    def _to_grid(self, of_rows: torch.Tensor) -> torch.Tensor:
        """Scatter [H, B, G, X] to [H, P * rows per prompt, G, X], zero in empty slots."""
        if self._slot is None:
            return of_rows
        heads, _, group, last = of_rows.shape
        slots = self._prompt[0].shape[2] * self._per_prompt
        return of_rows.new_zeros(heads, slots, group, last).index_copy_(1, self._slot, of_rows)

    def _from_grid(self, of_prompts: torch.Tensor, rows: int, group: int) -> torch.Tensor:
        """Gather [H, B, G, X] from [H * P, rows per prompt * G, X]."""
        heads, last = self._prompt[0].shape[1], of_prompts.shape[-1]
        grid = of_prompts.view(heads, -1, group, last)
        return grid if self._slot is None else grid.index_select(1, self._slot)


def _buffer(like: torch.Tensor, rows: int, capacity: int) -> torch.Tensor:
    """Return an empty buffer [2, H, B, C, D]; zeroed, for what a row has not filled is read, with a weight of 0."""
    return like.new_zeros(2, like.shape[1], rows, capacity, like.shape[4])
