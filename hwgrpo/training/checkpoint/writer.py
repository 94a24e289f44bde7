"""Writes one checkpoint: a rank's files, and on rank 0 the manifest and the final rename. Has no collectives."""

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
from hwgrpo.support.file_systems import sync_folder
from hwgrpo.support.waits import LONG_WORK, STUCK_AFTER, Wait, join_thread
from hwgrpo.training.checkpoint import checkpoint_files, shard_files
from hwgrpo.training.checkpoint.shard_files import Table

_POLL_S = 0.02
"""Seconds between two checks for the files of other ranks."""


class CheckpointWriter:
    """Writes this rank's files, in a thread or in the caller's, and on rank 0 completes the checkpoint.

    Args:
        root: folder of the run's checkpoints.
        manifest: the manifest without the entries of the ranks' files.
        own: file name -> tensors of this rank's files.
        table: table of this rank's shards.
        rank: this process's rank.
        keep: number of checkpoints to keep.
        timeout: seconds to wait for the other ranks' files.
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
        """Set when this rank has written its files, or failed to."""
        self._root = root
        self._partial = checkpoint_files.partial_of(root, self.step)
        self._manifest = manifest
        self._own = own
        self._table = table
        self._rank = rank
        self._keep = keep
        self._timeout = timeout
        self._given_up = threading.Event()
        # A daemon thread: the interpreter can exit while a disk hangs.
        self._thread = threading.Thread(target=self._run, name=f"checkpoint-{self.step}", daemon=True)
        self._in_background = False

    @property
    def done(self) -> bool:
        """Whether this rank's work is finished."""
        return not self._thread.is_alive()

    def begin(self) -> None:
        """Do this rank's work in a thread."""
        self._in_background = True
        self._thread.start()

    def write(self) -> None:
        """Write this rank's files and mark them as written; store a failure in `error`."""
        try:
            written = {
                name: checkpoint_files.write_tensors(self._partial / name, tensors)
                for name, tensors in self._own.items()
            }
            share = {"files": written, "table": self._table}
            checkpoint_files.write_text(self._partial / checkpoint_files.share_file(self._rank), json.dumps(share))
        except Exception as error:
            self.error = error  # the main thread raises it
        finally:
            self._own = {}  # frees the copies
            self.written.set()

    def complete(self) -> None:
        """Wait until rank 0 has renamed the complete checkpoint, or has set `error`."""
        if self._in_background:
            join_thread(self._thread, f"checkpoint {self.step}", self._timeout)
        elif self._rank == 0:
            self._finalize()

    def give_up(self) -> None:
        """Stop waiting for other ranks."""
        self._given_up.set()
        if self._in_background:
            join_thread(self._thread, f"checkpoint {self.step}", self._timeout)

    def give_time(self, seconds: float) -> None:
        """Wait up to `seconds` for the checkpoint to complete; on rank 0, remove one that failed."""
        self._thread.join(seconds)
        if self.done and self.error is not None and self._rank == 0:
            shutil.rmtree(self._partial, ignore_errors=True)

    def _run(self) -> None:
        self.write()
        if self._rank == 0 and self.error is None:
            self._finalize()

    def _finalize(self) -> None:
        """Wait for all ranks' files, write the manifest, rename the folder, and remove the oldest checkpoints."""
        ranks = range(self._manifest["world_size"])
        shares = [self._partial / checkpoint_files.share_file(rank) for rank in ranks]
        try:
            wait = Wait(f"the other ranks' files of checkpoint {self.step}", self._timeout, first_report=LONG_WORK)
            while not all(share.exists() for share in shares):
                if wait.over:
                    raise RunError(f"the other ranks' files were not written within {self._timeout:g} s")
                wait.report()
                if self._given_up.wait(_POLL_S):
                    return
            contents = [json.loads(share.read_text(encoding="utf-8")) for share in shares]
            parameters = shard_files.merge_tables([content["table"] for content in contents])
            files = {name: entry for content in contents for name, entry in content["files"].items()}
            text = json.dumps({**self._manifest, "parameters": parameters, "files": files}, indent=1)
            checkpoint_files.write_text(self._partial / checkpoint_files.MANIFEST, text)
            checkpoint_files.write_text(
                self._partial / checkpoint_files.CHECKSUM, checkpoint_files.checksum_line(text.encode())
            )
            for share in shares:
                share.unlink()
            sync_folder(self._partial)
            os.replace(self._partial, checkpoint_files.folder_of(self._root, self.step))
            sync_folder(self._root)
            for step, _ in checkpoint_files.folders(self._root)[: -self._keep]:
                checkpoint_files.remove(self._root, step)
        except Exception as error:
            self.error = error  # the main thread raises it
