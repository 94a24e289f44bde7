"""Limits on one run of a program."""

from __future__ import annotations

from dataclasses import dataclass, fields

from hwgrpo.errors import ConfigError


@dataclass(frozen=True)
class Limits:
    """Limits on one run of a program: one input, or all asserts of a row.

    Raises:
        ConfigError: a limit is out of range.
    """

    seconds: float = 6.0
    """Wall time; the CPU time of all threads together has the same limit, rounded up."""
    memory_mib: int = 1024
    """Address space of a process, in MiB; Python itself needs about 50."""
    processes: int = 16
    """Threads and processes together."""
    open_files: int = 64
    file_mib: int = 16
    """Size of one file, in MiB."""
    scratch_mib: int = 64
    """Size of all files together, in MiB."""
    scratch_files: int = 1000
    output_kib: int = 1024
    """Bytes written to stdout and stderr, in KiB."""

    def __post_init__(self) -> None:
        for field in fields(self):
            least = 64 if field.name == "memory_mib" else 0.05 if field.name == "seconds" else 1
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= 1 << 20:
                raise ConfigError(
                    f"kwargs.{field.name}={value!r} of the sandbox is out of range: it must be at least {least}"
                )
