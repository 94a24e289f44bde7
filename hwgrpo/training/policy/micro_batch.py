"""Micro-batches: the split of an update into them, and the input of one forward pass from the rows of a layout.

Only hidden states that predict response tokens reach the LM head. A response's last token is not an input. Where a
prompt is shared under a dense mask, so are the tokens with which its responses begin: their hidden states are the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from hwgrpo_backends.device import send

from hwgrpo.models.shared_prefix_masks import Branches, Packed, Sequences
from hwgrpo.models.ulysses_attention import all_to_all
from hwgrpo.ragged import offsets_of
from hwgrpo.training.policy.layouts import Layout, Rows, input_lengths
from hwgrpo.values import PromptImages, TrainBatch


def split_micro_batches(
    batch: TrainBatch,
    sequences: Sequence[int],
    budget: int,
    layout: Layout,
    hidden_size: int,
    *,
    full_trajectories: bool = False,
) -> list[Rows]:
    """Split sequences into micro-batches of `budget` tokens, padding included; group rows of similar length.

    Args:
        batch: the update's sequences.
        sequences: indices of the sequences; those without tokens that carry loss are skipped (they have no gradient).
        budget: tokens per micro-batch, prompt and response; exceeded by a 64th at the most.
        layout: forms the rows.
        hidden_size: the model's; layouts weigh attention against matrix products with it.
        full_trajectories: do not spread the rows of a trajectory, because the loss has sequence scope.

    Returns:
        Rows per micro-batch. A row longer than the budget is alone in its micro-batch; with `full_trajectories`, so is
        a trajectory.
    """
    if full_trajectories and batch.trajectory is not None:
        return _trajectory_parts(batch, sequences, budget, layout, hidden_size)
    filled = batch.loss_lengths.gt(0).tolist()
    lengths = input_lengths(batch).tolist()
    prompts = batch.prompt_offsets.diff()[batch.prompt_index].tolist()

    def length(row: list[int]) -> int:
        # tokens with which responses begin alike count for each: the LM head has all of them
        repeated = prompts[row[0]] * (len(row) - 1) if layout.shares_prompt else 0
        return sum(lengths[s] for s in row) - repeated

    rows = layout.rows(batch, [s for s in sequences if filled[s]], budget, hidden_size)
    # a group of 2**k tokens and its prompt are a little more than a share of a budget of 2**m
    most = budget + budget // 64
    parts: list[Rows] = []
    longest = 0
    for width, row in sorted(((length(row), row) for row in rows), key=lambda item: (-item[0], item[1])):
        if not parts or (len(parts[-1]) + 1) * longest > most:
            parts.append([])
            longest = width
        parts[-1].append(row)
    return parts


def _trajectory_parts(
    batch: TrainBatch, sequences: Sequence[int], budget: int, layout: Layout, hidden_size: int
) -> list[Rows]:
    """Split into micro-batches of full trajectories; each may be larger than needed, for no row is shared by two."""
    assert batch.trajectory is not None
    filled, trajectory = batch.loss_lengths.gt(0).tolist(), batch.trajectory.tolist()
    lengths = input_lengths(batch).tolist()
    trajectories: dict[int, list[int]] = {}
    for s in sequences:
        if filled[s]:
            trajectories.setdefault(trajectory[s], []).append(s)
    parts: list[list[int]] = []
    longest = 0
    for own in trajectories.values():
        longest = max(longest, *(lengths[s] for s in own))
        if not parts or (len(parts[-1]) + len(own)) * longest > budget:
            parts.append([])
            longest = max(lengths[s] for s in own)
        parts[-1] += own
    return [layout.rows(batch, part, budget, hidden_size) for part in parts]


@dataclass(frozen=True)
class SequenceShard:
    """The exchange from a rank's [B * L / S] hidden states, its columns of all rows, to those of its own losses."""

    group: Any
    """The process group."""
    size: int
    """S, its number of ranks."""
    tensor: bool
    """Tensor parallelism: layers are sharded over the ranks and gather all tokens themselves."""
    total: int
    """Response tokens of the micro-batch, over all ranks of the group."""
    rows: torch.Tensor
    """[M] int64: indices of the hidden states to send, in the order of receivers, this rank included."""
    send: tuple[int, ...]
    """Number of hidden states for each rank; M in total."""
    receive: tuple[int, ...]
    """Number of hidden states from each rank; N in total."""
    order: torch.Tensor
    """[N] int64: index of each response token's hidden state among the received ones."""

    def to(self, device: torch.device) -> SequenceShard:
        """Return the same on `device`."""
        return replace(self, rows=send(self.rows, device), order=send(self.order, device))

    def own(self, hidden: torch.Tensor) -> torch.Tensor:
        """Exchange hidden states [B * L / S, H]; return those that predict this rank's response tokens [N, H]."""
        return all_to_all(hidden[self.rows], self.send, self.receive, self.group)[self.order]


@dataclass(frozen=True)
class MicroBatch:
    """The input of one forward pass: B rows of L tokens, N response tokens of S sequences."""

    input_ids: torch.Tensor
    """[B, L] int64."""
    position_ids: torch.Tensor
    """[B, L] int64: position within the sequence; [4, B, L]: followed by those in time, height and width."""
    is_token: torch.Tensor
    """[B, L] bool: False at padding."""
    mask_spans: torch.Tensor | None
    """[3, B, L] int64: position, and first and last sequence of each token, of which the device makes the mask; None
    for plain causal attention or with `branches`."""
    branches: Branches | Sequences | None
    """Positions of prompts and responses, or of whole sequences, for attention without a mask over the row."""
    hidden_rows: torch.Tensor
    """[N] int64: index in the flattened [B * L] hidden states of the one that predicts each response token."""
    targets: torch.Tensor
    """[N] int64: the response tokens that carry loss."""
    cu_seqlens: torch.Tensor
    """[S + 1] int64: bounds of the sequences among the N rows; on the host, which reads them."""
    token_index: torch.Tensor
    """[N] int64: index of each response token in the TrainBatch's [R] arrays."""
    signals: Mapping[str, torch.Tensor]
    """name -> [N] fp32: inputs of the loss per token (advantage, weight, old_logprob, ...)."""
    shard: SequenceShard | None = None
    """Set if a group of ranks shares the rows: `input_ids`, `position_ids` and `is_token` are then this rank's
    [B, L / S], N counts the response tokens whose loss it computes; mask, branches, `hidden_rows` cover full rows."""
    temperature: float | None = None
    """Of the log-probs; None: the policy's."""
    images: tuple[PromptImages, ...] = ()
    """Of the prompts in the rows, in their order; on the host, until they are encoded."""

    @property
    def positions(self) -> torch.Tensor:
        """[B, L] int64: position within the sequence."""
        return self.position_ids if self.position_ids.ndim == 2 else self.position_ids[0]

    @property
    def attention_mask(self) -> torch.Tensor | None:
        """[B, 1, L, L] bool (True: may attend), made anew; None for plain causal attention or with `branches`."""
        return None if self.mask_spans is None else _row_mask(*self.mask_spans)

    def to(self, device: torch.device) -> MicroBatch:
        """Return the same micro-batch on `device`, where it may arrive while the host goes on."""
        if self.input_ids.device == device:
            return self
        return replace(
            self,
            input_ids=send(self.input_ids, device),
            position_ids=send(self.position_ids, device),
            is_token=send(self.is_token, device),
            mask_spans=None if self.mask_spans is None else send(self.mask_spans, device),
            branches=None if self.branches is None else self.branches.to(device),
            hidden_rows=send(self.hidden_rows, device),
            targets=send(self.targets, device),
            signals={name: send(tensor, device) for name, tensor in self.signals.items()},
            shard=None if self.shard is None else self.shard.to(device),
        )


def build_micro_batch(
    batch: TrainBatch, rows: Rows, signals: Mapping[str, str], layout: Layout, multiple: int = 1
) -> MicroBatch:
    """Build a micro-batch from rows of sequences.

    Args:
        batch: the update's sequences.
        rows: B rows of sequence indices; no rows give one row of one token and N = 0.
        signals: inputs of the loss per token: name -> column of the batch, [R] fp32 or [S] fp32, repeated over tokens.
        layout: layout of the rows; if it shares prompts, the sequences of a row must have the same prompt.
        multiple: divisor of the width L, padding included.
    """
    sequence_S, row_S, first_S, own_prompt_S, input_S, shared_S = members = _row_members(batch, rows, layout)
    prompt_S = batch.prompt_index[sequence_S]
    prompt_length_S = batch.prompt_offsets.diff()[prompt_S]
    length_S = batch.lengths[sequence_S]

    width = max(members.widths(input_S - shared_S), default=1)
    dense = layout.is_dense(width)
    if not dense:
        shared_S = torch.zeros_like(shared_S)
        width = max(members.widths(input_S), default=1)
    fed_S = input_S - shared_S
    end_S = (own_prompt_S + fed_S).cumsum(0)
    begin_S = end_S - own_prompt_S - fed_S
    column_S = begin_S - begin_S[first_S][row_S]  # column of the sequence's first own token
    width = -(-width // multiple) * multiple
    prompt_end_S = prompt_length_S if layout.shares_prompt else column_S + prompt_length_S
    # column of the first response token, were it the sequence's own
    response_S = column_S + own_prompt_S - shared_S

    input_ids = torch.zeros(max(len(rows), 1), width, dtype=torch.int64)
    positions = torch.zeros_like(input_ids)
    # Numbers of the first and last sequence that have the token, as all between them do: 0 to S for a shared prompt, -1
    # for padding.
    owner = torch.full_like(input_ids, -1)
    last = torch.full_like(input_ids, -1)
    number_S = torch.arange(1, len(sequence_S) + 1)
    place, within, of = _spread(row_S * width + column_S, own_prompt_S)
    source = batch.prompt_offsets[prompt_S][of] + within
    input_ids.view(-1)[place] = batch.prompt_tokens[source]
    axes = None
    if batch.prompt_axes is not None:
        axes = torch.zeros(*input_ids.shape, 3, dtype=torch.int64)
        axes.view(-1, 3)[place] = batch.prompt_axes[source]
    positions.view(-1)[place] = within
    owner.view(-1)[place] = 0 if layout.shares_prompt else number_S[of]
    last.view(-1)[place] = len(sequence_S) if layout.shares_prompt else number_S[of]
    place, within, of = _spread(row_S * width + response_S + shared_S, fed_S)
    within += shared_S[of]
    input_ids.view(-1)[place] = batch.tokens[batch.offsets[sequence_S][of] + within]
    positions.view(-1)[place] = prompt_length_S[of] + within
    if axes is not None:
        axes.view(-1, 3)[place] = (_next_position(batch)[prompt_S][of] + within)[:, None]
        if batch.shifts is not None:
            axes.view(-1, 3)[place] += batch.shifts[batch.offsets[sequence_S][of] + within]
    owner.view(-1)[place] = number_S[of]
    token_index, within, of = _spread(batch.offsets[sequence_S], length_S)
    before = (within - 1).clamp_min(0)
    feeder = _feeders(shared_S, of, before) if shared_S.any() else of
    place = row_S[of] * width + response_S[feeder] + before
    last.view(-1).scatter_reduce_(0, place[within > 0], number_S[of[within > 0]], "amax")
    if batch.loss_mask is not None:
        kept = batch.loss_mask[token_index]
        token_index, within, of, place = token_index[kept], within[kept], of[kept], place[kept]

    cu_seqlens = offsets_of(batch.loss_lengths[sequence_S])
    if batch.trajectory is not None:  # the rows of a trajectory are one sequence of the loss, one after another
        order = token_index.argsort()
        token_index, within, of, place = token_index[order], within[order], of[order], place[order]
        cu_seqlens = offsets_of(batch.trajectory[sequence_S[of]].unique_consecutive(return_counts=True)[1])

    def at_rows(column: str) -> torch.Tensor:
        values, per_token = batch.column(column)
        return values[token_index] if per_token else values[sequence_S][of]

    masked = len(sequence_S) > len(rows)
    branches = None
    if masked and not dense:
        if layout.shares_prompt:
            branches = _row_branches(row_S, first_S, prompt_length_S, response_S, input_S, width)
        else:
            branches = _row_sequences(row_S * width + column_S, prompt_length_S + input_S, input_ids.numel())
    if not masked:
        # Positions that fall back to 0 at padding would make transformers build a mask for packed sequences.
        positions = torch.arange(width).expand(input_ids.shape)
    return MicroBatch(
        input_ids=input_ids,
        position_ids=positions if axes is None else torch.cat([positions[None], axes.permute(2, 0, 1)]),
        images=_images(batch, members),
        is_token=owner >= 0,
        mask_spans=torch.stack([positions, owner, last]) if masked and dense else None,
        branches=branches,
        hidden_rows=torch.where(within > 0, place, row_S[of] * width + prompt_end_S[of] - 1),
        targets=batch.tokens[token_index],
        cu_seqlens=cu_seqlens,
        token_index=token_index,
        signals={name: at_rows(column) for name, column in signals.items()},
        temperature=batch.temperature,
    )


def _images(batch: TrainBatch, members: _Members) -> tuple[PromptImages, ...]:
    """Return the images in the order of their tokens in the rows."""
    images: list[PromptImages] = []
    if not batch.images and not batch.seen:
        return ()
    for sequence, own_prompt in zip(members.sequence_S.tolist(), members.prompt_S.tolist(), strict=True):
        of_prompt = batch.images[int(batch.prompt_index[sequence])] if batch.images and own_prompt else None
        images += [] if of_prompt is None else [of_prompt]
        images += batch.seen[sequence] if batch.seen else ()
    return tuple(images)


def _next_position(batch: TrainBatch) -> torch.Tensor:
    """Return [G] int64: the position, on every axis, of the first token after each prompt with `prompt_axes`."""
    assert batch.prompt_axes is not None
    number = torch.repeat_interleave(batch.prompt_offsets.diff())
    last = torch.zeros(len(batch.prompt_offsets) - 1, dtype=torch.int64)
    return last.scatter_reduce(0, number, batch.prompt_axes.amax(dim=1), "amax") + 1


class _Members(NamedTuple):
    """The S sequences of B rows, row by row."""

    sequence_S: torch.Tensor
    """[S] int64."""
    row_S: torch.Tensor
    """[S] int64."""
    first_S: torch.Tensor
    """[S] bool: the first of its row."""
    prompt_S: torch.Tensor
    """[S] int64: number of tokens of its prompt that it feeds, 0 where the row's first sequence does."""
    input_S: torch.Tensor
    """[S] int64: input tokens of its response."""
    shared_S: torch.Tensor
    """[S] int64: how many of them the sequences before it in the row feed under a dense mask."""

    def widths(self, fed_S: torch.Tensor) -> list[int]:
        """Return the number of tokens of each row whose sequences feed `fed_S` [S] response tokens."""
        widths = torch.zeros(int(self.first_S.sum()), dtype=torch.int64)
        return widths.index_add(0, self.row_S, self.prompt_S + fed_S).tolist()


def _row_members(batch: TrainBatch, rows: Rows, layout: Layout) -> _Members:
    """Return the sequences of rows of a layout, in any order within a row; sorted ones share most tokens."""
    sequence_S = torch.tensor(list(chain.from_iterable(rows)), dtype=torch.int64)
    row_S = torch.repeat_interleave(torch.tensor([len(row) for row in rows], dtype=torch.int64))
    first_S = torch.ones(len(sequence_S), dtype=torch.bool)
    first_S[1:] = row_S.diff() > 0
    prompt_S = batch.prompt_offsets.diff()[batch.prompt_index[sequence_S]]
    input_S = (batch.lengths[sequence_S] - 1).clamp_min(0)
    if not (layout.shares_prompt and layout.is_dense(1)):
        own_S = torch.where(first_S | (not layout.shares_prompt), prompt_S, 0)
        return _Members(sequence_S, row_S, first_S, own_S, input_S, torch.zeros_like(input_S))
    shared_S = _shared_tokens(batch, sequence_S, row_S)
    return _Members(sequence_S, row_S, first_S, torch.where(first_S, prompt_S, 0), input_S, shared_S)


def _shared_tokens(batch: TrainBatch, sequence_S: torch.Tensor, row_S: torch.Tensor) -> torch.Tensor:
    """Return [S] int64: how many input tokens a response begins with that the one before it in its row has, too.

    Args:
        batch: the update's sequences.
        sequence_S: [S] int64 sequences, row by row; those of a row have one prompt.
        row_S: [S] int64 row of each.
    """
    input_S = (batch.lengths - 1).clamp_min(0)[sequence_S]
    shared_S = torch.zeros_like(input_S)
    shared_S[1:] = torch.where(row_S.diff() == 0, torch.minimum(input_S[1:], input_S[:-1]), 0)
    if batch.seen:  # equal tokens may stand for different images
        observes_S = torch.tensor([bool(batch.seen[sequence]) for sequence in sequence_S.tolist()], dtype=torch.bool)
        shared_S[observes_S] = 0
        shared_S[1:][observes_S[:-1]] = 0
    begin_S = batch.offsets[sequence_S]
    place, within, of = _spread(begin_S, shared_S)
    differs = batch.tokens[place] != batch.tokens[begin_S[of - 1] + within]
    return shared_S.scatter_reduce(0, of[differs], within[differs], "amin")


def _spread(start_S: torch.Tensor, length_S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each element of the ranges of `length_S` from `start_S` on, its index in its range, and its range."""
    of = torch.repeat_interleave(length_S)
    within = torch.arange(len(of)) - (length_S.cumsum(0) - length_S)[of]
    return start_S[of] + within, within, of


def _feeders(shared_S: torch.Tensor, of: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Return [N] int64: the sequence that feeds the input token `at` [N] of the response of sequence `of` [N]."""
    longest = int(shared_S.max())
    owns = shared_S[:, None] <= torch.arange(longest + 1)
    feeder = torch.where(owns, torch.arange(len(shared_S))[:, None], 0).cummax(0).values
    return feeder[of, at.clamp_max(longest)]


def _row_mask(positions: torch.Tensor, owner: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Return [B, 1, L, L] bool: a token sees the tokens that its own sequence has, up to its own position."""
    visible = (owner[:, None, :] <= owner[:, :, None]) & (owner[:, :, None] <= last[:, None, :])
    return (visible & (positions[:, None, :] <= positions[:, :, None]))[:, None]


def _row_branches(
    row_S: torch.Tensor,
    first_S: torch.Tensor,
    prompt_length_S: torch.Tensor,
    response_S: torch.Tensor,
    input_S: torch.Tensor,
    width: int,
) -> Branches:
    """Return the branches of rows of `width` tokens with a shared prompt; `response_S`: first column of a response."""
    numbers = torch.arange(len(row_S))
    branch_S = numbers - numbers[first_S][row_S]
    B, K, P, R = int(row_S[-1]) + 1, int(branch_S.max()) + 1, int(prompt_length_S.max()), int(input_S.max())
    place, within, of = _spread(row_S * width + response_S, input_S)
    responses = torch.zeros(B, K, R, dtype=torch.int64)
    responses[row_S[of], branch_S[of], within] = place
    # The prompt's tokens are in a row's first P columns; the others there are a response's, or padding.
    source = torch.arange(width).clamp_max(P - 1) + P * torch.arange(B)[:, None]
    source.view(-1)[place] = B * P + ((row_S * K + branch_S)[of] * R + within)
    prompts = prompt_length_S[first_S]
    return Branches(
        prompt_width=P,
        responses=responses,
        prompt_lengths=prompts,
        place=source.flatten(),
        packed=_packed(prompts, row_S, input_S, place, width),
    )


def _packed(
    prompts_B: torch.Tensor, row_S: torch.Tensor, input_S: torch.Tensor, responses: torch.Tensor, width: int
) -> Packed:
    """Return rows of `width` tokens without padding.

    Args:
        prompts_B: [B] int64, lengths of the prompts, which are first in their rows.
        row_S: [S] int64, rows of the responses.
        input_S: [S] int64, their lengths.
        responses: int64, index of each response token among the B * width.
    """
    B = len(prompts_B)
    of_prompts = _spread(torch.arange(B) * width, prompts_B)[0]
    tokens, place = _places(torch.cat([of_prompts, responses]), B * width)
    in_rows = torch.zeros(B, dtype=torch.int64).index_add(0, row_S, input_S)
    return Packed(
        total=len(of_prompts) + len(responses),
        tokens=tokens,
        place=place,
        offsets=offsets_of(torch.cat([prompts_B, input_S])).int(),
        responses_of_rows=offsets_of(in_rows).int(),
        prompts=len(of_prompts),
        longest_prompt=int(prompts_B.max()),
        longest=max(int(prompts_B.max()), int(input_S.max())),
        most_in_row=int(in_rows.max()),
    )


def _row_sequences(begin_S: torch.Tensor, length_S: torch.Tensor, columns: int) -> Sequences:
    """Return the sequences side by side in rows of `columns` tokens in all, from their first tokens and lengths."""
    tokens = _spread(begin_S, length_S)[0]
    longest, total = int(length_S.max()), len(tokens)
    tokens, place = _places(tokens, columns)
    none = torch.zeros(1, dtype=torch.int32)
    packed = Packed(
        total=total,
        tokens=tokens,
        place=place,
        offsets=offsets_of(length_S).int(),
        responses_of_rows=none,
        prompts=total,
        longest_prompt=longest,
        longest=longest,
        most_in_row=0,
    )
    return Sequences(packed)


def _places(tokens: torch.Tensor, columns: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return `tokens` and `place` of a `Packed` whose rows have `columns` tokens in all."""
    order = torch.arange(len(tokens))
    if len(tokens) == columns and torch.equal(tokens, order):
        return None, None
    place = torch.zeros(columns, dtype=torch.int64)
    place[tokens] = order
    return tokens, place
