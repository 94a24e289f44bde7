"""The decoding loop: a prefill for the prompts of queued responses, then a token per step for all slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from hwgrpo.errors import RunError
from hwgrpo.rollout.counter_rng import uniforms
from hwgrpo.rollout.local.decode_rows import Rows, digests_of
from hwgrpo.rollout.local.kept_responses import Kept, KeptResponses
from hwgrpo.rollout.local.slot_scheduler import Request, SlotScheduler
from hwgrpo.rollout.local.token_sampling import Drawn, draw
from hwgrpo.rollout.stopping import StopDetector
from hwgrpo.values import Sampling

FIRST_TOKENS = 64
"""Initial length of the host's records of a response, which are doubled when full."""


@dataclass(frozen=True)
class Settings:
    """What requests of one kind have in common."""

    sampling: Sampling
    """Temperature and filters, or greedy; the rest is not read."""
    watch: StopDetector
    """Detects the end of responses."""


class Decoded(NamedTuple):
    """A response that has ended, of R tokens, on the CPU."""

    number: int
    """Of its request."""
    group: int
    """Of its request."""
    finished: bool
    """Whether a stop token or string ended it, not the limit."""
    per_token: dict[str, np.ndarray]
    """[R] each: `tokens`, `logprobs`, `floors` if any response so far had a filter (-inf: dropped nothing), and the
    `versions` int64 of the weights that gave each token's logits."""


class _Unread(NamedTuple):
    """What a step drew for some slots, not yet read by the host."""

    slots: np.ndarray
    """[A] int64."""
    positions: np.ndarray
    """[A] int64, of the drawn tokens in their responses."""
    drawn: Drawn
    version: int


@dataclass
class _HeldPrompt:
    """A prompt whose keys and values are held."""

    tokens: tuple[int, ...]
    number: int
    version: int
    """Of the weights that prefilled it."""
    logits: torch.Tensor | None
    """[V] after its last token; None once no response to it is queued."""
    rows: int = 0
    """Responses to it that have not ended."""
    extended: bool = False
    """Whether it continues a kept response; it is then held until its own responses have begun."""
    freed: bool = False
    """Whether it is held no longer."""


class Decoder:
    """Decodes submitted responses, at most `slots` at once.

    When a response ends, its slot takes the next one of the queue (`SlotScheduler`): with its own prompt, position,
    limit and settings. Its tokens depend neither on the slot nor on the time or the other responses: each is drawn at
    the uniform of its own key and position.

    Responses with equal prompts share a prefill, whose keys and values are held until the last of them has ended. If
    the weights change meanwhile, responses that are being decoded keep what older weights computed, and their tokens
    the version of each; a response that gets its slot after that begins with a prefill by the new weights, even where
    an older one of its prompt is held.

    Keys and values of a response that is `kept` are copied when it ends. Of a request that continues it, only what is
    new is computed, also after an update of the weights: the kept ones are those of older weights, as those of a
    response that is being decoded. Where they are not kept any more, all of the prompt is prefilled.

    Args:
        rows: nothing is prefilled yet.
        slots: most responses that are decoded at once.
        device: device of the rows.
        kinds: settings that requests name by their index.
        prompts: most prompts that are held at once; None: any number.
        sync_every: steps between reads of the drawn tokens by the host. Results do not depend on it. Each read waits
            for the device; in between, responses that have ended are decoded on, and no slot is refilled.
        apply_new_weights: called before each forward; lets weights be exchanged and returns the current version.
        supports_padding: prompts of unequal length may be prefilled together.
        prefill_ahead: where prompts are prefilled, those of so many further requests are, too.
        admitted: called with each request that gets a slot, before the prefill of its prompt.
        longest: most tokens of a sequence; it limits what is kept of ended responses (`KeptResponses`).

    Example:
        decoder.submit(request); for responses in decoder.run(): ...  # Decoded ones; more may be submitted here
    """

    def __init__(
        self,
        rows: Rows,
        slots: int,
        device: torch.device,
        kinds: Sequence[Settings],
        *,
        prompts: int | None = None,
        sync_every: int = 1,
        apply_new_weights: Callable[[], int] = lambda: 0,
        supports_padding: bool = True,
        prefill_ahead: int = 0,
        admitted: Callable[[Request], None] = lambda request: None,
        longest: int = 0,
    ) -> None:
        self._rows, self._device, self._kinds = rows, device, kinds
        self._sync_every, self._apply_new_weights = sync_every, apply_new_weights
        self._supports_padding, self._prefill_ahead, self._admitted = supports_padding, prefill_ahead, admitted
        self._scheduler = SlotScheduler(slots, prompts, refills=rows.refills, one_length=not supports_padding)
        self._version = 0
        self._held: dict[tuple[int, ...], _HeldPrompt] = {}
        """The newest prefill of each prompt."""
        self._prompt_of: list[_HeldPrompt] = []
        """[B] of each slot's response."""
        self._source = np.empty(0, dtype=np.int64)
        """[B] argument of the next `Rows.arrange`."""
        self._arranged = 0
        """Rows of the last `Rows.arrange`."""
        self._token = torch.empty(0, dtype=torch.long, device=device)
        """[B] newest token of each slot."""
        self._records: dict[str, np.ndarray] = {}
        """name -> [B, capacity], of each slot's response."""
        self._unread: list[_Unread] = []
        self._uniforms: torch.Tensor | None = None
        self._uniforms_used = 0
        self._groups: list[tuple[int, np.ndarray | None, torch.Tensor | None]] | None = None
        self._kept = KeptResponses(slots, longest)
        self._begun: list[_HeldPrompt] = []
        """Extended responses that the next step begins with."""
        self.prefilled_tokens = 0
        """Tokens of prompts and of earlier turns that were computed."""
        self.continued_tokens = 0
        """Tokens of earlier turns and their prompts whose keys and values were kept."""
        self.steps = 0
        """Decode steps, prefills not counted."""
        self.rows_drawn = 0
        """Drawn tokens, including those of responses that had ended."""

    @property
    def version(self) -> int:
        """Of the weights of the last forward."""
        return self._version

    def submit(self, request: Request) -> int:
        """Append a request to the queue; return its number, counted from 0.

        One that comes when all others with its prompt have their slots prefills it again.
        """
        self._kept.expect(request)
        return self._scheduler.submit(request)

    def limit_prompts(self, most: int) -> None:
        """Set the most prompts that are held at once from here on."""
        self._scheduler.most_prompts = most

    def release(self, number: int) -> None:
        """Keep a response no longer, if it is kept."""
        self._kept.release(number)

    def drop_group(self, group: int) -> None:
        """End the responses of a group, and forget those that are queued; none of them is returned by `run`."""
        slots = self._scheduler.slots
        prompts = [held.tokens for held in self._held.values()]
        self._scheduler.drop_queued(group)
        self._end(np.flatnonzero(slots["growing"] & (slots["group"] == group)))
        for tokens in prompts:
            if tokens in self._held:
                self._free_if_unused(self._held[tokens])

    def run(self) -> Iterator[list[Decoded]]:
        """Decode until nothing is left; yield the responses that have ended after each read of drawn tokens.

        Raises:
            RunError: the model's logits are not finite.
        """
        while self.busy:
            yield self.advance()

    @property
    def busy(self) -> bool:
        """Whether responses are queued or being decoded."""
        return bool(self._scheduler.pending or self._unread or self._scheduler.slots["growing"].any())

    def advance(self) -> list[Decoded]:
        """Decode until drawn tokens are read; return the responses that have ended."""
        while True:
            if not self._unread:
                self._admit()
            slots = self._scheduler.slots
            if not self._unread and not slots["growing"].any():
                return []
            if self._unread and self._is_due(slots):
                return self._read()
            self._step()
            if self._is_due(slots):
                return self._read()

    def _is_due(self, slots: np.ndarray) -> bool:
        """Return whether to read the drawn tokens: often enough, or because no response has tokens left to draw."""
        unended = slots[slots["growing"]]
        return len(self._unread) >= self._sync_every or bool((unended["drawn"] >= unended["limit"]).all())

    def _admit(self) -> None:
        """Give free slots to queued requests, draw their first tokens, and drop slots that stay free."""
        places, requests = self._scheduler.admit([p for p, held in self._held.items() if held.rows])
        slots = self._scheduler.slots
        if requests:
            if len(slots) == len(requests):  # all are new
                self._prompt_of, self._source, self._records = [], np.empty(0, dtype=np.int64), {}
            if not self._rows.refills:
                self._held, self._arranged = {}, 0
            self._prefill(requests)
            helds = [self._held[request.prompt] for request in requests]
            logits = self._first_logits(helds)
            self._prompt_of += helds[: len(slots) - len(self._prompt_of)]
            added = len(slots) - len(self._source)
            self._source = np.concatenate([self._source, np.zeros(added, dtype=np.int64)])
            for place, held in zip(places.tolist(), helds, strict=True):
                self._prompt_of[place] = held
                self._source[place] = ~held.number
                held.rows += 1
                if held.tokens not in self._scheduler.pending:
                    held.logits = None
                    self._begun += [held] if held.extended else []
            self._groups = self._uniforms = None
            self._draw(logits, places)
            return
        kept = np.flatnonzero(slots["growing"])
        if 0 < len(kept) < len(slots) and len(kept) / len(slots) <= self._rows.compact_below:
            self._compact(kept)

    def _first_logits(self, helds: Sequence[_HeldPrompt]) -> torch.Tensor:
        """Return the logits [A, V] after the prompts of some responses."""
        distinct = {id(held): held for held in helds}
        row_of = dict(zip(distinct, range(len(distinct)), strict=True))
        logits = _stack([held.logits for held in distinct.values()])
        return logits[torch.tensor([row_of[id(held)] for held in helds], device=self._device)]

    def _prefill(self, requests: Sequence[Request]) -> None:
        """Run the prompts through the model that are not held, or held from older weights."""

        def missing() -> list[tuple[int, ...]]:
            prompts = dict.fromkeys(request.prompt for request in requests)
            held = {p: self._held.get(p) for p in prompts}
            return [p for p, it in held.items() if it is None or it.logits is None or it.version != self._version]

        for request in requests:
            self._admitted(request)
        if missing():
            self._update_version()
            prompts = missing()
            wanted = [*requests]
            if self._rows.refills:
                ahead = self._scheduler.next_requests(self._prefill_ahead)
                more = list(dict.fromkeys(r.prompt for r in ahead if r.prompt not in self._held))
                more = [prompt for prompt in more if prompt not in prompts]
                prompts += more[: max(0, self._scheduler.most_prompts - len({*self._held, *prompts}))]
                wanted += ahead
            kept = {request.prompt: self._kept.beginning(request) for request in wanted}
            self._prefill_whole([prompt for prompt in prompts if kept[prompt] is None])
            self._extend({prompt: each for prompt in prompts if (each := kept[prompt]) is not None})
        for request in requests:
            if request.continues is not None:
                self.release(request.continues)

    def _prefill_whole(self, prompts: Sequence[tuple[int, ...]]) -> None:
        by_length: dict[int, list[tuple[int, ...]]] = {}
        for prompt in prompts:
            by_length.setdefault(0 if self._supports_padding else len(prompt), []).append(prompt)
        for together in by_length.values():
            self._hold(together, *self._rows.prefill(together))
        self.prefilled_tokens += sum(map(len, prompts))

    def _extend(self, kept: dict[tuple[int, ...], Kept]) -> None:
        """Compute what prompts have beyond kept responses."""
        prompts = [*kept]
        batches = [prompts] if self._supports_padding and prompts else [[prompt] for prompt in prompts]
        for together in batches:
            rows = [kept[prompt].row for prompt in together]
            self._hold(together, *self._rows.extend(rows, together), extended=True)
            self.continued_tokens += sum(row.length for row in rows)
            self.prefilled_tokens += sum(map(len, together)) - sum(row.length for row in rows)

    def _hold(
        self, prompts: Sequence[tuple[int, ...]], numbers: list[int], logits: torch.Tensor, *, extended: bool = False
    ) -> None:
        for prompt, number, each in zip(prompts, numbers, logits, strict=True):
            older = self._held.get(prompt)
            self._held[prompt] = _HeldPrompt(prompt, number, self._version, each, extended=extended)
            if older is not None:
                self._free_if_unused(older)

    def _free_if_unused(self, held: _HeldPrompt) -> None:
        newest = self._held.get(held.tokens) is held
        if held.rows or (newest and held.tokens in self._scheduler.pending):
            return
        self._free(held)

    def _free(self, held: _HeldPrompt) -> None:
        if held.freed:
            return
        if self._held.get(held.tokens) is held:
            del self._held[held.tokens]
        held.freed = True
        self._rows.free([held.number])

    def _compact(self, kept: np.ndarray) -> None:
        """Keep some slots and drop the others."""
        self._scheduler.keep(kept)
        self._prompt_of = [self._prompt_of[slot] for slot in kept.tolist()]
        self._source = self._source[kept]
        self._token = self._token[torch.from_numpy(kept).to(self._device)]
        self._records = {name: values[kept] for name, values in self._records.items()}
        self._groups = self._uniforms = None

    def _update_version(self) -> None:
        version = self._apply_new_weights()
        if version != self._version:
            self._rows.weights_changed()
        self._version = version

    def _step(self) -> None:
        """Append the newest tokens to all rows and draw the next ones."""
        self._update_version()
        self._arrange()
        # Rows that have ended but are still in the batch decode on; their tokens are discarded.
        logits = self._rows.step(self._token.clamp_min(0))
        for held in self._begun:
            held.logits = None
            self._free(held)
        self._begun.clear()
        self.steps += 1
        self._draw(logits, None)

    def _arrange(self) -> None:
        slots = self._scheduler.slots
        own = np.arange(len(slots))
        unborn = (self._source < 0) & ~slots["growing"]
        if unborn.any():  # a free slot whose response ended with its first token needs any row, not its prompt
            other = self._source[np.argmax(slots["growing"])]
            self._source[unborn] = np.where(own < self._arranged, own, other)[unborn]
        if len(slots) != self._arranged or not np.array_equal(self._source, own):
            left = np.maximum(slots["limit"] - slots["drawn"], 1)
            left[~slots["growing"] & (self._source == own)] = 0
            self._rows.arrange(self._source, left)
            self._source, self._arranged = own, len(slots)

    def _draw(self, logits: torch.Tensor, places: np.ndarray | None) -> None:
        """Draw a token for all slots, or for the slots `places`, whose first one it is."""
        slots = self._scheduler.slots
        chosen = slots if places is None else slots[places]
        if places is None:
            uniform = self._next_uniforms()
            if self._groups is None:
                self._groups = self._by_kind(slots["kind"])
            groups = self._groups
        else:
            groups = self._by_kind(chosen["kind"])
            uniform = self._uniforms_at(chosen, 1)[:, 0]
        drawn = [self._draw_kind(logits, uniform, kind, index) for kind, _, index in groups]
        joined = drawn[0] if len(groups) == 1 else _scatter(drawn, groups, len(chosen))
        if places is None:
            self._token = joined.tokens
        else:
            if len(places) == len(slots):
                self._token = joined.tokens
            else:
                more = len(slots) - len(self._token)
                self._token = torch.cat([self._token, self._token.new_zeros(more)]) if more else self._token.clone()
                self._token[torch.from_numpy(places).to(self._device)] = joined.tokens
        numbers = np.arange(len(slots)) if places is None else places
        self._unread.append(_Unread(numbers, chosen["drawn"].copy(), joined, self._version))
        slots["drawn"][numbers] += 1
        self.rows_drawn += len(numbers)

    def _by_kind(self, kinds: np.ndarray) -> list[tuple[int, np.ndarray | None, torch.Tensor | None]]:
        """Return each kind, the rows [A] that have it, and these on the device; None for all rows."""
        distinct = np.unique(kinds).tolist()
        if len(distinct) == 1:
            return [(distinct[0], None, None)]
        rows = [np.flatnonzero(kinds == kind) for kind in distinct]
        return [(kind, each, torch.from_numpy(each).to(self._device)) for kind, each in zip(distinct, rows)]

    def _draw_kind(self, logits: torch.Tensor, uniform: torch.Tensor, kind: int, index: torch.Tensor | None) -> Drawn:
        sampling = self._kinds[kind].sampling
        if index is not None:
            logits, uniform = logits[index], uniform[index]
        return draw(
            logits,
            None if sampling.greedy else uniform,
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
        )

    def _next_uniforms(self) -> torch.Tensor:
        """Return the uniforms [B] of the next tokens of all slots; copied to the device once per read."""
        if self._uniforms is None:
            self._uniforms, self._uniforms_used = self._uniforms_at(self._scheduler.slots, self._sync_every), 0
        column = self._uniforms[:, self._uniforms_used]
        self._uniforms_used += 1
        if self._uniforms_used == self._uniforms.shape[1]:
            self._uniforms = None
        return column

    def _uniforms_at(self, slots: np.ndarray, count: int) -> torch.Tensor:
        if all(settings.sampling.greedy for settings in self._kinds):
            return torch.zeros(len(slots), count, device=self._device)
        return uniforms(slots["key"], slots["drawn"], count).to(self._device)

    def _read(self) -> list[Decoded]:
        """Read the drawn tokens; return the responses that have ended."""
        slots = self._scheduler.slots
        ended: list[Decoded] = []
        tokens, logprobs, floors = _on_host([each.drawn for each in self._unread])
        first = 0
        for unread in self._unread:
            last = first + len(unread.slots)
            token = tokens[first:last]
            growing = slots["growing"][unread.slots]
            rows, positions, token = unread.slots[growing], unread.positions[growing], token[growing]
            if (token < 0).any():
                raise RunError(
                    f"the model's logits at response position {positions[token < 0].min()} are not finite: its weights "
                    "hold NaN or infinite values, or the compute dtype overflows (model.dtype: bfloat16 has the range "
                    "of float32)"
                )
            self._record("tokens", rows, positions, token)
            self._record("logprobs", rows, positions, logprobs[first:last][growing])
            self._record("versions", rows, positions, np.int64(unread.version))
            if floors is not None:
                self._record("floors", rows, positions, floors[first:last][growing])
            elif "floors" in self._records:
                self._record("floors", rows, positions, np.float32(-np.inf))
            stopped = self._stopped(slots[rows], token)
            over = stopped | (positions + 1 >= slots["limit"][rows])
            if over.any():
                ended += self._ended(rows[over], positions[over] + 1, stopped[over])
            first = last
        self._unread.clear()
        return ended

    def _ended(self, rows: np.ndarray, lengths: np.ndarray, finished: np.ndarray) -> list[Decoded]:
        """Free slots whose responses have ended, and return these."""
        slots = self._scheduler.slots[rows]
        records = {name: values[rows, : int(lengths.max())] for name, values in self._records.items()}
        columns = (slots["number"].tolist(), slots["group"].tolist(), finished.tolist(), lengths.tolist())
        for i in np.flatnonzero(slots["kept"] & self._rows.parks).tolist():
            self._keep(int(rows[i]), records["tokens"][i, : int(lengths[i])])
        self._end(rows)
        return [
            Decoded(number, group, stopped, {name: values[i, :length] for name, values in records.items()})
            for i, (number, group, stopped, length) in enumerate(zip(*columns, strict=True))
        ]

    def _keep(self, slot: int, response: np.ndarray) -> None:
        """Keep the keys and values of a response that has ended, without its last token, which was not appended."""
        limit = self._scheduler.slots["limit"][slot]
        overwritten = self._sync_every > 1 and 1 < len(response) == limit  # its row has gone on since
        known = len(self._prompt_of[slot].tokens) + len(response) - 1 - overwritten
        tokens = np.concatenate([self._prompt_of[slot].tokens, response])[:known]
        row = self._rows.park(int(self._source[slot]), known)
        row = replace(row, images=digests_of(self._prompt_of[slot].tokens))
        self._kept.add(int(self._scheduler.slots["number"][slot]), tokens, row)

    def _stopped(self, slots: np.ndarray, token: np.ndarray) -> np.ndarray:
        """Return which responses [A] bool their newest tokens end."""
        distinct = np.unique(slots["kind"]).tolist()
        if len(distinct) == 1:
            return self._kinds[distinct[0]].watch.ended(slots["number"], token)
        stopped = np.zeros(len(slots), dtype=bool)
        for kind in distinct:
            rows = slots["kind"] == kind
            stopped[rows] = self._kinds[kind].watch.ended(slots["number"][rows], token[rows])
        return stopped

    def _end(self, ended: np.ndarray) -> None:
        self._scheduler.slots["growing"][ended] = False
        for slot in ended.tolist():
            held = self._prompt_of[slot]
            held.rows -= 1
            self._free_if_unused(held)

    def _record(self, name: str, rows: np.ndarray, positions: np.ndarray, values: Any) -> None:
        """Write values of the tokens at these positions of the responses in some slots."""
        slots = len(self._scheduler.slots)
        missing = -np.inf if name == "floors" else 0
        record = self._records.get(name)
        if record is None:
            record = np.full((slots, FIRST_TOKENS), missing, dtype=values.dtype)
        longest = int(positions.max(initial=0))
        capacity = record.shape[1]
        while capacity <= longest:
            capacity *= 2
        if record.shape != (slots, capacity):
            more = ((0, slots - len(record)), (0, capacity - record.shape[1]))
            record = np.pad(record, more, constant_values=missing)
        record[rows, positions] = values
        self._records[name] = record


def _stack(rows: Sequence[torch.Tensor | None]) -> torch.Tensor:
    assert all(row is not None for row in rows)
    return torch.stack(rows)  # type: ignore[arg-type]


def _on_host(draws: Sequence[Drawn]) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return tokens int64, log-probs and floors fp32 of all draws, one after another: a single copy from the device.

    Floors are None where no draw has any, and -inf for those that have none.
    """
    columns = [torch.cat([each.tokens for each in draws]).int()]
    columns.append(torch.cat([each.logprobs for each in draws]).view(torch.int32))
    if any(each.floors is not None for each in draws):
        unfiltered = (torch.full_like(each.logprobs, -torch.inf) for each in draws)
        floors = [none if each.floors is None else each.floors for each, none in zip(draws, unfiltered, strict=True)]
        columns.append(torch.cat(floors).view(torch.int32))
    tokens, *values = torch.stack(columns).cpu().numpy()
    logprobs, *floored = (each.view(np.float32) for each in values)
    return tokens.astype(np.int64), logprobs, next(iter(floored), None)


def _scatter(
    drawn: Sequence[Drawn], groups: Sequence[tuple[int, np.ndarray | None, torch.Tensor | None]], rows: int
) -> Drawn:
    """Return what was drawn for several kinds of rows in the order of the rows."""
    tokens = drawn[0].tokens.new_empty(rows)
    logprobs = drawn[0].logprobs.new_empty(rows)
    floors = None if all(each.floors is None for each in drawn) else torch.full_like(logprobs, -torch.inf)
    for each, (_, _, index) in zip(drawn, groups, strict=True):
        assert index is not None
        tokens[index] = each.tokens
        logprobs[index] = each.logprobs
        if floors is not None and each.floors is not None:
            floors[index] = each.floors
    return Drawn(tokens, logprobs, floors)
