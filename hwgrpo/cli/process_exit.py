"""Exit of a rank's process."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ended_as_rank() -> Iterator[None]:
    """Exit a process started by torchrun without the interpreter's shutdown, after the body.

    Threads of a process group live as long as the group is referenced: caches of torch reference those of FSDP2's mesh,
    and DeepSpeed keeps its own. When the interpreter ends before such a thread, the thread sometimes aborts the process
    ("terminate called without an active exception"), and torchrun reports a finished run as failed.

    Enter it before anything else registers with `atexit`: it then runs after all other handlers.
    """
    code: list[int] = []

    def leave() -> None:
        if code and "RANK" in os.environ:
            for flush in (logging.shutdown, sys.stdout.flush, sys.stderr.flush):
                with contextlib.suppress(OSError):  # a full disk
                    flush()
            os._exit(code[0])

    atexit.register(leave)
    try:
        yield
    except SystemExit as ending:
        code.append(ending.code if isinstance(ending.code, int) else int(ending.code is not None))
        raise
    except Exception:
        code.append(1)
        raise
    code.append(0)
