"""One checkpoint under way: its files, and what makes it whole. Nothing here is a collective."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hwgrpo.errors import RunError
from hwgrpo.training.checkpoint import checkpoint_files, shard_files
from hwgrpo.training.checkpoint.shard_files import Table
from hwgrpo.waits import LONG_WORK, STUCK_AFTER, Wait, join

_LOOK_S = 0.02
"""Between two looks for the shares of other ranks."""


class CheckpointWriter:
    """What this rank writes of a checkpoint, in a thread or as it is called, and, on rank 0, what makes it whole.

    Args:
        root: folder of the run's checkpoints.
        manifest: without what is known when all ranks have written.
        own: this rank's files by name, each with its tensors.
        table: where this rank's shards lie.
        rank: this one.
        keep: how many checkpoints stay.
    """

    def __init__(
        self,
        root: Path,
        manifest: dict[str, Any],
        own: Mapping[str, Mapping[str, torch.Tensor]],
        table: Table,
        rank: int,
        *,
        keep: int,
        timeout: float = STUCK_AFTER,
    ) -> None:
        self.step: int = manifest["step"]
        self.error: Exception | None = None
        self.written = threading.Event()
        """This rank has written its share, or failed to."""
        self._root = root
        self._partial = checkpoint_files.partial_of(root, self.step)
        self._manifest = manifest
        self._own = own
        self._table = table
        self._rank = rank
        self._keep = keep
        self._timeout = timeout
        self._given_up = threading.Event()
        # A daemon: an interpreter that ends does not wait for a disk that has hung.
        self._thread = threading.Thread(target=self._run, name=f"checkpoint-{self.step}", daemon=True)
        self._in_background = False

    @property
    def done(self) -> bool:
        """Whether this rank's part in it has come to its end."""
        return not self._thread.is_alive()

    def begin(self) -> None:
        """Do this rank's part in a thread."""
        self._in_background = True
        self._thread.start()

    def write(self) -> None:
        """Write this rank's files, then say so; what goes wrong is in `error`."""
        try:
            written = {
                name: checkpoint_files.write_tensors(self._partial / name, tensors)
                for name, tensors in self._own.items()
            }
            share = {"files": written, "table": self._table}
            checkpoint_files.write_text(self._partial / checkpoint_files.share_file(self._rank), json.dumps(share))
        except Exception as error:
            self.error = error  # the main thread tells it
        finally:
            self._own = {}  # the copies' memory
            self.written.set()

    def complete(self) -> None:
        """Return when the checkpoint has its name, or `error` says why not; only rank 0 has something to do there."""
        if self._in_background:
            join(self._thread, f"checkpoint {self.step}", self._timeout)
        elif self._rank == 0:
            self._give_name()

    def give_up(self) -> None:
        """Stop waiting for other ranks."""
        self._given_up.set()
        if self._in_background:
            join(self._thread, f"checkpoint {self.step}", self._timeout)

    def give_time(self, seconds: float) -> None:
        """Wait for the checkpoint to get whole, for so long; remove on rank 0 what cannot become one any more."""
        self._thread.join(seconds)
        if self.done and self.error is not None and self._rank == 0:
            shutil.rmtree(self._partial, ignore_errors=True)

    def _run(self) -> None:
        self.write()
        if self._rank == 0 and self.error is None:
            self._give_name()

    def _give_name(self) -> None:
        """Wait for the shares of all ranks, join them into the manifest, rename, and drop the oldest checkpoints."""
        ranks = range(self._manifest["world_size"])
        shares = [self._partial / checkpoint_files.share_file(rank) for rank in ranks]
        try:
            wait = Wait(f"the other ranks' files of checkpoint {self.step}", self._timeout, first_report=LONG_WORK)
            while not all(share.exists() for share in shares):
                if wait.over:
                    raise RunError(f"the other ranks' files were not written within {self._timeout:g} s")
                wait.report()
                if self._given_up.wait(_LOOK_S):
                    return
            said = [json.loads(share.read_text(encoding="utf-8")) for share in shares]
            parameters = shard_files.merged([each["table"] for each in said])
            named = {name: entry for each in said for name, entry in each["files"].items()}
            text = json.dumps({**self._manifest, "parameters": parameters, "files": named}, indent=1)
            checkpoint_files.write_text(self._partial / checkpoint_files.MANIFEST, text)
            checkpoint_files.write_text(
                self._partial / checkpoint_files.CHECKSUM, checkpoint_files.checksum_line(text.encode())
            )
            for share in shares:
                share.unlink()
            checkpoint_files.sync_folder(self._partial)
            os.replace(self._partial, checkpoint_files.folder_of(self._root, self.step))
            checkpoint_files.sync_folder(self._root)
            for step, _ in checkpoint_files.folders(self._root)[: -self._keep]:
                checkpoint_files.remove(self._root, step)
        except Exception as error:
            self.error = error  # the main thread tells it
