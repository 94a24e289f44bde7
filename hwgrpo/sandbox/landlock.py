"""Landlock: a process and its children reach files below a few folders only, and no other process.

The kernel's Documentation/userspace-api/landlock.rst has the interface. A filtered process also cannot trace, or read
the memory, environment and descriptors of, a process outside of its own filter.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

from hwgrpo.sandbox.linux_calls import PR_SET_NO_NEW_PRIVS, prctl, system_call

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
VERSION = 1
PATH_BENEATH = 1
READ_FILE, READ_FOLDER, WRITE_FILE = 1 << 2, 1 << 3, 1 << 1
READ = READ_FILE | READ_FOLDER
TRUNCATE = 1 << 14
OF_FILES = READ_FILE | WRITE_FILE | TRUNCATE
"""Rights that a rule for a file, not a folder, may have."""
SCOPE_ABSTRACT_SOCKETS, SCOPE_SIGNALS = 1, 2


def landlock_version() -> int:
    """Return the version of the kernel's interface, at least 1.

    Raises:
        OSError: the kernel has none, or it is off.
    """
    return system_call(CREATE_RULESET, "landlock_create_ruleset", None, 0, VERSION)


def restrict_files(readable: Iterable[str], writable: Iterable[str]) -> None:
    """Restrict this process: no file outside of these paths, no TCP, no signals to other processes.

    Args:
        readable: files and folders that it may read; those that do not exist are skipped.
        writable: the same, where it may also make and change files.

    Raises:
        OSError: the kernel has no Landlock.
    """
    version = landlock_version()
    rights = (1 << {1: 13, 2: 14}.get(version, 15)) - 1
    network = 3 if version >= 4 else 0
    scopes = SCOPE_ABSTRACT_SOCKETS | SCOPE_SIGNALS if version >= 6 else 0
    attributes = struct.pack("QQQ", rights, network, scopes)[: 8 if version < 4 else 16 if version < 6 else 24]
    ruleset = system_call(CREATE_RULESET, "landlock_create_ruleset", attributes, len(attributes), 0)
    try:
        for paths, access in ((readable, READ), (writable, rights)):
            for path in paths:
                _add(ruleset, path, access & rights)
        prctl(PR_SET_NO_NEW_PRIVS, 1)
        system_call(RESTRICT_SELF, "landlock_restrict_self", ruleset, 0)
    finally:
        os.close(ruleset)


def _add(ruleset: int, path: str, access: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not os.path.isdir(path):
            access &= OF_FILES
        rule = ctypes.create_string_buffer(struct.pack("=Qi", access, place), 12)
        system_call(ADD_RULE, "landlock_add_rule", ruleset, PATH_BENEATH, rule, 0)
    finally:
        os.close(place)
