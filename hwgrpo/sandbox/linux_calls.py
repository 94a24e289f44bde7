"""System calls of Linux that Python has no function for."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from typing import Any

CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND = 1, 2, 4, 8, 32, 4096
MS_REC, MS_PRIVATE = 16384, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_CAPBSET_DROP = 1, 4, 8, 24
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 22, 38, 47
SECCOMP_MODE_FILTER = 2
PR_CAP_AMBIENT_CLEAR_ALL = 4
CAP_DAC_READ_SEARCH = 2
MOUNT_SETATTR = 442
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
CAPSET = {"x86_64": 126, "aarch64": 91}
CAPABILITY_VERSION = 0x20080522


@functools.cache
def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def system_call(number: int, what: str, *arguments: Any) -> int:
    """Make a system call by its number.

    Args:
        number: of this machine's table.
        what: its name, for the error.
        arguments: integers, bytes or ctypes objects.

    Raises:
        OSError: it failed.
    """
    converted = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    return _checked(_libc().syscall(ctypes.c_long(number), *converted), what)


def prctl(option: int, *arguments: Any) -> int:
    """Call prctl; raise OSError where it fails."""
    padded = (*arguments, 0, 0, 0, 0)[:4]
    converted = [ctypes.c_ulong(each) if isinstance(each, int) else each for each in padded]
    return _checked(_libc().prctl(option, *converted), f"prctl({option})")


def unshare(flags: int) -> None:
    """Move this process to new namespaces; raise OSError where the host does not allow it."""
    _checked(_libc().unshare(flags), "unshare")


def mount(source: str, target: str, kind: str | None = None, flags: int = 0, options: str = "") -> None:
    """Mount a file system; raise OSError where it fails."""
    result = _libc().mount(
        source.encode(), target.encode(), kind and kind.encode(), ctypes.c_ulong(flags), options.encode() or None
    )
    _checked(result, f"mount of {source} on {target}")


def unmount(target: str) -> None:
    """Detach a mount and those below it."""
    _checked(_libc().umount2(target.encode(), MNT_DETACH), f"umount of {target}")


def pivot_root(root: str, old: str) -> None:
    """Make `root` the root of this process's mounts, and `old` the place of the former one."""
    system_call(PIVOT_ROOT[platform.machine()], "pivot_root", root.encode(), old.encode())


def set_capabilities(mask: int) -> None:
    """Keep these capabilities alone, effective and permitted, none inheritable."""
    header = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    data = (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0)
    system_call(CAPSET[platform.machine()], "capset", header, data)


def protect_memory() -> None:
    """Forbid other processes of the same user to read this one's memory, environment and file descriptors."""
    prctl(PR_SET_DUMPABLE, 0)
