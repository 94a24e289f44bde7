"""`python -m hwgrpo_vllm --model MODEL ...`: start a vLLM server that a trainer can use; further arguments are vLLM's.

`vllm serve` would work too, but it does not start in the CPU distribution (0.32), and the middleware would check the
token only after the model is loaded.
"""

import os
import runpy
import sys

from .http_protocol import TOKEN_VARIABLE

ARGUMENTS = (
    *("--middleware", "hwgrpo_vllm.Guard", "--worker-extension-cls", "hwgrpo_vllm.WorkerExtension"),
    *("--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
)


def main() -> None:
    """Check the token and run the server."""
    if not os.environ.get(TOKEN_VARIABLE):
        sys.exit(f"hwgrpo: {TOKEN_VARIABLE} is empty: set it to a secret that the trainer has in the same variable")
    sys.argv[1:1] = ARGUMENTS  # before the user's, which override them
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":  # vLLM's own processes import this file again
    main()
