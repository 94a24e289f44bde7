"""The report as Markdown for a public issue: no secrets, no home folder, no names of host or user."""

from __future__ import annotations

import getpass
import os
import platform

from hwgrpo.doctor import redact
from hwgrpo.doctor.diagnosis import Report
from hwgrpo.doctor.diagnosis_text import show

WIDTH = 110


def markdown(report: Report) -> str:
    """Return the report as a code block, followed by relevant environment variables and installed distributions."""
    variables = "\n".join(f"{name}={value}" for name, value in report.host.environment.items()) or "none"
    packages = "\n".join(f"{name} {version}" for name, version in report.facts.distributions.items()) or "none"
    parts = [
        "### hwgrpo doctor",
        _fenced(show(report, WIDTH)),
        _details("Environment variables", variables),
        _details("Distributions", packages),
    ]
    home = os.path.expanduser("~")
    return redact.for_others("\n\n".join(parts), home, platform.node(), _user())


def _fenced(text: str) -> str:
    return f"```text\n{text.replace('```', chr(39) * 3)}\n```"


def _details(title: str, text: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{_fenced(text)}\n\n</details>"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a user id without a name, as in many containers
        return ""
