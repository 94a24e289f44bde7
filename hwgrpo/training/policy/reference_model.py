"""The reference model of the KL term: a frozen copy, or the policy itself with its adapters off."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from hwgrpo.config.schema import KlConfig, LoraConfig
from hwgrpo.models.frozen_dtype import cast_frozen, prepare_base
from hwgrpo.models.lora import REFERENCE_ADAPTER, reference_name, uses_lora
from hwgrpo.models.meta_device import copy_to_meta
from hwgrpo.training.policy.policy_model import PolicyModel


@dataclass
class Reference:
    """The reference model of the KL term.

    `copy`: `policy` is a separate frozen model. `adapters_off`: a new adapter starts at zero, so the base model is the
    reference. `frozen_adapter`: training continues an existing adapter, or the reference follows the policy, so a
    frozen copy of the adapter is the reference, not the base model.
    """

    policy: PolicyModel
    kind: Literal["copy", "adapters_off", "frozen_adapter"]
    moved: Mapping[str, str] = field(default_factory=dict)
    """Name of each trained parameter -> that of the reference's, which can follow it (`algorithm.kl.sync_every`)."""

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make `policy` behave as the reference within the block."""
        if self.kind == "copy":
            yield
            return
        model = self.policy.model
        trained = [(parameter, parameter.requires_grad) for parameter in self.policy.parameters()]
        with model.disable_adapter() if self.kind == "adapters_off" else _frozen_adapter(model):
            # peft freezes the trained ones, but FSDP2 reads the dtype of gradients from them in the first forward, and
            # whether weights are trained when it gathers them, which it may do once per update
            for parameter, has_gradient in trained:
                parameter.requires_grad_(has_gradient)
            yield


@contextmanager
def _frozen_adapter(model: Any) -> Iterator[None]:
    trained = model.active_adapter
    model.set_adapter(REFERENCE_ADAPTER)
    try:
        yield
    finally:
        model.set_adapter(trained)  # also makes this adapter alone trainable again


def build_reference(
    policy: PolicyModel, kl: KlConfig, lora: LoraConfig, *, on_meta_device: bool = False
) -> Reference | None:
    """Return the reference model, or None where no KL term needs one.

    Args:
        policy: the policy before its first update, not wrapped by a strategy.
        kl: whether there is a KL term, and whether its reference follows the policy.
        lora: the policy's adapters.
        on_meta_device: make a copy without weights; the strategy materializes it with the policy's initial ones.
    """
    if kl.coef == 0:
        return None
    trained = [name for name, parameter in policy.model.named_parameters() if parameter.requires_grad]
    if not uses_lora(lora):
        frozen = (copy_to_meta(policy) if on_meta_device else copy.deepcopy(policy)).eval().requires_grad_(False)
        if not on_meta_device and not kl.sync_every:  # small moves are lost in 16 bits
            cast_frozen(prepare_base(frozen.base), frozen.compute_dtype, round_values=False)
        return Reference(frozen, "copy", {name: name for name in trained})
    if lora.adapter or kl.sync_every:
        return Reference(policy, "frozen_adapter", {name: reference_name(name) for name in trained})
    return Reference(policy, "adapters_off")
