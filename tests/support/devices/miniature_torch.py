"""A fake torch: the calls of detection, with results from the devices.json next to it. See `fake_hosts.py`.

It becomes `torch/__init__.py` of a made-up host, since importing the real one takes seconds and sees this machine.
"""

import importlib.metadata
import json
import os
import types
from pathlib import Path

from torch import version

__version__ = version.__version__


class Devices:
    """The module of a kind of device, as `torch.cuda` is one."""

    def __init__(self, name: str = "", arch: str = "", count: int = 0, problem: str = "", built_for: tuple = ()):
        self.name, self.arch, self.count, self.problem, self.built_for = name, arch, count, problem, built_for

    def is_available(self) -> bool:
        if self.problem:
            raise RuntimeError(self.problem)
        return self.count > 0

    def device_count(self) -> int:
        return self.count

    def get_device_name(self, index: int) -> str:
        return self.name

    def get_arch_list(self) -> list[str]:
        return list(self.built_for or [self.arch])

    def get_device_properties(self, index: int) -> types.SimpleNamespace:
        digits = int(self.arch.removeprefix("sm_")) if self.arch.startswith("sm_") else 0
        return types.SimpleNamespace(gcnArchName=self.arch, major=digits // 10, minor=digits % 10)


class AttentionFlags:
    """What `torch.backends.cuda` has of the kernels of attention."""

    def __init__(self) -> None:
        self.cudnn = True
        self.flash_sdp_enabled = self.mem_efficient_sdp_enabled = self.math_sdp_enabled = lambda: True

    def enable_cudnn_sdp(self, enabled: bool) -> None:
        self.cudnn = enabled

    def cudnn_sdp_enabled(self) -> bool:
        return self.cudnn


backends = types.SimpleNamespace(cuda=AttentionFlags())

DEVICES = {
    kind: Devices(**says) for kind, says in json.loads(Path(__file__).with_name("devices.json").read_text()).items()
}


def get_device_module(kind: str) -> Devices:
    """Return the module of a kind of device; a plug-in may have put its own there."""
    if kind not in DEVICES:
        raise RuntimeError(f"no {kind}")
    return DEVICES[kind]


if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") == "1":
    for entry in importlib.metadata.entry_points(group="torch.backends"):
        try:
            entry.load()()
        except Exception as error:
            raise RuntimeError(f"Failed to load the backend extension: {entry.name}") from error
