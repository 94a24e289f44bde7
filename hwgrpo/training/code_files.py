"""The user's Python files that a run calls: copied into its folder, and compared by checksum on resume."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from hwgrpo.config import Config
from hwgrpo.paths import verifier_of
from hwgrpo.user_code import split_name

FOLDER = "code"
"""A run's folder with the copies, whose names contain their checksums."""


def code_files(config: Config) -> dict[str, Path]:
    """Return setting -> file, for the settings that name a function in a file."""
    algorithm = config.algorithm
    names = {
        **{f"reward.functions.{i}.name": function.name for i, function in enumerate(config.reward.functions)},
        **{
            f"reward.functions.{i}.kwargs.verifier": verifier_of(function) or ""
            for i, function in enumerate(config.reward.functions)
        },
        "algorithm.advantage.name": algorithm.advantage.name,
        "algorithm.loss.name": algorithm.loss.name,
        "algorithm.kl.estimator": algorithm.kl.estimator,
        "algorithm.correction.name": algorithm.correction.name,
        "algorithm.process.function": algorithm.process.function or "",
        "rollout.source": config.rollout.source,
        **{f"observe.loggers.{i}": name for i, name in enumerate(config.observe.loggers)},
        **{f"observe.metrics.{i}": name for i, name in enumerate(config.observe.metrics)},
        **{f"plugins.{i}": name for i, name in enumerate(config.plugins)},
    }
    files = {key: split_name(name)[0] for key, name in names.items()}
    return {key: Path(file).expanduser() for key, file in files.items() if file is not None}


def checksums(config: Config) -> dict[str, str]:
    """Return setting -> SHA-256 of its file; missing files are skipped."""
    return {key: _checksum(file) for key, file in code_files(config).items() if file.is_file()}


def keep_copies(config: Config, run_dir: Path) -> None:
    """Copy the files into a run's folder; copies from earlier starts stay."""
    for file in set(code_files(config).values()):
        folder = run_dir / FOLDER
        folder.mkdir(exist_ok=True)
        shutil.copyfile(file, folder / f"{_checksum(file)[:12]}-{file.name}")


def _checksum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
