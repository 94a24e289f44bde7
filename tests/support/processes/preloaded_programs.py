"""Programs for shell scripts of tests, without the seconds that imports of torch and the project cost each time.

A program asks this process for a run, which is forked from one that has imported them: see `preloaded`.
"""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.processes import preloaded

PROGRAM = """\
#!{python} -IS
import json, os, socket, sys

connection = socket.socket(socket.AF_UNIX)
connection.connect({address!r})
asked = {{"words": [*{words!r}, *sys.argv[1:]], "env": dict(os.environ), "cwd": os.getcwd()}}
connection.sendall(json.dumps(asked).encode() + b"\\n")
code, out, err = json.loads(connection.makefile().readline())
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(code if code >= 0 else 128 - code)
"""


HWGRPO = {"hwgrpo": ("-m", "hwgrpo")}
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
"""Ranks of these arguments are forked, too; `python` with others of torchrun starts it."""


@contextmanager
def programs(folder: Path, words: Mapping[str, Sequence[str]] = HWGRPO) -> Iterator[None]:
    """Provide programs, in a folder for a script's PATH, as long as the block lasts.

    They have the script's variables and folder, read nothing, and print all at their end.

    Args:
        folder: for the programs; it exists.
        words: what follows `python`, before the arguments, by a program's name; see `preloaded.run`.
    """
    address = folder / "socket"

    class Run(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            asked = json.loads(self.rfile.readline())
            ranks, words = 0, asked["words"]
            if words[: len(TORCHRUN)] == TORCHRUN:
                ranks, *words = words[len(TORCHRUN) :]
            done = preloaded.run(int(ranks), *words, env=asked["env"], cwd=Path(asked["cwd"]))
            self.wfile.write(json.dumps((done.returncode, done.stdout, done.stderr)).encode() + b"\n")

    for name, first in words.items():
        (folder / name).write_text(PROGRAM.format(python=preloaded.PYTHON, address=str(address), words=[*first]))
        (folder / name).chmod(0o755)
    with socketserver.UnixStreamServer(str(address), Run) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()
