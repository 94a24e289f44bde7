"""Mistakes of a device or its kernels that every startup check of a run passes, since all layouts have them alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hwgrpo.training.policy.policy_model import PolicyModel


def scaled_layer(patch: pytest.MonkeyPatch, device_type: str) -> None:
    """The first layer's MLP computes 1 % too much."""
    plain = PolicyModel._backbone

    def planted(self: PolicyModel, batch: Any, **options: Any) -> Any:
        mlp = self.base.model.layers[0].mlp
        hook = mlp.register_forward_hook(lambda module, inputs, output: output * 1.01)
        try:
            return plain(self, batch, **options)
        finally:
            hook.remove()

    patch.setattr(PolicyModel, "_backbone", _on(device_type, plain, planted))


def doubled_positions(patch: pytest.MonkeyPatch, device_type: str) -> None:
    """Tokens are twice as far from each other."""
    plain = PolicyModel._backbone

    def planted(self: PolicyModel, batch: Any, **options: Any) -> Any:
        return plain(self, replace(batch, position_ids=2 * batch.position_ids), **options)

    patch.setattr(PolicyModel, "_backbone", _on(device_type, plain, planted))


def no_temperature(patch: pytest.MonkeyPatch, device_type: str) -> None:
    """Logits are not divided by the temperature."""
    plain = PolicyModel._head_options

    def planted(self: PolicyModel, head: Any, batch: Any) -> dict[str, Any]:
        options = plain(self, head, batch)
        return options | {"temperature": 1.0} if batch.input_ids.device.type == device_type else options

    patch.setattr(PolicyModel, "_head_options", planted)


WRONG: dict[str, Callable[[pytest.MonkeyPatch, str], None]] = {
    "scaled layer": scaled_layer,
    "doubled positions": doubled_positions,
    "no temperature": no_temperature,
}
"""Name -> function that plants the mistake in all passes of a policy on a type of device."""


def _on(device_type: str, plain: Callable[..., Any], planted: Callable[..., Any]) -> Callable[..., Any]:
    def chosen(self: PolicyModel, batch: Any, **options: Any) -> Any:
        method = planted if batch.input_ids.device.type == device_type else plain
        return method(self, batch, **options)

    return chosen
