"""`/proc/driver/nvidia/version` as machines have it, with the driver's version: for every reader of that file."""

from typing import NamedTuple


class VersionFile(NamedTuple):
    """A text, and what it says."""

    text: str
    driver: str | None
    """None: the text names no version."""
    is_too_old: bool | None
    """For CUDA 13, which needs 580; None: not known."""


VERSION_FILES = {
    "proprietary": VersionFile(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\n"
        "GCC version:  gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04)\n", "535.129.03", True),
    "proprietary, two numbers": VersionFile(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  384.81  Wed Aug 17 22:24:07 PDT 2016\n"
        "GCC version:  gcc version 4.8.5 20150623 (Red Hat 4.8.5-4) (GCC)\n", "384.81", True),
    "proprietary, one blank": VersionFile(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module 580.95.05 Tue Sep 23 10:11:16 UTC 2025\n"
        "GCC version: gcc version 13.3.0 (Ubuntu 13.3.0-6ubuntu2~24.04)\n", "580.95.05", False),
    "proprietary, aarch64": VersionFile(
        "NVRM version: NVIDIA UNIX aarch64 Kernel Module  550.120  Fri Sep 13 11:01:10 UTC 2024\n"
        "GCC version:  gcc version 12.3.0 (Ubuntu 12.3.0-1ubuntu1~22.04)\n", "550.120", True),
    "proprietary, 32 bits": VersionFile(
        "NVRM version: NVIDIA UNIX x86 Kernel Module  390.157  Wed Oct 12 09:14:13 UTC 2022\n"
        "GCC version:  gcc version 9.4.0 (Debian)\n", "390.157", True),
    "proprietary, clang": VersionFile(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  590.44.01  Mon Dec  1 07:00:00 UTC 2025\n"
        "GCC version:  clang version 19.1.7\n", "590.44.01", False),
    "open": VersionFile(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build  (dvs-builder@U22-I3-B03)  "
        "Tue Mar  5 22:15:33 UTC 2026\nGCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n", "580.159.04", False),
    "open, built by its distribution": VersionFile(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57.08  Release Build  (archlinux-builder@)  \n"
        "GCC version:  gcc version 15.1.1 20250425 (GCC) \n", "575.57.08", True),
    "open, debug": VersionFile(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  595.91.07  Debug Build  (root@node86)  \n"
        "GCC version:  gcc version 14.2.0\n", "595.91.07", False),
    "open, aarch64": VersionFile(
        "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.95.05  Release Build  (dvs-builder@U22-AF02)\n"
        "GCC version:  gcc version 13.3.0 (Ubuntu 13.3.0-6ubuntu2~24.04)\n", "580.95.05", False),
    "open, no processor": VersionFile("NVRM version: NVIDIA UNIX Open Kernel Module 580.65\n", "580.65", False),
    "Jetson, JetPack 6": VersionFile(
        "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  540.4.0  Release Build  (buildbrain@mobile-u64-6336-"
        "d8000)  Tue Jan  7 17:35:12 PST 2025\nGCC version:  collect2: error: ld returned 1 exit status    \n",
        "540.4.0", True),
    "Jetson, JetPack 5, which counts its own releases": VersionFile(
        "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  35.3.1  Release Build  (buildbrain@mobile-u64-6289-"
        "d7000)  Sun Mar 19 08:09:33 PDT 2023\nGCC version:  gcc version 9.3.0 (Buildroot 2020.08) \n", "35.3.1", None),
    "the compiler's line alone": VersionFile("GCC version:  gcc version 13.3.0 (Ubuntu 13.3.0-6)\n", None, None),
    "a version in no known place": VersionFile("NVRM version: NVIDIA UNIX Kernel Module for x86_64\n", None, None),
    "empty": VersionFile("", None, None),
}  # fmt: skip
