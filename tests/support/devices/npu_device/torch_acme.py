"""The torch plug-in of the fictional vendor Acme: `import torch_acme` gives torch its device."""

from __future__ import annotations

from torch_acme import device_module

acme, _device = device_module.install(
    "torch_acme", kind="acme", chip="Acme One", comm="acmecl", visible="ACME_VISIBLE_DEVICES"
)


def _autoload() -> None:
    """Called by `import torch`, which imports the modules of the entry-point group torch.backends."""
