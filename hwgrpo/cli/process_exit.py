"""How the process of a rank ends."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ended_as_rank() -> Iterator[None]:
    """End the process, where torchrun started it, before Python takes itself apart; what is done within is all it does.

    Threads of a process group live as long as anything holds the group: caches of torch hold those of FSDP2's mesh,
    and DeepSpeed keeps its own. When the interpreter ends before such a thread, the thread aborts the process now and
    then ("terminate called without an active exception"), and torchrun takes a run that is done for one that failed.

    Enter it before anything else registers with `atexit`: this comes after all that has.
    """
    code: list[int] = []

    def leave() -> None:
        if code and "RANK" in os.environ:
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
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
