"""What `hwgrpo bench step` says: what is wrong and why, other work on the machine, and the sum of the stages."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hwgrpo.bench.step_result import BatchShape, LayoutBench, LayoutDifference, StepBench
from hwgrpo.bench.step_tables import show_step
from hwgrpo.bench.times import Times, total


def seconds(*wall: float) -> Times:
    return Times(list(wall), list(wall))


def layout(name: str, *wall: float, ratio: float = 1.0, apart: float = 3e-7) -> LayoutBench:
    return LayoutBench(
        name,
        "timed",
        "",
        LayoutDifference(apart, apart, apart),
        1_234_567,
        234_567,
        10**13,
        3 * 2**30,
        ratio,
        seconds(*wall),
    )


def bench(*layouts: LayoutBench, chosen: str = "grouped") -> StepBench:
    stages = {name: seconds(0.5, 0.6) for name in ("gen", "reward", "adv", "old_log_prob", "ref", "sync")}
    own = next(one for one in layouts if one.name == chosen)
    return StepBench(
        machine={
            "backend": "cpu", "device": "A Processor", "arch": "x86_64", "cores": 2, "load": 0.1, "threads": 1,
            "hwgrpo": "0.1.0", "torch": "2.13.0", "transformers": "5.19.0", "python": "3.11.7",
        },
        model={
            "path": "a/model", "architecture": "QwenForCausalLM", "parameters": 10, "trainable": 4, "dtype": "float32",
            "attention": "sdpa",
        },
        batch=BatchShape(64, 8, 256.0, 262_144, 234_567, 4096),
        chosen=chosen,
        tolerance=LayoutDifference(1e-5, 1e-5, 1e-4),
        notes=["something to know"],
        stages=stages,
        layouts=list(layouts),
        step=total([*stages.values(), own.times]) if own.state == "timed" else None,
    )  # fmt: skip


PADDED, GROUPED = layout("padded", 123.4, 130.0), layout("grouped", 41.1, 42.0, ratio=3.0)
WRONG = LayoutBench("packed", "wrong", "it trains 1 response tokens of 2", LayoutDifference(1e-7, 3e-4, 2e-2))
IMPOSSIBLE = LayoutBench("grouped_masked", "impossible", "its rows are too long")


def shown(result: StepBench, capsys: pytest.CaptureFixture[str]) -> str:
    show_step(result, "mine.yaml")
    return capsys.readouterr().out


def test_reasons_notes_and_a_missing_step_are_told(capsys: pytest.CaptureFixture[str]):
    text = shown(bench(PADDED, WRONG, IMPOSSIBLE, chosen="packed"), capsys)
    assert "WRONG: packed is not timed: it trains 1 response tokens of 2" in text
    assert "not possible: grouped_masked: its rows are too long" in text
    assert "note: something to know" in text
    assert "no time of a full step: the recipe's layout, packed, is wrong" in text
    assert "full step  " not in text
    assert "4 trained" in text


def test_other_work_on_the_machine_is_told_where_it_can_be_known(capsys: pytest.CaptureFixture[str]):
    told = "kept this process off its core for"
    result = bench(PADDED, GROUPED)
    assert told not in shown(result, capsys)
    quarter = [Times(times.wall_s, [0.25 * s for s in times.wall_s]) for times in (PADDED.times, GROUPED.times)]
    result.stages = {}
    result.layouts = [replace(one, times=times) for one, times in zip((PADDED, GROUPED), quarter, strict=True)]
    assert f"{told} 75% of the time" in shown(result, capsys)
    result.machine = {**result.machine, "threads": 2}
    assert told not in shown(result, capsys)


def test_the_whole_step_is_the_sum_of_its_stages_and_shares_are_of_it(capsys: pytest.CaptureFixture[str]):
    lines = {line[:20].strip(): line.split() for line in shown(bench(PADDED, GROUPED), capsys).splitlines()}
    assert lines["full step"][2] == "44,850"
    assert lines["update, grouped"][-2:] == ["93%", f"{234_567 / 41.55:,.0f}"]
    assert lines["generate"][-1] == f"{262_144 / 0.55:,.0f}"
    stages = list(lines)
    assert stages.index("reference log-probs") < stages.index("update, grouped") < stages.index("weights to rollout")
