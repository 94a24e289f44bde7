"""Hosts made of files for programs run in a process of their own: a system root, and packages that stand for torch's.

`hosts.py` makes up facts; here the facts are gathered, from `root` and from `site`, by the code that users run.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.processes.launch import ROOT

MINIATURE = Path(__file__).with_name("miniature_torch.py")
PLUGIN = "import torch\n{body}\ndef _autoload(): ...\n"


@dataclass
class FakeHost:
    """A host under `folder`: `root` is where its /dev, /proc and /etc lie, `site` where its packages do."""

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.root, self.site = self.folder / "root", self.folder / "site"
        self.first = self.folder / "first"
        self.root.mkdir()
        self.site.mkdir()

    @property
    def path(self) -> list[str]:
        """Where Python looks for this host's modules, in this order."""
        return [str(self.first), str(self.site)]

    def file(self, path: str, text: str = "") -> "FakeHost":
        """Put a file below the root."""
        there = self.root / path.lstrip("/")
        there.parent.mkdir(parents=True, exist_ok=True)
        there.write_text(text)
        return self

    def nodes(self, *names: str) -> "FakeHost":
        """Put device nodes under /dev."""
        for name in names:
            self.file(f"dev/{name}")
        return self

    def nvidia_driver(self, version: str) -> "FakeHost":
        """Let the kernel module of NVIDIA's driver be loaded."""
        return self.file(
            "proc/driver/nvidia/version", f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Tue Sep 23\n"
        )

    def distribution(self, name: str, version: str, entry_points: str = "") -> "FakeHost":
        """Let a package be installed, as far as its record goes."""
        info = self.site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "entry_points.txt").write_text(entry_points)
        return self

    def torch(
        self, build: tuple[str, str] | None = None, seen: Mapping[str, object] | None = None, text: str | None = None
    ) -> "FakeHost":
        """Let torch 2.13.0 be installed.

        Args:
            build: ("cuda" or "hip", its version); None for a CPU build.
            seen: device type -> arguments of `miniature_torch.Devices`.
            text: of its __init__.py, where it is not to be the one in miniature.
        """
        package = self.site / "torch"
        package.mkdir()
        kind, version = build or ("cuda", None)
        says = f"__version__ = '2.13.0{'' if build else '+cpu'}'\ncuda = hip = None\n{kind} = {version!r}\n"
        (package / "version.py").write_text(says)
        (package / "devices.json").write_text(json.dumps(seen or {}))
        (package / "__init__.py").write_text(MINIATURE.read_text() if text is None else text)
        return self

    def module(self, path: str, text: str = "") -> "FakeHost":
        """Put a file where Python looks for modules before it looks where they are installed."""
        file = self.first / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return self

    def torch_npu(self, body: str = "", version: str = "2.13.0") -> "FakeHost":
        """Let torch-npu be installed; `body` is what it does when it is imported."""
        self.distribution("torch-npu", version, "[torch.backends]\ntorch_npu = torch_npu:_autoload\n")
        (self.site / "torch_npu.py").write_text(PLUGIN.format(body=body))
        return self

    def run(self, code: str, *arguments: str, wrap: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        """Run Python code that has this host's `root` in FAKE_ROOT and its packages on the path."""
        folders = [*self.path, *(ROOT / part for part in (".", "backends", "kernels"))]
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("HWGRPO_", "ASCEND_", "TORCH_DEVICE"))}
        clean = {k: v for k, v in clean.items() if not k.endswith("VISIBLE_DEVICES")}
        environ = clean | {"PYTHONPATH": os.pathsep.join(map(str, folders)), "FAKE_ROOT": str(self.root)}
        command = [*wrap, sys.executable, "-c", code, *arguments]
        return subprocess.run(command, env=environ | self.variables, capture_output=True, text=True, check=False)
