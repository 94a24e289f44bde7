"""How far a loss looks along the rows, and sums over sequences stored one after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, Literal, ParamSpec, TypeVar

import torch

from hwgrpo.config.bound_arguments import bind_arguments
from hwgrpo.errors import ConfigError
from hwgrpo.registry import Registry
from hwgrpo.support.torch_settings import with_kept_torch_settings
from hwgrpo.user_code import names_a_file

Scope = Literal["token", "sequence", "batch"]
_ORDER: tuple[Scope, ...] = ("token", "sequence", "batch")

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Scoped(Generic[P, R]):
    """A function of rows that declares which rows it must see at once.

    `token`: any subset of rows; `sequence`: full sequences (it reads `cu_seqlens`); `batch`: all rows of a
    micro-batch, on whose size the result then depends.
    """

    function: Callable[P, R]
    scope: Scope
    reads: tuple[str, ...] | None = None
    """For a policy loss of the user's own: the settings of `algorithm.loss` that it reads, of which others are refused;
    None: all may be set. `hwgrpo.catalog` has those of the built-in losses."""
    selects: Callable[..., torch.Tensor] | None = None
    """For a policy loss that treats some tokens apart: selects them of all tokens of the update (`token_selection`)."""
    penalizes: bool = False
    """For a policy loss: whether it has a gradient where the advantage is 0, so that no sequence can be skipped."""
    on_policy: tuple[str, ...] = ()
    """For a built-in policy loss: its settings and arguments that have an effect where every ratio is 1, too."""
    weighs_sequences: bool = False
    """For a policy loss: whether a sequence has one importance weight, the geometric mean of those of its tokens."""
    needs_sequence_advantages: bool = False
    """For a policy loss: whether it is the loss of a sequence with one advantage, so that it refuses one per token."""

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)


def policy_loss(
    scope: Scope,
    *,
    reads: tuple[str, ...] | None = None,
    selects: Callable[..., torch.Tensor] | None = None,
    penalizes: bool = False,
    on_policy: tuple[str, ...] = (),
    weighs_sequences: bool = False,
    needs_sequence_advantages: bool = False,
) -> Callable[[Callable[P, R]], Scoped[P, R]]:
    """Return a decorator that declares the fields of `Scoped` of a policy loss.

    Example:
        >>> @policy_loss("token", reads=("clip_low", "clip_high"))
        ... def my_loss(x, config): ...
    """
    return lambda function: Scoped(
        function, scope, reads, selects, penalizes, on_policy, weighs_sequences, needs_sequence_advantages
    )


def scoped(
    scope: Scope, *, selects: Callable[..., torch.Tensor] | None = None, penalizes: bool = False
) -> Callable[[Callable[P, R]], Scoped[P, R]]:
    """Return a decorator that declares the scope of a function of rows; `policy_loss` can declare more of a loss."""
    return policy_loss(scope, selects=selects, penalizes=penalizes)


def load_scoped(
    registry: Registry, name: str, arguments: Mapping[str, Any], positional: int, key: str
) -> Scoped[..., Any]:
    """Return the function of rows that a setting names, with its keyword arguments.

    torch's settings are as before after each call of a function of the user's own, which is once per micro-batch or
    part of it; its derivative is torch's own and runs without this.

    Args:
        registry: of what there is.
        name: registered, or `path/to/file.py:function`.
        arguments: keyword arguments for a function of the user's own.
        positional: number of positional arguments besides them.
        key: the setting's section, for messages ("algorithm.loss").

    Raises:
        ConfigError: there is no such function, it does not declare its scope, or takes other arguments.
    """
    found = registry.load(name)
    if not isinstance(found, Scoped):
        raise ConfigError(
            f'{key}.name={name!r}: the function does not declare its scope; put @scoped("token") '
            "above it (from hwgrpo.algorithms.scope; token, sequence or batch)"
        )
    function = bind_arguments(found.function, arguments, positional, f"{key}.kwargs")
    selects = found.selects
    if names_a_file(name):
        what = f"{key}.name={name!r}"
        function = with_kept_torch_settings(function, what)
        selects = selects and with_kept_torch_settings(selects, what)
    return replace(found, function=function, selects=selects)


def widest(*scopes: Scope) -> Scope:
    """Return the scope that contains all of `scopes`."""
    return max(scopes, key=_ORDER.index)


def sequence_sum(values_N: torch.Tensor, cu_seqlens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum rows per sequence.

    Args:
        values_N: [N] one value per row.
        cu_seqlens: [S + 1] integers from 0 to N: sequence i owns rows `cu_seqlens[i]:cu_seqlens[i + 1]`. Empty
            sequences are legal.

    Returns:
        [S] sums (0 for an empty sequence), and [N] the sequence of each row, for spreading a per-sequence value back.
    """
    lengths_S = cu_seqlens.diff()
    # output_size spares the device a synchronisation.
    sequence_N = torch.repeat_interleave(lengths_S, output_size=values_N.numel())
    # index_add rather than segment_reduce: it exists on every device, and differences of a running sum lose digits.
    return values_N.new_zeros(lengths_S.numel()).index_add(0, sequence_N, values_N), sequence_N
