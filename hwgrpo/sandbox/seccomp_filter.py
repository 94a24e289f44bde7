"""The seccomp filter of programs: the list of system calls that they may make; all others fail.

A list of what is allowed, not of what is forbidden: calls of newer kernels (io_uring was one) are forbidden without an
edit, and so are further commands of ioctl and fcntl. No call changes a file that was not opened for writing: Landlock
has no rights for modes, times, attributes and flags of files, and none for truncation before Linux 6.2. The numbers are
those of the kernel's tables arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h (aarch64).
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform
import struct

from hwgrpo.sandbox.linux_calls import PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER, prctl

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH_* of the machines with a table."""


def _calls(table: str) -> dict[str, tuple[int, int]]:
    """Return name -> its numbers on x86_64 and aarch64; -1: that machine has no such call."""
    return {name: (int(x86), int(arm)) for name, x86, arm in (each.split() for each in table.split(","))}


ALLOWED = _calls("""
    read 0 63, write 1 64, readv 19 65, writev 20 66, pread64 17 67, pwrite64 18 68, preadv 295 69, pwritev 296 70,
    preadv2 327 286, pwritev2 328 287, creat 85 -1, close 3 57, close_range 436 436, lseek 8 62, stat 4 -1, fstat 5 80,
    lstat 6 -1, newfstatat 262 79, statx 332 291, access 21 -1, faccessat 269 48, faccessat2 439 439, readlink 89 -1,
    readlinkat 267 78, getdents 78 -1, getdents64 217 61, getcwd 79 17, chdir 80 49, fchdir 81 50, mkdir 83 -1,
    mkdirat 258 34, rmdir 84 -1, unlink 87 -1, unlinkat 263 35, rename 82 -1, renameat 264 38, renameat2 316 276,
    link 86 -1, linkat 265 37, symlink 88 -1, symlinkat 266 36, ftruncate 77 46, fallocate 285 47, fsync 74 82,
    fdatasync 75 83, fadvise64 221 223, umask 95 166, statfs 137 43, fstatfs 138 44, flock 73 32, sendfile 40 71,
    copy_file_range 326 285, dup 32 23, dup2 33 -1, dup3 292 24, pipe 22 -1, pipe2 293 59, poll 7 -1, ppoll 271 73,
    select 23 -1, pselect6 270 72, epoll_create 213 -1, epoll_create1 291 20, epoll_ctl 233 21, epoll_wait 232 -1,
    epoll_pwait 281 22, epoll_pwait2 441 441, eventfd 284 -1, eventfd2 290 19, timerfd_create 283 85,
    timerfd_settime 286 86, timerfd_gettime 287 87, signalfd 282 -1, signalfd4 289 74, mmap 9 222, munmap 11 215,
    mprotect 10 226, mremap 25 216, madvise 28 233, brk 12 214, msync 26 227, mincore 27 232, membarrier 324 283,
    rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, rt_sigpending 127 136, rt_sigtimedwait 128 137,
    rt_sigsuspend 130 133, sigaltstack 131 132, restart_syscall 219 128, pause 34 -1, alarm 37 -1, getitimer 36 102,
    setitimer 38 103, timer_create 222 107, timer_settime 223 110, timer_gettime 224 108, timer_delete 226 111,
    timer_getoverrun 225 109, nanosleep 35 101, clock_gettime 228 113, clock_getres 229 114, clock_nanosleep 230 115,
    gettimeofday 96 169, time 201 -1, times 100 153, getpid 39 172, gettid 186 178, getppid 110 173, getuid 102 174,
    geteuid 107 175, getgid 104 176, getegid 108 177, getresuid 118 148, getresgid 120 150, getgroups 115 158,
    getpgrp 111 -1, uname 63 160, sysinfo 99 179, getrusage 98 165, getrlimit 97 163, getcpu 309 168, getrandom 318 278,
    sched_yield 24 124, sched_get_priority_max 146 125, sched_get_priority_min 147 126, futex 202 98,
    futex_waitv 449 449, set_robust_list 273 99, set_tid_address 218 96, rseq 334 293, arch_prctl 158 -1, exit 60 93,
    exit_group 231 94, wait4 61 260, waitid 247 95, recvfrom 45 207, shutdown 48 210, getsockopt 55 209,
    setsockopt 54 208, getsockname 51 204, getpeername 52 205, recvmsg 47 212
""")
"""Calls that are allowed with any arguments."""
WITHOUT_EFFECT = _calls("""
    chmod 90 -1, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452,
    utime 132 -1, utimes 235 -1, utimensat 280 88, futimesat 261 -1
""")
"""Modes and times of files: the owner changes them by a path or any descriptor. They succeed and change nothing, since
copying and unpacking of files ends with them."""
EXTENDED_ATTRIBUTES = _calls("""
    setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, getxattr 191 8, lgetxattr 192 9, fgetxattr 193 10,
    listxattr 194 11, llistxattr 195 12, flistxattr 196 13, removexattr 197 14, lremovexattr 198 15, fremovexattr 199 16
""")
"""They fail as on a file system without them, which `shutil.copy2` and the like expect."""
OWN_PROCESS = {"kill": (62, 129), "tgkill": (234, 131)}
"""Calls whose first argument is a process: this one alone, by its number."""
OWN_OR_ZERO = {
    "prlimit64": (302, 261),
    "sched_setaffinity": (203, 122),
    "sched_getaffinity": (204, 123),
    "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120),
}
"""The same, where 0 is this one as well."""
CLONE, CLONE3, SOCKETPAIR, SENDTO = (56, 220), (435, 435), (53, 199), (44, 206)
FCNTL, IOCTL, OPEN, OPENAT = (72, 25), (16, 29), (2, -1), (257, 56)
CLONE_THREAD = 0x00010000
AF_UNIX, SOCK_STREAM, SOCK_TYPE_MASK = 1, 1, 0xF
O_ACCMODE, O_RDONLY, O_TRUNC = 3, 0, 0x200
FCNTL_COMMANDS = (*range(8), 9, 11, 36, 37, 38, *range(1030, 1035))
"""Of descriptors (F_DUPFD, F_SETFL and the like), locks, F_GETOWN, F_GETSIG, sizes of pipes and seals: none that lets
the kernel send signals to other processes (F_SETOWN) or hold up those who open a file (F_SETLEASE)."""
IOCTL_COMMANDS = (0x5401, 0x802C542A, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451, 0x40049409)
"""TCGETS, TCGETS2, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX, and FICLONE, which writes as `write` does: no
flags of files (FS_IOC_SETFLAGS), no input to a terminal (TIOCSTI), no signals (FIOSETOWN)."""

ALLOW, FAIL, KILL = 0x7FFF0000, 0x00050000, 0x80000000
LOAD, EQUAL, ANY_BIT, GREATER_OR_EQUAL, AND, RETURN = 0x20, 0x15, 0x45, 0x35, 0x54, 0x06
NUMBER, MACHINE, FIRST_ARGUMENT = 0, 4, 16
"""Offsets in struct seccomp_data; an argument has 8 bytes, the lower half first."""
X32 = 0x40000000
PROCESS = 0xFFFFFFFF
"""Stands for the number of the filtered process; no call or flag has this value."""
NEWEST = 451
"""Calls from here on were added after the table: they do not exist, so that libraries fall back to older ones."""


class _Program(ctypes.Structure):
    """struct sock_fprog."""

    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))


@functools.cache
def seccomp_program(machine: str) -> tuple[bytes, tuple[int, ...]]:
    """Return the BPF program, and where it needs the number of the process that is filtered.

    Args:
        machine: a key of `MACHINES`.

    Returns:
        An array of struct sock_filter; offsets in it of 4 bytes each for the process's number in its pid namespace.

    Raises:
        OSError: there is no table for this machine.
    """
    if machine not in MACHINES:
        raise OSError(errno.ENOSYS, f"no table of system calls for {machine}")
    column = 0 if machine == "x86_64" else 1
    code: list[tuple[int, int, int, int]] = []

    def load(offset: int) -> None:
        code.append((LOAD, 0, 0, offset))

    def end(action: int) -> None:
        code.append((RETURN, 0, 0, action))

    def rule(numbers: tuple[int, int], *checks: tuple[int, int, int, int]) -> None:
        """Append a block for one call; its jumps are relative to its own end."""
        if numbers[column] >= 0:
            code.append((EQUAL, 0, len(checks), numbers[column]))
            code.extend(checks)

    denied = (RETURN, 0, 0, FAIL | errno.EPERM)
    allowed = (RETURN, 0, 0, ALLOW)
    load(MACHINE)
    code.append((EQUAL, 1, 0, MACHINES[machine]))
    end(KILL)
    load(NUMBER)
    code.append((GREATER_OR_EQUAL, 0, 1, X32))
    end(KILL)
    for numbers in ALLOWED.values():
        rule(numbers, allowed)
    for numbers in WITHOUT_EFFECT.values():
        rule(numbers, (RETURN, 0, 0, FAIL))  # error 0: the call is not made and returns 0
    for numbers in EXTENDED_ATTRIBUTES.values():
        rule(numbers, (RETURN, 0, 0, FAIL | errno.ENOTSUP))
    low = FIRST_ARGUMENT
    for numbers, flags in ((OPEN, low + 8), (OPENAT, low + 2 * 8)):  # truncation needs no writable descriptor
        rule(
            numbers,
            *((LOAD, 0, 0, flags), (AND, 0, 0, O_ACCMODE), (EQUAL, 4, 0, O_ACCMODE), (EQUAL, 0, 2, O_RDONLY)),
            *((LOAD, 0, 0, flags), (ANY_BIT, 1, 0, O_TRUNC), allowed, denied),
        )
    for numbers in OWN_PROCESS.values():
        rule(numbers, (LOAD, 0, 0, low), (EQUAL, 0, 1, PROCESS), allowed, denied)
    for numbers in OWN_OR_ZERO.values():
        rule(numbers, (LOAD, 0, 0, low), (EQUAL, 1, 0, 0), (EQUAL, 0, 1, PROCESS), allowed, denied)
    rule(CLONE, (LOAD, 0, 0, low), (ANY_BIT, 0, 1, CLONE_THREAD), allowed, denied)
    kind = low + 8
    rule(
        SOCKETPAIR,
        *((LOAD, 0, 0, low), (EQUAL, 0, 4, AF_UNIX)),  # of other families the kernel would load modules
        *((LOAD, 0, 0, kind), (AND, 0, 0, SOCK_TYPE_MASK), (EQUAL, 0, 1, SOCK_STREAM), allowed, denied),
    )
    address = low + 4 * 8  # a socket of a pair may send to its peer, not to an address
    rule(
        SENDTO,
        *((LOAD, 0, 0, address), (EQUAL, 0, 3, 0), (LOAD, 0, 0, address + 4), (EQUAL, 0, 1, 0)),
        *(allowed, denied),
    )
    for numbers, commands, error in ((FCNTL, FCNTL_COMMANDS, errno.EPERM), (IOCTL, IOCTL_COMMANDS, errno.ENOTTY)):
        rest = [(EQUAL, len(commands) - each, 0, command) for each, command in enumerate(commands)]
        rule(numbers, (LOAD, 0, 0, low + 8), *rest, (RETURN, 0, 0, FAIL | error), allowed)
    code.append((EQUAL, 1, 0, CLONE3[column]))  # its flags are in memory, which a filter cannot read
    code.append((GREATER_OR_EQUAL, 0, 1, NEWEST))
    end(FAIL | errno.ENOSYS)
    end(FAIL | errno.EPERM)
    places = tuple(8 * index + 4 for index, each in enumerate(code) if each[3] == PROCESS)
    return b"".join(struct.pack("HBBI", *each) for each in code), places


def install_seccomp_filter() -> None:
    """Filter the system calls of this process from now on, and of its threads; PR_SET_NO_NEW_PRIVS is set first.

    Raises:
        OSError: the kernel has no filters, this machine has no table, or the host forbids them.
    """
    program, places = seccomp_program(platform.machine())
    buffer = ctypes.create_string_buffer(program, len(program))
    for place in places:
        struct.pack_into("I", buffer, place, os.getpid())
    header = _Program(len(program) // 8, ctypes.addressof(buffer))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(header))
