"""Environments with a vLLM made of files: what it says when it is imported is made up, that it is asked is not."""

import sys
from pathlib import Path

INIT = """
__version__ = {version!r}
{body}
def __getattr__(name):
    if name != "LLM":
        raise AttributeError(name)
    {engine}
"""
PLATFORMS = """
import sys, types
sys.modules["torch"] = types.SimpleNamespace(version=types.SimpleNamespace(hip={hip!r}))
class current_platform:
    device_type = {device!r}
"""


def install(
    site: Path,
    version: str | None = "0.33.0",
    device: str = "cuda",
    *,
    hip: str | None = None,
    body: str = "",
    engine: str = "return object",
    record: str | None = "",
    distribution: str = "vllm",
) -> Path:
    """Put a vLLM into a folder of packages, and return the folder.

    Args:
        version: what it says of itself; None: it is not there, its record alone.
        device: the device type of its platform; empty: it finds none.
        hip: version of HIP that its torch is built with.
        body: further code of its __init__.py.
        engine: what it does when its engine is imported.
        record: version of its record, if another one than its own; None: it has no record.
        distribution: its name on an index.
    """
    site.mkdir(parents=True, exist_ok=True)
    if version is not None:
        (site / "vllm").mkdir()
        (site / "vllm/__init__.py").write_text(INIT.format(version=version, body=body, engine=engine))
        (site / "vllm/platforms.py").write_text(PLATFORMS.format(device=device, hip=hip))
    if record is not None:
        info = site / f"{distribution.replace('-', '_')}-{record or version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {record or version}\n")
    return site


def environment(folder: Path, name: str = ".venv-vllm", program: str | None = None) -> Path:
    """Make a virtual environment without packages, and return its folder of packages.

    Args:
        program: what stands for its Python; None: this one, which looks there only.
    """
    site = folder / name / "lib/python3.12/site-packages"
    site.mkdir(parents=True)
    python = folder / name / "bin/python"
    python.parent.mkdir()
    run = f'PYTHONPATH="{site}" exec "{sys.executable}" -S "$@"'
    python.write_text(f"#!/bin/sh\n{program or run}\n")
    python.chmod(0o755)
    return site
