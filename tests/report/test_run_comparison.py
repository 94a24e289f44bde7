"""Runs are compared by hand-made metrics: the first difference, in the order of a step, and what explains it."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hwgrpo.cli.main import main
from hwgrpo.cli.run_comparison_text import comparison_text
from hwgrpo.config.schema import KlConfig, OptimConfig
from hwgrpo.errors import ConfigError
from hwgrpo.report.compared_metrics import STAGES, placed
from hwgrpo.report.loaded_run import LoadedRun, load_run
from hwgrpo.report.run_comparison import MetricComparison, RunComparison, compare
from hwgrpo.report.run_data import RunRecord
from tests.docs.pages import page, tables

STEPS = 12
NOISE = (0.31, -0.12, 0.08, -0.42, 0.23, 0.05, -0.18, 0.4, -0.27, 0.11, -0.33, 0.19)
"""Scatter of a curve."""
OTHER_SEED = {"trainer": {"seed": 1}}

Make = Callable[..., LoadedRun]


def step_metrics(step: int) -> dict[str, float]:
    noise = NOISE[step - 1] / 10
    return {
        "prompt_length/mean": 10.0,
        "response_length/mean": 20 + noise,
        "reward": 0.5 + noise,
        "critic/advantages/max": 1.0,
        "rollout_corr/k3_kl": 1e-4 * (2 + noise),
        "actor/loss": noise,
        "actor/kl_loss": 0.01 + noise / 100,
        "actor/lr": 1e-3,
        "actor/grad_norm": 1 + noise,
        "actor/entropy": 2 + noise,
        "timing_s/step": 1.0,
    }


METRICS = {step: step_metrics(step) for step in range(1, STEPS + 1)}


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Return a function that writes and reads a run: `METRICS` with changes by step, and records of its completions."""

    def made(
        changes: Mapping[int, Mapping[str, float | None]] | None = None,
        *,
        metrics: Mapping[int, Mapping[str, float]] = METRICS,
        samples: Sequence[Mapping[str, Any]] = (),
        config: Mapping[str, Any] | None = None,
        environment: Mapping[str, Any] | None = None,
        warnings: Sequence[Mapping[str, Any]] = (),
    ) -> LoadedRun:
        folder = tmp_path / f"run{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        lines = []
        for step, values in metrics.items():
            merged = {**values, **(changes or {}).get(step, {})}
            lines.append({"step": step, **{name: value for name, value in merged.items() if value is not None}})
        write(folder / "metrics.jsonl", lines)
        write(folder / "completions.jsonl", samples)
        write(folder / "warnings.jsonl", warnings)
        (folder / "config.yaml").write_text(json.dumps(config or {"trainer": {"seed": 0}}))
        (folder / "environment.json").write_text(
            json.dumps({"backend": "cpu", "dtype": "float32", **(environment or {})})
        )
        return load_run(folder)

    return made


def write(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def from_step(step: int, name: str, gap: float) -> dict[int, dict[str, float]]:
    return {each: {name: METRICS[each][name] + gap} for each in range(step, STEPS + 1)}


def row(result: RunComparison, name: str) -> MetricComparison:
    return next(each for each in result.metrics if each.name == name)


def text(a: LoadedRun, b: LoadedRun, *, every: bool = False) -> str:
    return comparison_text(a, b, compare(a, b), every=every, columns=None)


def test_equal_runs_are_identical_but_for_time(make: Make):
    a, b = make(), make({3: {"timing_s/step": 9.0}, 4: {"perf/throughput": 1.0}})
    result = compare(a, b)
    assert (result.verdict, result.parts_from, result.parts_in) == ("identical", None, None)
    assert result.equal_until == STEPS
    assert text(a, b).endswith(f"verdict: identical to the bit in {STEPS} shared steps")


@pytest.mark.parametrize("value", [math.nextafter(METRICS[5]["actor/loss"], 1), -0.0, math.nan])
def test_any_difference_counts_between_runs_that_should_be_equal(value: float, make: Make):
    metrics = {**METRICS, 5: {**METRICS[5], "actor/loss": 0.0}} if value == 0 else METRICS
    result = compare(make(metrics=metrics), make({5: {"actor/loss": value}}, metrics=metrics))
    assert (result.verdict, result.parts_from, result.parts_in) == ("parts", 5, "actor/loss")
    assert result.equal_until == 4
    assert result.reasons == ()


def test_the_first_metric_is_the_first_in_the_flow_of_the_step(make: Make):
    later = {"actor/entropy": 9.0, "reward": 9.0, "critic/advantages/max": 9.0, "rollout_corr/k3_kl": 9.0}
    result = compare(make(), make({7: later, 8: {"response_length/mean": 9.0}}))
    assert (result.parts_from, result.parts_in) == (7, "reward")
    assert [each.name for each in result.metrics if each.step == 7] == [
        "reward",
        "critic/advantages/max",
        "rollout_corr/k3_kl",
        "actor/entropy",
    ]


def test_runs_that_sample_differently_are_the_same_within_noise(make: Make):
    scattered = {step: {"reward": 0.5 + NOISE[-step] / 10} for step in METRICS}
    result = compare(make(), make(scattered, config=OTHER_SEED))
    assert result.reasons == ("settings: trainer.seed",)
    assert (result.verdict, result.parts_from) == ("within_noise", None)
    assert row(result, "reward").step == 1
    assert row(result, "reward").parts is None
    assert "gaps below" in result.headline


def test_runs_part_from_the_step_at_which_the_gap_begins(make: Make):
    a, b = make(), make(from_step(6, "reward", 2.0), config=OTHER_SEED)
    result = compare(a, b)
    assert (result.verdict, result.parts_from, result.parts_in) == ("parts", 6, "reward")
    assert result.equal_until == 5
    assert (row(result, "reward").parts_a, row(result, "reward").parts_b) == pytest.approx((0.505, 2.505))
    assert "parts from step 6 in reward (A 0.505, B 2.505)" in result.headline


def test_another_gap_between_engine_and_trainer_is_named_and_parts_no_runs(make: Make):
    result = compare(make(), make(from_step(1, "rollout_corr/k3_kl", 1e-3), config=OTHER_SEED))
    assert (result.verdict, row(result, "rollout_corr/k3_kl").parts) == ("within_noise", 1)
    assert "differs from step 1, in rollout_corr/k3_kl" in result.headline


def test_a_nan_in_one_run_parts_whatever_the_noise(make: Make):
    result = compare(make(), make({4: {"actor/loss": math.nan}}, config=OTHER_SEED))
    assert (result.parts_from, result.parts_in) == (4, "actor/loss")


def test_extremes_and_the_learning_rate_do_not_part_runs(make: Make):
    result = compare(make(), make(from_step(1, "actor/lr", 1.0), config=OTHER_SEED))
    assert row(result, "actor/lr").step == 1
    assert result.verdict == "identical"
    result = compare(make(), make(from_step(2, "actor/lr", 1.0)))
    assert (result.verdict, result.parts_from, result.parts_in) == ("parts", 2, "actor/lr"), "no setting explains it"
    result = compare(make(), make(from_step(2, "critic/advantages/max", 1.0), config=OTHER_SEED))
    assert result.verdict == "within_noise"


def test_too_few_steps_let_any_difference_count(make: Make):
    few = {step: METRICS[step] for step in (1, 2, 3)}
    result = compare(make(metrics=few), make({2: {"reward": 0.6}}, metrics=few, config=OTHER_SEED))
    assert (result.verdict, result.parts_from, result.parts_in) == ("parts", 2, "reward")
    assert "too few to estimate noise" in result.headline


def test_two_validations_are_too_few_to_be_judged(make: Make):
    def validated(value: float, steps: int) -> dict[int, dict[str, float]]:
        metrics = {step: METRICS[step] for step in range(1, steps + 1)}
        name = "val-core/x/reward/greedy"
        return {0: {name: 0.3}, **metrics, steps: metrics[steps] | {name: value}}

    a_bit = {2: {"reward": METRICS[2]["reward"] + 1e-4}}
    a, b = make(metrics=validated(0.5, STEPS)), make(a_bit, metrics=validated(0.9, STEPS), config=OTHER_SEED)
    result = compare(a, b)
    assert result.verdict == "within_noise"
    assert row(result, "val-core/x/reward/greedy").errors is None
    assert "have too few values to be judged" in result.headline
    result = compare(make(metrics=validated(0.5, 3)), make(metrics=validated(0.9, 3), config=OTHER_SEED))
    assert (result.verdict, result.parts_in) == ("parts", "val-core/x/reward/greedy")


def test_only_shared_steps_are_compared_and_validations_of_either_run_may_be_missing(make: Make):
    longer = {**METRICS, 13: METRICS[1], 14: {**METRICS[2], "val/loss": 1.0}}
    a, b = make(), make({12: {"val/loss": 2.0}}, metrics=longer)
    result = compare(a, b)
    assert result.steps == tuple(METRICS)
    assert result.verdict == "identical"
    assert result.only_b == ("val/loss",)
    assert result.headline.endswith("in 12 shared steps; not compared: 1 metric of one run alone")
    assert "steps 1 to 14" in text(a, b)


def test_a_metric_that_one_run_lacks_at_a_shared_step_is_a_difference(make: Make):
    result = compare(make(), make({5: {"actor/grad_norm": None}}))
    assert (result.parts_from, result.parts_in) == (5, "actor/grad_norm")


def sample(step: int, uid: str, response: str = "x", **fields: Any) -> dict[str, Any]:
    record = {"step": step, "uid": uid, "prompt": f"p{uid}", "response": response, "length": 1, "finished": True}
    return {**record, "reward": 1.0, "rewards": {"f": 1.0}, "advantage": 0.5, **fields}


SAMPLES = [sample(step, uid) for step in METRICS for uid in ("0:1", "0:1", "0:2")]


@pytest.mark.parametrize(
    ("change", "stage"),
    [
        ({"uid": "0:9", "prompt": "p0:9"}, "prompts"),
        ({"prompt": "other"}, "prompts"),
        ({"response": "y"}, "responses"),
        ({"reward": 0.0}, "rewards"),
        ({"advantage": -0.5}, "advantages"),
    ],
)
def test_completions_part_in_the_stage_that_made_them(change: dict[str, Any], stage: str, make: Make):
    changed = [*SAMPLES]
    changed[11] = {**changed[11], **change}  # the third one of step 4
    result = compare(make(samples=SAMPLES), make(samples=changed))
    assert (result.parts_from, result.parts_in) == (4, f"logged completions: {stage}")


def test_runs_that_logged_other_numbers_of_completions_are_compared_as_far_as_both_did(make: Make):
    a, b = make(samples=SAMPLES), make(samples=[each for i, each in enumerate(SAMPLES) if i % 3 != 2])
    result = compare(a, b)
    assert result.verdict == "identical"
    assert result.completions == 2 * STEPS


def test_a_long_response_differs_at_its_end(make: Make):
    long = "x" * 5000
    result = compare(make(samples=[sample(1, "0:1", long)]), make(samples=[sample(1, "0:1", long + "y")]))
    assert result.parts_in == "logged completions: responses"


def test_a_run_that_repeated_steps_and_was_killed_in_a_line_is_read(make: Make):
    a, b = make(samples=SAMPLES), make(samples=SAMPLES)
    folder = b.record.folder
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # steps 5 and 6 of an attempt before the resumed one, then a line that a killed process began
    write(folder / "metrics.jsonl", [*steps[:4], {**steps[4], "reward": 7.0}, {**steps[5], "reward": 8.0}, *steps[4:]])
    write(folder / "completions.jsonl", [*SAMPLES[:12], *(sample(step, "0:7") for step in (5, 6)), *SAMPLES[12:]])
    for name in ("metrics.jsonl", "completions.jsonl"):
        with (folder / name).open("a") as file:
            file.write('{"step": 13, "rew')
    assert compare(a, load_run(folder)).verdict == "identical"


def test_settings_that_differ_are_listed_with_defaults_and_without_folders(make: Make):
    a = make(config={"trainer": {"output_dir": "a", "save_every": 1}, "optim": {"lr": 0.5}, "observe": {"metrics": []}})
    b = make(config={"trainer": {"output_dir": "b", "save_every": 2}, "algorithm": {"kl": {"coef": 0.5}}})
    listed = {each.name: (each.a, each.b, each.explains) for each in compare(a, b).differences}
    assert listed == {
        "algorithm.kl.coef": (f"{KlConfig().coef} (default)", "0.5", True),
        "optim.lr": ("0.5", f"{OptimConfig().lr} (default)", True),
        "trainer.save_every": ("1", "2", False),
    }


@pytest.mark.parametrize(("schedule", "counts"), [("constant", False), ("cosine", True)])
def test_the_length_of_a_run_counts_where_a_schedule_ends_with_it(schedule: str, counts: bool, make: Make):
    runs = [make(config={"trainer": {"max_steps": steps}, "optim": {"schedule": schedule}}) for steps in (6, 8)]
    [found] = compare(*runs).differences
    assert (found.name, found.explains) == ("trainer.max_steps", counts)


@pytest.mark.parametrize(
    ("environments", "group", "name", "explains"),
    [
        (({"torch": "2.13.0"}, {"torch": "2.14.0"}), "versions", "torch", True),
        (({"packages": {"vllm": "1"}}, {"packages": {"vllm": "2"}}), "versions", "vllm", True),
        (({"source_sha256": "a" * 64}, {"source_sha256": "b" * 64}), "versions", "source_sha256", True),
        (({"device": "x86_64"}, {"device": "H100"}), "machine", "device", True),
        (({"dtype": "bfloat16"}, {}), "machine", "dtype", True),
        (({"ranks": 1}, {"ranks": 2}), "machine", "ranks", True),
        (({"ranks": 1}, {}), "machine", "ranks", False),
        (
            ({"data": {"train": {"rows": 5, "sha256": "a"}}}, {"data": {"train": {"rows": 6, "sha256": "b"}}}),
            "data",
            "data.train",
            True,
        ),
        (({"code": {"reward.functions.0.name": "a"}}, {"code": {"reward.functions.0.name": "b"}}), "data",
         "sha256 of reward.functions.0.name", True),
    ],
)  # fmt: skip
def test_versions_machine_and_data_explain_a_difference(
    environments: tuple[dict[str, Any], ...], group: str, name: str, explains: bool, make: Make
):
    result = compare(*(make(environment=each) for each in environments))
    [found] = [each for each in result.differences if each.name != "template_date"]
    assert (found.group, found.name, found.explains) == (group, name, explains)
    assert bool(result.reasons) == explains


def test_the_date_of_a_template_is_named_only_where_the_texts_may_differ(make: Make):
    same = {"data": {"train": {"rows": 1, "sha256": "a", "text_sha256": "b"}}}
    dates = [{"template_date": date, **same} for date in ("2026-01-01", "2026-01-02")]
    assert compare(*(make(environment=each) for each in dates)).differences == ()
    other = {"data": {"train": {"rows": 1, "sha256": "a", "text_sha256": "c"}}}
    result = compare(make(environment=dates[0]), make(environment={**dates[1], **other}))
    assert [each.name for each in result.differences] == ["data.train", "template_date"]


def test_a_resumed_run_shows_its_checkpoint_and_what_had_changed(make: Make):
    start = {"step": 0, "checkpoint": None, "notes": []}
    note = "changed since the checkpoint: optim.lr 0.001 -> 0.002"
    resumed = {"step": 6, "checkpoint": "runs/b/checkpoints/step-00000006", "notes": [note]}
    a = make(environment={"starts": [start]})
    b = make(environment={"starts": [start, {**resumed, "notes": []}]})
    result = compare(a, b)
    assert result.reasons == ()
    assert "resumed after step 6 from runs/b/checkpoints/step-00000006" in " ".join(text(a, b).split())
    result = compare(a, make(environment={"starts": [start, resumed]}))
    assert result.reasons == ("start: note of B",)
    assert any(note in each.b for each in result.differences)


@pytest.mark.parametrize(
    ("config", "environment", "reason"),
    [
        ({}, {"backend": "cuda"}, "trainer.deterministic"),
        ({"trainer": {"deterministic": True}}, {"backend": "cuda"}, None),
        ({"rollout": {"engine": "vllm"}}, {}, "the engine of A"),
        ({"rollout": {"partial": True}}, {}, "which weights sample"),
        ({"rollout": {"max_staleness": 2}}, {}, "which weights sample"),
        ({"rollout": {"max_staleness": 1}}, {}, None),
    ],
)
def test_runs_whose_bits_nothing_fixes_need_not_be_equal(
    config: dict[str, Any], environment: dict[str, Any], reason: str | None, make: Make
):
    result = compare(*(make(config={"x": 1, **config}, environment=environment) for _ in range(2)))
    assert any(reason in each for each in result.reasons) if reason else not result.reasons


def test_warnings_of_one_run_alone_are_listed_with_their_first_step(make: Make):
    def warning(step: int, name: str) -> dict[str, Any]:
        return {"step": step, "name": name, "seen": f"{name} seen", "meaning": "", "remedies": []}

    a = make(warnings=[warning(3, "both"), warning(5, "mine"), warning(9, "mine")])
    b = make(warnings=[warning(4, "both"), warning(2, "theirs")])
    assert [(each.name, each.run, each.step) for each in compare(a, b).warnings] == [
        ("theirs", "B", 2),
        ("mine", "A", 5),
    ]
    assert "A, step 5, mine: mine seen" in text(a, b)


def test_gap_metrics_are_shown_at_the_last_step_before_the_runs_part(make: Make):
    result = compare(make(), make({6: {"reward": 9.0}, 5: {"timing_s/step": 3.0}}))
    assert result.gap_step == 5
    assert result.gap == (("rollout_corr/k3_kl", *[METRICS[5]["rollout_corr/k3_kl"]] * 2),)
    assert compare(make(), make({1: {"reward": 9.0}})).gap_step == 1


def test_the_output_fits_100_columns(make: Make):
    key = "reward/" + "long" * 8
    wide = {step: {"actor/loss": -1.23456e-11 * step, key: step / 7, "rollout_corr/kl": 1e-9} for step in METRICS}
    metrics = {step: {**METRICS[step], key: 0.0, "rollout_corr/kl": -1e-9} for step in METRICS}
    a, b = (
        make(metrics=metrics, samples=SAMPLES),
        make(wide, metrics=metrics, samples=[sample(1, "0:3", "\x1b[2J" * 40)]),
    )
    a, b = (replace(run, record=replace(run.record, folder=Path("runs", "long" * 20))) for run in (a, b))
    shown = text(a, b, every=True)
    assert max(map(len, shown.splitlines())) <= 100, shown
    assert "\x1b" not in shown


def test_every_metric_of_the_page_of_metrics_has_a_stage_or_is_no_result():
    names = {
        name.strip("` ")
        for table in tables(page("metrics.md"))
        for line in table
        if "metric" in line
        for name in line["metric"].split(", ")
    }
    names -= {"step"}
    assert len(names) > 90
    unplaced = {name for name in names if placed(name) is None}
    others = {name for name in names if (place := placed(name)) and STAGES[place[0]].name == "other"}
    assert others == set()
    assert {name.split("/")[0] for name in unplaced} == {"timing_s", "perf", "rollout", "tools"}
    assert {name for name in unplaced if name.startswith("tools")} == {"tools/<tool>/seconds"}
    assert not unplaced & {"perf/response_tokens", "perf/total_num_tokens"}


def test_runs_that_cannot_be_compared_are_refused(make: Make, tmp_path: Path):
    early = make(metrics={step: METRICS[step] for step in (1, 2)})
    late = make(metrics={step: METRICS[step] for step in (5, 6)})
    with pytest.raises(ConfigError, match=r"run0 \(steps 1 to 2\) and .*run1 \(steps 5 to 6\) share no step"):
        compare(early, late)
    with pytest.raises(ConfigError, match="share no metric"):
        compare(make(metrics={1: {"reward": 1.0}}), make(metrics={1: {"val/loss": 1.0}}))
    with pytest.raises(ConfigError, match="run4 has no metrics yet"):
        compare(make(metrics={}), early)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["run0", "nowhere"], ["nowhere", "no such folder"]),
        (["run0", "."], ["is not the folder of a run", "run0"]),
        (["run0", "run1/../run0"], ["run1/../run0 is the same folder as run0"]),
        (["run0", "run1", "run1"], ["run1 is the same folder as run1"]),
        (["run0", "run2"], ["run2", "metrics.jsonl, line 2", "repair the line"]),
        (["run0", "run3"], ["run3", "changed"]),
        (["run0", "run4"], ["run4", "completions.jsonl, line 1"]),
        (["run0"], ["required: B"]),
    ],
)
def test_bad_input_is_an_error_that_names_it_and_exit_code_2(
    words: list[str], parts: list[str], make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    for _ in range(5):
        make()
    (tmp_path / "run2/metrics.jsonl").write_text('{"step": 1, "reward": 1}\nnonsense\n{"step": 2}\n')
    (tmp_path / "run3/metrics.jsonl").write_text('{"step": 1, "reward": "much"}\n')
    (tmp_path / "run4/completions.jsonl").write_text("[]\n")
    monkeypatch.chdir(tmp_path)
    try:
        code = main(["compare-runs", *words])
    except SystemExit as error:  # by argparse
        code = error.code
    assert code == 2
    error = capsys.readouterr().err
    assert all(part in error for part in parts), error


def test_the_command_prints_strict_json_and_its_exit_code_says_whether_runs_part(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
):
    make()
    make({4: {"actor/loss": math.nan}})
    make()
    monkeypatch.chdir(tmp_path)
    assert main(["compare-runs", "run0", "run2"]) == 0
    assert main(["compare-runs", "run0", "run2", "run1"]) == 1
    capsys.readouterr()
    assert main(["compare-runs", "run0", "run1", "run2", "--json"]) == 1

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    document = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert document["schema"] == "hwgrpo.compare_runs/1"
    assert [(each["b"], each["verdict"], each["parts_from"]) for each in document["comparisons"]] == [
        ("run1", "parts", 4),
        ("run2", "identical", None),
    ]
    [loss] = [each for each in document["comparisons"][0]["metrics"] if each["name"] == "actor/loss"]
    assert loss["b"] == "NaN"


def test_a_damaged_record_is_reported_and_the_rest_compared(make: Make):
    a, b = make(), make()
    (b.record.folder / "environment.json").write_text('{"torch": "2.1')
    b = load_run(b.record.folder)
    assert isinstance(b.record, RunRecord)
    assert "B: environment.json could not be read" in " ".join(text(a, b).split())


def test_the_help_has_the_exit_codes(capsys):
    with pytest.raises(SystemExit):
        main(["compare-runs", "--help"])
    assert "1 they part" in " ".join(capsys.readouterr().out.split())
