"""Weights on their way to a server: a folder of safetensors files per version, which appears whole or not at all."""

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
from hwgrpo.permissions import follow_umask

FILE_BYTES = 1 << 30
"""Bytes after which another file is begun: no more than that is held in host memory at a time."""


class WeightsFolder:
    """Keeps the newest version.

    Args:
        root: made where it is missing; several runs may share it.
        dtype: dtype that floating-point weights are written in.
        run: id of the run; what a start of it that was killed has left is removed.
        session: id of this start, which no other writes under.

    Raises:
        ConfigError: the folder cannot be made.
    """

    def __init__(self, root: Path, dtype: torch.dtype, run: str, session: str) -> None:
        self._shared, self._root = root, root / f"{run}-{session}"
        for left in root.glob(f"{run}-*"):
            shutil.rmtree(left, ignore_errors=True)
        try:
            self._root.mkdir(parents=True)
        except OSError as error:
            raise ConfigError(
                f"rollout.server.weights_dir={str(root)!r} cannot be written: {error.strerror}; name another folder "
                "that the server sees"
            ) from error
        self._dtype = dtype

    def write(self, version: int, weights: Iterable[tuple[str, torch.Tensor]]) -> Path:
        """Write a version, run through `weights` to the end, and return its folder.

        Raises:
            RunError: there is no room, or no right to write.
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
            for _ in remaining:  # other ranks take part in making what is left
                pass
            raise RunError(
                f"weights for the rollout server cannot be written to {self._root}: {error}; make room there, or name "
                "another folder that the server sees (rollout.server.weights_dir)"
            ) from error
        return final

    def folder(self, version: int) -> Path:
        """Return the folder of a version."""
        return self._root / f"version-{version:08d}"

    def clear(self, version: int) -> None:
        """Remove a version, which is sent again."""
        shutil.rmtree(self.folder(version), ignore_errors=True)

    def keep_only(self, version: int) -> None:
        """Remove all other versions."""
        for folder in self._root.glob("*version-*"):
            if folder != self.folder(version):
                shutil.rmtree(folder)

    def remove(self) -> None:
        """Remove what was written, and the root where nothing else is in it."""
        shutil.rmtree(self._root, ignore_errors=True)
        with contextlib.suppress(OSError):  # another run's weights are in it
            self._shared.rmdir()

    def _write_files(self, folder: Path, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        held: dict[str, torch.Tensor] = {}
        size = number = 0
        for name, tensor in weights:
            dtype = self._dtype if tensor.is_floating_point() else tensor.dtype
            # a copy: what is yielded may live only until the next one is asked for
            held[name] = tensor.detach().to("cpu", dtype, copy=True).contiguous()
            size += held[name].nbytes
            if size >= FILE_BYTES:
                _save(held, folder / f"{number:05d}.safetensors")
                held, size, number = {}, 0, number + 1
        if held:
            _save(held, folder / f"{number:05d}.safetensors")


def _save(tensors: dict[str, torch.Tensor], path: Path) -> None:
    save_file(tensors, path)
    follow_umask(path)  # the server may run as another user
