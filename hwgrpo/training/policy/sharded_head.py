"""What a policy asks of those who shard it (FSDP2, ZeRO-3): its head's weight whole while the head is at work.

Both gather a module's weights before its forward, and reduce their gradients after its backward, by hooks around
`forward`. The loss reads the LM head's weight without calling that forward, so it runs in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hwgrpo.errors import ConfigError

T = TypeVar("T")


def in_place_of_forward(module: nn.Module, function: Callable[[Tensor], T], hidden: Tensor) -> T:
    """Call a module with `function` as its forward, between the hooks that stand around its own.

    Args:
        module: whose weights `function` reads.
        function: of the module's input; returns tensors, or tuples and dicts of them, in which hooks look for what
            to wait for in backward.
        hidden: the module's input.
    """
    own = vars(module).get("forward")
    module.forward = function
    try:
        return module(hidden)
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def refuse_sharded(model: nn.Module) -> None:
    """Raise ConfigError for a model whose weights are in shards already, since its head must be read whole first."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise ConfigError(
                f"the model's {name} is sharded already (a DTensor); make the PolicyModel first, then shard that: "
                "fully_shard(layer) for its layers, then fully_shard(policy)"
            )
        if parameter.numel() == 0 and hasattr(parameter, "ds_shape"):
            raise ConfigError(
                f"the model's {name} is sharded already (by deepspeed.zero.Init); make the PolicyModel within "
                "deepspeed.zero.GatheredParameters(list(model.parameters()))"
            )


def refuse_rounded(signals: Mapping[str, Tensor]) -> None:
    """Raise ConfigError for 16-bit signals: FSDP2 casts a module's inputs, and ratios need old log-probs in fp32."""
    for name, signal in signals.items():
        if signal.dtype.itemsize == 2:
            raise ConfigError(
                f"{name} came as {signal.dtype}, but losses need it in fp32; where the PolicyModel is sharded by "
                "fully_shard, give it MixedPrecisionPolicy(..., cast_forward_inputs=False)"
            )


def refuse_sharded_inside(*modules: nn.Module) -> None:
    """Raise ConfigError where FSDP2 gathers weights before a forward that the policy never calls.

    Args:
        modules: what lies between the policy and the parts of it that it calls.
    """
    for module in modules:
        if isinstance(module, FSDPModule):
            raise ConfigError(
                f"fully_shard was applied to the {type(module).__name__} inside the policy, whose forward the policy "
                "does not call, so that its weights would stay in shards; apply it to the PolicyModel itself instead"
            )
