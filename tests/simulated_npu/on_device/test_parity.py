"""A step on the device against fp64."""

import json

import pytest

from hwgrpo.cli.main import main


@pytest.mark.parametrize("settings", [("model.dtype=float32",), ("model.dtype=float32", "model.layout=packed"), ()])
def test_rounding_explains_every_difference_on_the_device(settings: tuple[str, ...], capsys):
    assert main(["parity", "backend.name=npu", *settings, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    (with_fp64,) = report["comparisons"]
    assert (with_fp64["backend"], report["passed"]) == ("npu", True)
    assert with_fp64["dtype"] == ("float32" if settings else "bfloat16")
