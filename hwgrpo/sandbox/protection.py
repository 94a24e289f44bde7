"""Protection levels of the sandbox, and what to do where a host lacks one."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

from hwgrpo.catalog import SANDBOX_LEVELS
from hwgrpo.errors import ConfigError, choice_error

LEVELS: dict[str, tuple[str, ...]] = {
    "namespaces": ("namespaces", "seccomp", "landlock"),
    "seccomp": ("seccomp", "landlock"),
    "none": (),
}
"""Level, strongest first -> what it uses beside resource limits; the first is required, the others where they exist."""
AUTOMATIC = ("namespaces", "seccomp")
"""Levels that `auto` tries, in this order."""
HIDDEN = "HWGRPO_SANDBOX_WITHOUT"
"""Environment variable for tests: parts, separated by commas, that are treated as if this host did not have them."""
KEY = "reward.sandbox.level"
SYSCTLS = {
    "/proc/sys/kernel/unprivileged_userns_clone": ("0", "sysctl kernel.unprivileged_userns_clone=1"),
    "/proc/sys/user/max_user_namespaces": ("0", "sysctl user.max_user_namespaces=10000"),
    "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": (
        "1",
        "sysctl kernel.apparmor_restrict_unprivileged_userns=0",
    ),
}
"""File -> the value that forbids user namespaces, and the remedy."""
CONTAINERS = ("/.dockerenv", "/run/.containerenv", "/var/run/secrets/kubernetes.io")


def levels_to_try(level: str) -> tuple[str, ...]:
    """Return the levels that a setting allows, strongest first.

    Raises:
        ConfigError: the level is unknown, or this is not Linux.
    """
    if level not in SANDBOX_LEVELS:
        raise choice_error(KEY, level, SANDBOX_LEVELS)
    if platform.system() != "Linux":
        raise ConfigError(
            f"reward code runs programs in a sandbox of Linux, and this is {platform.system()}; train on Linux, or "
            "score the responses by a reward function of your own"
        )
    return AUTOMATIC if level == "auto" else (level,)


def parts_of(level: str) -> list[str]:
    """Return what a level uses on this host, as far as it is known before a worker has tried."""
    hidden = os.environ.get(HIDDEN, "").split(",")
    return [part for part in LEVELS[level] if part not in hidden]


def require_first_part(level: str) -> str | None:
    """Return why a level cannot be had here, before a worker has tried; None: it may be."""
    required = LEVELS[level][:1]
    return None if not required or required[0] in parts_of(level) else f"{HIDDEN} hides {required[0]}"


def refusal(level: str, reasons: Mapping[str, str]) -> ConfigError:
    """Return the error for a host that has none of the levels asked for, with the remedies.

    Args:
        level: the setting.
        reasons: level -> why it cannot be had.
    """
    lacking = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    remedies = [remedy for file, (bad, remedy) in SYSCTLS.items() if _content(file) == bad]
    if any(map(os.path.exists, CONTAINERS)):
        remedies.append(
            "start the container with --security-opt seccomp=unconfined (or a profile that allows unshare, mount and "
            "pivot_root) and, if that is not enough, --cap-add SYS_ADMIN"
        )
    remedies = remedies or ["ask for user namespaces (sysctl user.max_user_namespaces) and CONFIG_SECCOMP_FILTER"]
    lower = [] if level == "seccomp" else ["reward.sandbox.level=seccomp"] if level == "namespaces" else []
    return ConfigError(
        f"{KEY}={level}: this host does not allow it ({lacking}). As root on the host: {'; '.join(remedies)}. "
        f"Otherwise use {' or '.join([*lower, f'{KEY}=none'])}"
        ", which only limits resources: programs may read this user's files and use the network"
    )


def describe(level: str, missing: list[str]) -> str:
    """Return the line that a run prints: the level, and what this host lacks of it."""
    what = {
        "namespaces": "programs run without network, in their own processes, users and files",
        "seccomp": "programs run with few system calls: no network, no other processes",
        "none": "programs have limited resources, but may read this user's files and use the network",
    }[level]
    lacks = f"; missing: {', '.join(missing)}" if missing else ""
    return f"hwgrpo: sandbox: {KEY}={level}: {what}{lacks}"


def _content(file: str) -> str | None:
    try:
        return Path(file).read_text(encoding="ascii").strip()
    except OSError:
        return None
