"""The tokens of an update over all ranks, for selections that compare them with each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from hwgrpo.algorithms.token_selection import UpdateTokens
from hwgrpo.training.strategies.strategy import Strategy
from hwgrpo.values import TrainBatch


def select_tokens(
    selections: Mapping[str, Callable[[UpdateTokens], torch.Tensor]],
    batch: TrainBatch,
    sequences: Sequence[int],
    scored: tuple[torch.Tensor, torch.Tensor],
    strategy: Strategy,
    seed: int,
) -> dict[str, torch.Tensor]:
    """Return what each selection gives this rank's tokens: [R] fp32, 1 where selected; 0 outside of the update.

    Args:
        selections: name -> function of all tokens of the update.
        batch: this rank's sequences.
        sequences: indices of those of the update.
        scored: log-probs and entropies [R] of the policy before the update.
        strategy: reaches the other ranks.
        seed: of selections by chance; the same on all ranks.
    """
    chosen = torch.zeros(len(batch), dtype=torch.bool)
    chosen[torch.tensor(list(sequences), dtype=torch.int64)] = True
    mine_R = batch.loss_tokens_of(chosen)
    logprob_R, entropy_R = scored
    old_R = logprob_R if batch.old_logprobs is None else batch.old_logprobs
    if batch.rollout_shares is not None:
        old_R = logprob_R.lerp(batch.rollout_logprobs, batch.rollout_shares)
    own = [values[mine_R] for values in (logprob_R, old_R, batch.rollout_logprobs, entropy_R, batch.advantages_R)]
    ranks = strategy.gather_objects([*own, batch.loss_lengths[chosen]])
    new_R, old_R, rollout_R, entropy_R, advantage_R, lengths_S = map(torch.cat, zip(*ranks, strict=True))
    order_R = torch.randperm(len(new_R), generator=torch.Generator().manual_seed(seed))
    tokens = UpdateTokens(new_R, old_R, rollout_R, entropy_R, advantage_R, order_R, lengths_S)
    first = sum(len(parts[0]) for parts in ranks[: strategy.rank])
    found = {}
    for name, select in selections.items():
        found[name] = torch.zeros(len(batch.tokens))
        found[name][mine_R] = select(tokens)[first : first + int(mine_R.sum())].float()
    return found
