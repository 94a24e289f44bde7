"""Whether this machine has a device that the Triton kernels run on.

Run as a program it prints why there is none and exits with 0, or exits with 1 where there is one.
"""

import sys

from hwgrpo_backends import choose


def missing() -> str | None:
    """Return why there is no such device here, or None where there is one.

    Raises:
        BackendError: one is here and cannot be used.
    """
    choice = choose()
    if choice.backend.device_type == "cuda":  # hw: the type that the Triton kernels are registered for
        return None
    families = ("cuda", "rocm")  # hw: NVIDIA's and AMD's
    return "; ".join(f"{name}: {choice.decision.verdicts[name].reason}" for name in families)


if __name__ == "__main__":
    reason = missing()
    if reason is None:
        sys.exit(1)
    print(reason)
