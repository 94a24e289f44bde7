"""Checks that a policy is sharded in a way in which its passes have full weights, and losses their inputs in fp32."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hwgrpo.errors import ConfigError


def refuse_sharded(model: nn.Module) -> None:
    """Raise ConfigError for a model with sharded weights, since detecting its head needs the full ones."""
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
        modules: modules between the policy and the submodules that it calls.
    """
    for module in modules:
        if isinstance(module, FSDPModule):
            raise ConfigError(
                f"fully_shard was applied to the {type(module).__name__} inside the policy, whose forward the policy "
                "does not call, so that its weights would stay in shards; apply it to the PolicyModel itself instead"
            )
