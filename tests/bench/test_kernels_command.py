"""`hwgrpo bench kernels` and `hwgrpo bench compare` as a user types them."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hwgrpo_kernels import Implementation, default_registry, rows_torch

from hwgrpo.bench.kernels.compare import compare_documents
from hwgrpo.cli.main import main

TIMES = {"wall_s", "cpu_s", "device_s", "median_s", "min_s", "spread_s"}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hwgrpo.bench.kernels.ceiling.HOST_GEMM_SIDE", 32)
    monkeypatch.setattr("hwgrpo.bench.kernels.ceiling.HOST_COPY_BYTES", 4096)


def bench(*words: str) -> int:
    return main(["bench", "kernels", "--shape", "16,8,300", "--repeat", "2", *words])


@pytest.fixture
def other():
    """An implementation of row_stats that is wrong by a hair, and one that runs elsewhere."""

    def off(*arguments: Any) -> Any:
        logprob, *others = rows_torch.row_stats(*arguments)
        return logprob + 1e-3, *others

    default_registry.register(Implementation("row_stats", "off", lambda: off))
    default_registry.register(
        Implementation("row_stats", "elsewhere", lambda: off, device_types=frozenset({"meta"}), rank=5)
    )
    yield
    for name in ("off", "elsewhere"):
        del default_registry._implementations["row_stats"][name]
    default_registry.configure(pins={})


def test_cases_sides_and_what_they_ran_on_are_shown(capsys: pytest.CaptureFixture[str]):
    assert bench("--no-memory") == 0
    shown = capsys.readouterr().out
    for part in ("linear_logprob", "linear_token_loss-frozen", "row_grad", "token_logprob+grad", "definition", "eager",
                 "N=16 H=8 V=300, float32", "GEMM of 32^3", "processor time", "memory not measured"):  # fmt: skip
        assert part in shown, part
    assert "not installed: TRL chunked (trl), Liger scaled CE (liger_kernel)," in shown
    assert "linear_token_loss-fp32" not in shown, "operands are fp32 already"
    assert "\033" not in shown
    assert all(len(line) <= 100 for line in shown.splitlines() if not line.startswith("not installed: "))


def test_it_fits_eighty_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert bench("--only", "linear_token_loss-frozen,token_logprob+grad", "--json", "a.json") == 0
    plain = re.sub(r"\033\[[0-9;]*m", "", capsys.readouterr().out)
    assert "…" not in plain
    assert all(len(line) <= 80 for line in plain.splitlines())
    assert main(["bench", "compare", "a.json", "a.json"]) == 0
    plain = re.sub(r"\033\[[0-9;]*m", "", capsys.readouterr().out)
    assert "…" not in plain
    assert all(len(line) <= 80 for line in plain.splitlines())


def test_json_holds_every_sample_under_a_versioned_schema():
    assert bench("--only", "row_stats,linear_token_loss", "--json", "bench.json") == 0
    found = json.loads(Path("bench.json").read_text())
    assert set(found) == {
        "schema", "machine", "peers", "dtype", "clock", "repeat", "ceiling", "peak", "not_here", "shapes",
    }  # fmt: skip
    assert (found["schema"], found["dtype"], found["clock"]) == ("hwgrpo.bench.kernels/1", "float32", "processor")
    assert set(found["machine"]) == {
        "backend", "device", "arch", "cores", "load", "threads", "hwgrpo", "torch", "transformers", "python",
    }  # fmt: skip
    assert set(found["ceiling"]) == {
        "gemm_side", "flops_per_s", "flops_per_s_at_start", "flops_per_s_at_end", "copy_bytes", "bytes_per_s",
    }  # fmt: skip
    (shape,) = found["shapes"]
    assert (shape["name"], shape["N"], shape["H"], shape["V"]) == ("16x8x300", 16, 8, 300)
    assert set(shape["gemm"]) == TIMES | {"flops_per_s"}
    assert [case["name"] for case in shape["cases"]] == ["linear_token_loss", "row_stats"]
    for case in shape["cases"]:
        assert set(case) == {"name", "flops", "bytes", "baseline", "sides"}
        assert (case["flops"] is None) != (case["bytes"] is None)
        for side in case["sides"]:
            assert set(side) == TIMES | {
                "name", "group", "state", "reason", "implementations", "errors", "peak_bytes", "ratio", "flops_per_s",
                "bytes_per_s", "share_of_ceiling",
            }  # fmt: skip
            if side["group"] == "peer":
                assert (side["state"], side["cpu_s"]) == ("impossible", [])
                continue
            assert len(side["wall_s"]) == len(side["cpu_s"]) == found["repeat"] == 2
            assert side["min_s"] == min(side["cpu_s"])
            unit = "flops_per_s" if case["flops"] else "bytes_per_s"
            assert side[unit] == pytest.approx((case["flops"] or case["bytes"]) / side["median_s"])
            assert side["peak_bytes"] is not None
        sides = {side["name"]: side for side in case["sides"]}
        assert sides[case["baseline"]]["ratio"] == 1.0


def test_what_is_wrong_or_cannot_run_is_told_and_the_exit_code_is_1(other: None, capsys: pytest.CaptureFixture[str]):
    assert bench("--no-memory", "--only", "row_stats", "--json", "bench.json") == 1
    shown = capsys.readouterr().out
    assert "WRONG: off is not timed in row_stats at 16x8x300: its logprob is 1" in shown
    assert "not here: row_stats=elsewhere: needs meta, have cpu" in shown
    sides = json.loads(Path("bench.json").read_text())["shapes"][0]["cases"][0]["sides"]
    (off,) = (side for side in sides if side["name"] == "off")
    assert (off["state"], off["cpu_s"], off["median_s"], off["ratio"]) == ("wrong", [], None, None)
    assert off["errors"]["logprob"] > 1e-5


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--shape", "8,8"], ["--shape 8,8", "8192,896,151936"]),
        (["--shape", "8,0,8"], ["--shape 8,0,8"]),
        (["--shape", "smal"], ["--shape='smal'", "Did you mean 'small'?"]),
        (["--dtype", "bfloat"], ["--dtype='bfloat'", "Did you mean 'bfloat16'?"]),
        (["--only", "row_stat"], ["--only='row_stat'", "Did you mean 'row_stats'?"]),
        (["--only", ","], ["--only ','", "row_stats"]),
        (["--only", "linear_token_loss-fp32"], ["no such case", "float32"]),
        (["--repeat", "0"], ["--repeat 0", "1 or more"]),
        (["--threads", "0"], ["--threads 0", "1 or more"]),
        (["--json", "no/such/folder/x.json"], ["--json no/such/folder/x.json", "folder"]),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(words: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]):
    assert bench(*words) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    for part in parts:
        assert part in shown.err.strip().splitlines()[-1]


def test_a_pin_that_cannot_run_is_refused(
    other: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("HWGRPO_KERNELS", "row_stats=elsewhere")
    assert bench() == 2
    told = "HWGRPO_KERNELS: row_stats=elsewhere cannot run: needs meta, have cpu"
    shown = capsys.readouterr()
    assert shown.out == ""
    assert told in shown.err

    assert main(["kernels", "--device", "cpu"]) == 2
    shown = capsys.readouterr()
    assert told in shown.err
    (line,) = (line for line in shown.out.splitlines() if " elsewhere " in line)
    assert "cannot run" in line
    assert "needs meta, have cpu" in line


def test_a_device_that_is_not_here_is_refused(capsys: pytest.CaptureFixture[str]):
    assert bench("--device", "npu") == 1  # hw: the word under test
    assert "npu" in capsys.readouterr().err  # hw: the word under test


def document(**seconds: float | None) -> dict[str, Any]:
    """A document with the sides `case__side=seconds` at one shape."""
    cases: dict[str, list[dict[str, Any]]] = {}
    for name, value in seconds.items():
        case, side = name.split("__")
        group = "baseline" if side == "eager" else "ours"
        times = {"median_s": value, "share_of_ceiling": 0.5}
        cases.setdefault(case, []).append({"name": side, "group": group, **times})
    return {
        "schema": "hwgrpo.bench.kernels/1",
        "machine": {"device": "a chip", "backend": "cpu", "arch": "x", "torch": "2", "hwgrpo": "0"},
        "dtype": "float32",
        "clock": "processor",
        "ceiling": {"flops_per_s": 1e12},
        "shapes": [{"name": "A", "N": 1, "H": 2, "V": 3, "cases": [{"name": n, "sides": s} for n, s in cases.items()]}],
    }


def compare(a: dict[str, Any], b: dict[str, Any], *words: str) -> int:
    Path("a.json").write_text(json.dumps(a))
    Path("b.json").write_text(json.dumps(b))
    return main(["bench", "compare", "a.json", "b.json", *words])


def test_the_second_is_twice_as_fast_where_it_takes_half_the_time(capsys: pytest.CaptureFixture[str]):
    assert compare(document(row_stats__torch=2.0), document(row_stats__torch=1.0), "--json", "c.json") == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("  torch"))
    assert line.split()[:6] == ["torch", "2,000", "1,000", "50%", "50%", "2.00x"]
    found = json.loads(Path("c.json").read_text())
    assert found["schema"] == "hwgrpo.bench.compare/1"
    assert set(found) == {"schema", "a", "b", "machines", "rows"}
    assert [(row["case"], row["side"], row["ratio"]) for row in found["rows"]] == [("row_stats", "torch", 2.0)]
    assert compare(document(row_stats__torch=1.0), document(row_stats__torch=4.0)) == 0
    assert "0.25x" in capsys.readouterr().out


def test_three_and_four_are_compared_with_the_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("FORCE_COLOR", "1")
    long = "a_name_of_some_plug_in_that_is_longer_than_any_of_ours"
    for letter, seconds in zip("abcd", (2.0, 1.0, 4.0, 0.5)):
        part = document(**{"row_stats__torch": seconds, f"{long}__{long}": 22.2})
        if letter == "c":
            part["shapes"][0]["cases"].pop()
        Path(f"{letter}.json").write_text(json.dumps(part))
    files = ["a.json", "b.json", "c.json", "d.json"]
    for count, numbers in ((3, "2.00x 0.50x"), (4, "2.00x 0.50x 4.00x")):
        assert main(["bench", "compare", *files[:count], "--json", "all.json"]) == 0
        plain = re.sub(r"\033\[[0-9;]*m", "", capsys.readouterr().out)
        assert all(len(line) <= 80 for line in plain.splitlines())
        line = next(line for line in plain.splitlines() if line.startswith("  torch "))
        assert " ".join(line.split()) == f"torch {' '.join(['2,000', '1,000', '4,000', '500.0'][:count])} {numbers}"
        assert "not in C at N=1 H=2 V=3" in " ".join(plain.split())
        assert "22,200 22,200 - 22,200 1.00x - 1.00x" in " ".join(plain.split()) or count == 3
    found = json.loads(Path("all.json").read_text())
    assert [found[letter] for letter in "abcd"] == files
    (row, other) = found["rows"]
    assert (row["d"]["median_s"], row["ratio"], row["ratio_c"], row["ratio_d"]) == (0.5, 2.0, 0.5, 4.0)
    assert (other["c"], other["ratio_c"]) == (None, None)


@pytest.mark.parametrize("count", [1, 5])
def test_one_file_or_five_are_refused(count: int, capsys: pytest.CaptureFixture[str]):
    assert main(["bench", "compare", *["a.json"] * count]) == 2
    assert f"use two to four files, not {count}" in capsys.readouterr().err


def test_rows_that_one_side_lacks_are_kept_and_named(capsys: pytest.CaptureFixture[str]):
    first = document(row_stats__torch=2.0, row_stats__triton=1.0, row_grad__torch=1.0)
    second = document(row_stats__torch=1.0, row_stats__triton=None, token_logprob__torch=3.0)
    rows = compare_documents(first, second)
    assert [(row.case, row.side, *row.ratios) for row in rows] == [
        ("row_stats", "torch", 2.0),
        ("row_stats", "triton", None),
        ("row_grad", "torch", None),
        ("token_logprob", "torch", None),
    ]
    assert compare(first, second) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "not in B at N=1 H=2 V=3: row_stats (triton), row_grad (torch)" in shown
    assert "not in A at N=1 H=2 V=3: token_logprob (torch)" in shown


def test_shapes_are_the_same_by_their_sizes(capsys: pytest.CaptureFixture[str]):
    first, second = document(row_stats__torch=2.0), document(row_stats__torch=1.0)
    second["shapes"][0]["name"] = "another name"
    assert len(compare_documents(first, second)) == 1
    second["shapes"][0]["V"] = 4
    assert [row.ratios for row in compare_documents(first, second)] == [(None,), (None,)]
    assert compare(first, second) == 0
    shown = capsys.readouterr().out
    assert "not in B: anything at N=1 H=2 V=3" in shown
    assert "not in A: anything at N=1 H=2 V=4" in shown
    assert "the two have no shape in common" in shown


def test_other_dtypes_are_pointed_out(capsys: pytest.CaptureFixture[str]):
    second = document(row_stats__torch=1.0)
    assert compare(document(row_stats__torch=1.0), second) == 0
    assert "unlike things" not in capsys.readouterr().out
    assert compare(document(row_stats__torch=1.0), {**copy.deepcopy(second), "dtype": "bfloat16"}) == 0
    assert "unlike things" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (None, ["b.json", "no such file"]),
        ("{torn", ["b.json is not JSON"]),
        ('{"schema": "hwgrpo.bench.kernels/2"}', ["'hwgrpo.bench.kernels/2'", "compares 'hwgrpo.bench.kernels/1'"]),
        ('{"schema": "hwgrpo.bench.step/1"}', ["'hwgrpo.bench.step/1'", "hwgrpo bench kernels --json"]),
        ("[1]", ["the schema None"]),
    ],
)
def test_a_file_of_another_kind_is_refused(text: str | None, parts: list[str], capsys: pytest.CaptureFixture[str]):
    Path("a.json").write_text(json.dumps(document(row_stats__torch=1.0)))
    if text is not None:
        Path("b.json").write_text(text)
    assert main(["bench", "compare", "a.json", "b.json"]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    for part in parts:
        assert part in shown.err
