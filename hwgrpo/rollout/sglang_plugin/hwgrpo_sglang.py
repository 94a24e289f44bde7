"""Start SGLang's server with its key in no command line, and end it when the run that started it is gone.

Runs in the environment that has SGLang; its arguments are those of `python -m sglang.launch_server`.
"""

import os
import runpy
import signal
import sys
import threading

TOKEN_VARIABLE = "HWGRPO_SERVER_TOKEN"
"""Environment variable with the key that requests must bring."""


def _end_with_standard_input() -> None:
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":  # SGLang's own processes import this file again
    sys.argv[1:1] = ["--api-key", os.environ.pop(TOKEN_VARIABLE)]
    threading.Thread(target=_end_with_standard_input, daemon=True).start()
    runpy.run_module("sglang.launch_server", run_name="__main__")
