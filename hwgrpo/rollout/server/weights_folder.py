"""Weights for a server: a folder of safetensors files per version, with checksums, written atomically."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from hwgrpo.errors import ConfigError, RunError
from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm import named_digests
from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm.checksum import ChecksumError
from hwgrpo.rollout.vllm_plugin.hwgrpo_vllm.worker import check_files
from hwgrpo.support.permissions import follow_umask

FILE_BYTES = 1 << 30
"""Bytes after which a new file is started: the limit on host memory in use at a time."""


class DamagedWeights(RunError):
    """The files of a version are not as they were written; a server would refuse them each time."""


class WeightsFolder:
    """Folder with the newest version of the weights.

    Args:
        root: created if missing; several runs may share it.
        dtype: dtype in which floating-point weights are written.
        run: id of the run; files of an earlier, killed start of it are removed.
        session: id of this start; unique.

    Raises:
        ConfigError: the folder cannot be created.
    """

    def __init__(self, root: Path, dtype: torch.dtype, run: str, session: str) -> None:
        self._shared, self._root = root, root / f"{run}-{session}"
        for stale in root.glob(f"{run}-*"):
            shutil.rmtree(stale, ignore_errors=True)
        try:
            self._root.mkdir(parents=True)
        except OSError as error:
            raise ConfigError(
                f"rollout.server.weights_dir={str(root)!r} cannot be written: {error.strerror}; name another folder "
                "that the server sees"
            ) from error
        self._dtype = dtype

    def write(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> Path:
        """Write a version, exhausting `weights`, and return its folder.

        Raises:
            RunError: there is no space, or no permission to write.
        """
        final = self.folder(version)
        partial = final.with_name(f".{final.name}.partial")
        remaining = iter(weights)
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            self._write_files(partial, remaining)
            shutil.rmtree(final, ignore_errors=True)  # a version that is sent again
            os.replace(partial, final)
        except (OSError, SafetensorError) as error:
            for _ in remaining:  # other ranks take part in gathering the rest
                pass
            raise RunError(
                f"weights for the rollout server cannot be written to {self._root}: {error}; free space there, or name "
                "another folder that the server sees (rollout.server.weights_dir)"
            ) from error
        return final

    def folder(self, version: int) -> Path:
        """Return the folder of a version."""
        return self._root / f"version-{version:08d}"

    def check(self, version: int) -> None:
        """Check the files of a version.

        Raises:
            DamagedWeights: a file is not as it was written.
        """
        try:
            check_files(str(self.folder(version)))
        except (ChecksumError, SafetensorError, OSError) as error:
            raise DamagedWeights(
                f"weights {version} cannot be sent: their files in {self.folder(version)} have changed since they were "
                f"written: {error}; test the memory or disk that holds them, and start the run again: it resumes from "
                "its newest checkpoint"
            ) from error

    def clear(self, version: int) -> None:
        """Remove a version before it is written again."""
        shutil.rmtree(self.folder(version), ignore_errors=True)

    def keep_only(self, version: int) -> None:
        """Remove all other versions."""
        for folder in self._root.glob("*version-*"):
            if folder != self.folder(version):
                shutil.rmtree(folder)

    def remove(self) -> None:
        """Remove all versions, and the root folder if it is empty."""
        shutil.rmtree(self._root, ignore_errors=True)
        with contextlib.suppress(OSError):  # another run's weights are in it
            self._shared.rmdir()

    def _write_files(self, folder: Path, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        tensors: dict[str, torch.Tensor] = {}
        size = number = 0
        for name, tensor in weights:
            dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
            # a copy: a yielded tensor may be valid only until the next one is requested
            tensors[name] = tensor.detach().to("cpu", dtype, copy=True).contiguous()
            size += tensors[name].nbytes
            if size >= FILE_BYTES:
                _save(tensors, folder / f"{number:05d}.safetensors")
                tensors, size, number = {}, 0, number + 1
        if tensors:
            _save(tensors, folder / f"{number:05d}.safetensors")


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    save_file(tensors, path, named_digests(tensors))
    follow_umask(path)  # the server may run as another user
