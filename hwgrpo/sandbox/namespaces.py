"""Linux namespaces of a worker: its own users, processes, network and mounts, with the files that Python reads."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import sysconfig

from hwgrpo.sandbox import linux_calls as linux

INNER_ID = 1000
"""User and group of programs, within the namespace."""
SCRATCH = "/tmp"
MOVED = "/below-scratch"
"""Folder of the view with what lies below the scratch folder on the host, e.g. packages of an environment there."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")
AT_RECURSIVE, AT_FDCWD = 0x8000, -100
KINDS = {
    "user": linux.CLONE_NEWUSER,
    "mount": linux.CLONE_NEWNS,
    "pid": linux.CLONE_NEWPID,
    "net": linux.CLONE_NEWNET,
    "ipc": linux.CLONE_NEWIPC,
    "uts": linux.CLONE_NEWUTS,
    "cgroup": linux.CLONE_NEWCGROUP,
}


def readable_paths() -> list[str]:
    """Return the files and folders that Python and its extension modules read, outermost alone."""
    paths = sysconfig.get_paths()
    wanted = [paths["stdlib"], paths["platstdlib"], f"{sys.base_prefix}/lib", *filter(None, sys.path)]
    wanted += ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/share/zoneinfo", "/etc/ld.so.cache"]
    found: list[str] = []
    for path in sorted({os.path.realpath(each) for each in wanted if os.path.exists(each)}):
        if path != "/" and not any(path.startswith(f"{outer}/") for outer in found):
            found.append(path)
    return found


def inside(path: str) -> str:
    """Return where the view has a path: one below the scratch folder's would be hidden by it."""
    return f"{MOVED}{path}" if path.startswith(f"{SCRATCH}/") else path


def enter_namespaces(program_id: int | None) -> int:
    """Move this process to namespaces of its own; its next child is the first process there.

    Args:
        program_id: the host's user and group for programs, distinct from this process's; None: the same.

    Returns:
        The user of programs within the namespace.

    Raises:
        OSError: the host does not allow it.
    """
    here = os.geteuid(), os.getegid()
    mapper = None if program_id is None else _Mapper(program_id)
    try:
        linux.unshare(sum(KINDS.values()))
        if mapper is not None and mapper.write_maps():
            return INNER_ID
    finally:
        if mapper is not None:
            mapper.close()
    # without the privilege to map two users: programs have this process's
    _write("/proc/self/setgroups", "deny")
    for name, number in zip(("uid_map", "gid_map"), here, strict=True):
        _write(f"/proc/self/{name}", f"{INNER_ID} {number} 1")
    return INNER_ID


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)


class _Mapper:
    """A child that stays in the host's user namespace, to map two users into the new one."""

    def __init__(self, program_id: int) -> None:
        asked, self._ask = os.pipe()
        self._done, report = os.pipe()
        parent = os.getpid()
        self._child = os.fork()
        if self._child == 0:
            code = 1
            try:
                os.close(self._ask)
                if os.read(asked, 1):
                    for name in ("uid_map", "gid_map"):
                        _write(f"/proc/{parent}/{name}", f"0 0 1\n{INNER_ID} {program_id} 1\n")
                    os.write(report, b".")
                    code = 0
            finally:
                os._exit(code)
        os.close(asked)
        os.close(report)

    def write_maps(self) -> bool:
        """Let the child write the maps; return whether it was allowed to."""
        os.write(self._ask, b".")
        return os.read(self._done, 1) == b"."

    def close(self) -> None:
        """Wait for the child's end, which follows the end of the pipe."""
        os.close(self._ask)
        os.close(self._done)
        os.waitpid(self._child, 0)


def mount_view(root: str) -> None:
    """Replace all mounts of this process by a read-only view of `readable_paths`, and an empty scratch folder.

    Args:
        root: an empty folder, on which the view is mounted.

    Raises:
        OSError: the host does not allow it.
    """
    linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("tmpfs", root, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=1m,nr_inodes=1000,mode=0755")
    for path in (*readable_paths(), *DEVICES):
        _bind(path, root + inside(path))
    for link in ("/lib", "/lib64"):
        if os.path.islink(link) and not os.path.lexists(root + link):
            os.symlink(os.readlink(link), root + link)
    for folder in (SCRATCH, "/old"):
        os.makedirs(root + folder, exist_ok=True)
    linux.pivot_root(root, f"{root}/old")
    os.chdir("/")
    linux.unmount("/old")
    os.rmdir("/old")
    sys.path[:] = map(inside, sys.path)
    linux.mount(
        "none", "/", None, linux.MS_REMOUNT | linux.MS_BIND | linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV
    )


def _bind(path: str, target: str) -> None:
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "w", encoding="ascii"):
            pass
    linux.mount(path, target, None, linux.MS_BIND | linux.MS_REC)
    device = path in DEVICES
    flags = linux.MS_RDONLY | linux.MS_NOSUID | (0 if device else linux.MS_NODEV)
    attributes = ctypes.create_string_buffer(struct.pack("QQQQ", flags, 0, 0, 0), 32)
    try:
        linux.system_call(linux.MOUNT_SETATTR, "mount_setattr", AT_FDCWD, target.encode(), AT_RECURSIVE, attributes, 32)
    except OSError:  # before Linux 5.12; flags of the host's mount must stay
        kept = os.statvfs(target).f_flag & (linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC | 0x1C00)
        relatime = 1 << 21 if kept & 0x1000 else 0
        linux.mount("none", target, None, linux.MS_REMOUNT | linux.MS_BIND | flags | (kept & ~0x1000) | relatime)


def mount_scratch(size_mib: int, files: int, owner: int) -> None:
    """Mount an empty file system of limited size as the scratch folder."""
    linux.mount(
        "tmpfs",
        SCRATCH,
        "tmpfs",
        linux.MS_NOSUID | linux.MS_NODEV,
        f"size={size_mib}m,nr_inodes={files},mode=0700,uid={owner},gid={owner}",
    )


def unmount_scratch() -> None:
    """Discard the scratch folder with all its files."""
    linux.unmount(SCRATCH)
