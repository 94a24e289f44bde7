"""A step on the device against fp64."""

import json

import pytest

from hwgrpo.cli.main import main


@pytest.mark.parametrize("words", [("model.dtype=float32",), ("model.dtype=float32", "model.layout=packed"), ()])
def test_rounding_explains_every_difference_on_the_device(words: tuple[str, ...], capsys):
    assert main(["parity", "backend.name=npu", *words, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["backend"], report["passed"]) == ("npu", True)
    assert report["dtype"] == ("float32" if words else "bfloat16")
