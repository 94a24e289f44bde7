"""metrics.jsonl: exact numbers, valid JSON, and cutting back after a kill."""

import json
import math
import random
import struct

import numpy as np
import pytest
import torch

from hwgrpo.errors import DataError
from hwgrpo.observe.loggers.jsonl import JsonlLogger, read_metrics
from hwgrpo.support.jsonlines import StepLines, jsonable, read_lines


def strict(line: str):
    def refuse(word: str):
        raise ValueError(f"{word} is not JSON")

    return json.loads(line, parse_constant=refuse)


def test_a_float_comes_back_with_the_same_bits(tmp_path):
    draw = random.Random(1)
    floats = [0.1, -0.0, 5e-324, 1.7976931348623157e308, float(np.float32(0.1))]
    floats += [f for f in (struct.unpack("d", draw.randbytes(8))[0] for _ in range(200)) if math.isfinite(f)]
    logger = JsonlLogger(tmp_path)
    logger.log(1, {f"m/{i}": value for i, value in enumerate(floats)})
    back = read_metrics(tmp_path)[1]
    assert [struct.pack("d", back[f"m/{i}"]) for i in range(len(floats))] == [struct.pack("d", f) for f in floats]


def test_numbers_that_are_not_finite_are_valid_json_and_come_back(tmp_path):
    JsonlLogger(tmp_path).log(1, {"a": float("nan"), "b": float("inf"), "c": -float("inf")})
    line = (tmp_path / "metrics.jsonl").read_text()
    assert strict(line) == {"step": 1, "a": "NaN", "b": "Infinity", "c": "-Infinity"}
    back = read_metrics(tmp_path)[1]
    assert math.isnan(back["a"])
    assert (back["b"], back["c"]) == (math.inf, -math.inf)


def test_bytes_as_of_images_are_base64():
    assert jsonable({"images": [{"bytes": b"\x89PNG", "path": None}]}) == {
        "images": [{"bytes": "iVBORw==", "path": None}]
    }


def test_a_line_is_on_disk_before_log_returns(tmp_path):
    logger = JsonlLogger(tmp_path)
    for step in (1, 2):
        logger.log(step, {"reward": 0.5})
        assert (tmp_path / "metrics.jsonl").read_text().count("\n") == step


def test_lines_of_one_step_are_merged(tmp_path):
    logger = JsonlLogger(tmp_path)
    logger.log(1, {"reward": 0.5})
    logger.log(1, {"val-core/x/reward/greedy": 0.75})
    logger.log(2, {"reward": 0.6})
    assert read_metrics(tmp_path) == {1: {"reward": 0.5, "val-core/x/reward/greedy": 0.75}, 2: {"reward": 0.6}}


def test_cutting_back_removes_later_steps_only_and_appending_goes_on(tmp_path):
    logger = JsonlLogger(tmp_path)
    for step in range(6):
        logger.log(step, {"reward": step / 8})
    logger.log(3, {"val": 1.0})
    before = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    logger.cut_back(3)
    assert (tmp_path / "metrics.jsonl").read_bytes() == b"".join([*before[:4], before[6]])
    logger.log(4, {"reward": 0.125})
    logger.close()
    assert read_metrics(tmp_path)[4] == {"reward": 0.125}
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("torn", [b'{"step": 2, "rew', b'{"step": 2, "reward": 0.5}', b"{", b"\xff\x00"])
def test_a_torn_last_line_is_dropped_by_cutting_back(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "reward": 0.5}\n' + torn)
    JsonlLogger(tmp_path).cut_back(7)
    assert path.read_bytes() == b'{"step": 1, "reward": 0.5}\n'


@pytest.mark.parametrize(
    "whole", [b"", b'{"step": 1, "reward": 0.5}\n', b'{"step": 1, "x": "' + b"y" * 70_000 + b'"}\n']
)
@pytest.mark.parametrize("torn", [b'{"step": 2', b'{"step": 2, "x": "' + b"z" * 140_000])
def test_appending_after_a_kill_does_not_continue_the_torn_line(tmp_path, whole, torn):
    path = tmp_path / "lines.jsonl"
    path.write_bytes(whole + torn)
    StepLines(path).append({"step": 3})
    assert path.read_bytes() == whole + b'{"step": 3}\n'


def test_cutting_back_a_file_that_does_not_exist_makes_none(tmp_path):
    JsonlLogger(tmp_path).cut_back(3)
    assert list(tmp_path.iterdir()) == []
    assert read_metrics(tmp_path) == {}


def test_a_kill_while_cutting_back_leaves_the_old_file_whole(tmp_path, monkeypatch):
    logger = JsonlLogger(tmp_path)
    for step in range(4):
        logger.log(step, {"reward": 0.5})
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def die(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("hwgrpo.support.jsonlines.os.fsync", die)
    with pytest.raises(KeyboardInterrupt):
        logger.cut_back(1)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    monkeypatch.undo()
    logger.cut_back(1)
    assert sorted(read_metrics(tmp_path)) == [0, 1]


@pytest.mark.parametrize("line", ["not json", '{"reward": 1}', "[1]", '{"step": null}'])
def test_a_foreign_line_is_refused_with_file_and_line(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n' + line + '\n{"step": 2}\n')
    before = path.read_bytes()
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2: .*move the file away"):
        JsonlLogger(tmp_path).cut_back(1)
    assert path.read_bytes() == before


def test_what_json_cannot_hold_is_turned_into_what_it_can():
    value = {1: (np.float32(0.5), np.array([1, 2])), "t": torch.tensor([1.0, math.nan]), "s": {3}, "o": slice(1)}
    assert jsonable(value) == {"1": [0.5, [1, 2]], "t": [1.0, "NaN"], "s": [3], "o": "slice(None, 1, None)"}


def test_text_of_any_kind_survives_a_round_trip(tmp_path):
    text = 'a\nb\r\u2028 "quoted" 计算 \x1b[31m \x00 lone \ud83d surrogate'
    StepLines(tmp_path / "x.jsonl").append({"step": 1, "text": text})
    assert [record["text"] for record in read_lines(tmp_path / "x.jsonl")] == [text]
    assert "计算" in (tmp_path / "x.jsonl").read_text(encoding="utf-8")
