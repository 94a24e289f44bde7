"""Weights on their way to a server: a folder of safetensors files per version, which appears whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from hwgrpo.errors import RunError
from hwgrpo.permissions import follow_umask

FILE_BYTES = 1 << 30
"""Bytes after which another file is begun: no more than that is held in host memory at a time."""


class WeightsFolder:
    """Keeps the newest version.

    Args:
        root: made where it is missing.
        dtype: dtype that floating-point weights are written in.
    """

    def __init__(self, root: Path, dtype: torch.dtype) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self._root = root
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
        for folder in self._root.glob("*version-*"):
            shutil.rmtree(folder)
        if not any(self._root.iterdir()):
            self._root.rmdir()

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
