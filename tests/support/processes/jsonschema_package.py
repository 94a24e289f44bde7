"""The package jsonschema, which the reward json_schema needs: installed, or fetched for the tests."""

import importlib.util
import sys

import pytest

from tests.support.processes.wheels import fetched

PACKAGES = ("jsonschema", "jsonschema-specifications", "referencing", "rpds-py", "attrs", "typing-extensions")


def make_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the package importable until the end of the test."""
    if importlib.util.find_spec("jsonschema") is None:
        monkeypatch.setattr(sys, "path", [*sys.path, str(fetched("jsonschema", PACKAGES))])
