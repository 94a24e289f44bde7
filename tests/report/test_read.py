"""A run's folder is read whatever state the run is in, and what is no run is refused with a remedy."""

import fcntl
import json
from pathlib import Path

import pytest
import yaml

from hwgrpo.errors import ConfigError, DataError
from hwgrpo.report.run_data import read_run

STEPS = [{"step": step, "reward": 0.1 * step, "timing_s/gen": 1.0, "timing_s/step": 2.0} for step in range(1, 4)]


def test_a_finished_run_is_read_as_its_summary_says(trained: Path):
    record = read_run(trained)
    assert record.status == "completed"
    assert record.problems == []
    assert record.summary == json.loads((trained / "summary.json").read_text())
    assert sorted(record.metrics) == [0, 1, 2, 3, 4, 5, 6]
    assert record.config["rollout"]["n"] == 4
    assert record.kernels["choices"]


def test_a_killed_run_is_stopped_and_its_summary_comes_from_its_metrics(make_run):
    record = read_run(make_run(STEPS))
    assert record.status == "stopped"
    assert record.summary["steps"] == 3
    assert record.summary["total_steps"] == 40
    assert record.summary["training_s"] == pytest.approx(6.0)
    assert record.summary["stages"]["gen"]["share"] == pytest.approx(0.5)


def test_a_run_whose_folder_is_held_is_running(make_run):
    folder = make_run(STEPS)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read_run(folder).status == "running"
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert read_run(folder).status == "stopped"


def test_another_reader_of_the_folder_is_no_run(make_run):
    folder = make_run(STEPS)
    (folder / ".lock").touch()
    with (folder / ".lock").open() as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        assert read_run(folder).status == "stopped"


def test_looking_at_a_run_does_not_keep_it_from_starting(make_run):
    folder = make_run(STEPS)
    (folder / ".lock").touch()
    read_run(folder)
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_the_summary_of_an_earlier_attempt_does_not_speak_for_a_run_that_went_on(make_run):
    folder = make_run(STEPS)
    (folder / "summary.json").write_text(json.dumps({"status": "interrupted", "steps": 2}))
    record = read_run(folder)
    assert (record.status, record.summary["steps"]) == ("stopped", 3)
    (folder / "summary.json").write_text(json.dumps({"status": "interrupted", "steps": 3}))
    assert read_run(folder).status == "interrupted"


def test_a_torn_last_line_does_not_count(make_run):
    folder = make_run(STEPS)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')
    assert sorted(read_run(folder).metrics) == [1, 2, 3]


def test_a_damaged_line_before_the_last_is_an_error_that_names_file_and_line(make_run):
    folder = make_run(STEPS)
    (folder / "metrics.jsonl").write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2"):
        read_run(folder)


def test_a_half_written_environment_is_a_problem_in_words_and_the_rest_is_read(make_run):
    folder = make_run(STEPS)
    (folder / "environment.json").write_text('{"torch": "2.1')
    (folder / "kernels.json").write_text("[]")
    record = read_run(folder)
    assert len(record.metrics) == 3
    assert [problem.split()[0] for problem in record.problems] == ["environment.json", "kernels.json"]


@pytest.mark.parametrize("resumes", ["1", "[1]", '{"step": 1}', "null"])
def test_resumes_that_are_no_records_are_a_problem_and_the_rest_is_read(make_run, resumes: str):
    folder = make_run(STEPS)
    (folder / "environment.json").write_text(f'{{"torch": "2.13.0", "resumes": {resumes}}}')
    record = read_run(folder)
    assert (record.resumes, record.environment) == ([], {"torch": "2.13.0"})
    assert ["its resumes" in problem for problem in record.problems] == [True]


def test_a_run_without_metrics_says_why(make_run):
    folder = make_run()
    assert "no metrics yet" in read_run(folder).problems[0]
    (folder / "config.yaml").write_text("observe: {loggers: [tensorboard]}\n")
    assert "jsonl among observe.loggers" in read_run(folder).problems[0]


def test_warnings_of_the_run_are_read(make_run):
    folder = make_run(STEPS)
    (folder / "warnings.jsonl").write_text(
        '{"step": 2, "name": "flat", "seen": "0.1", "meaning": "m", "remedies": []}\n'
    )
    assert [warning["name"] for warning in read_run(folder).warnings] == ["flat"]


def test_what_is_no_run_is_refused_with_its_path_and_a_remedy(tmp_path: Path, make_run):
    with pytest.raises(ConfigError, match=r"nowhere: there is no such folder; .*trainer\.output_dir"):
        read_run(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"empty is not the folder of a run .*trainer\.output_dir"):
        read_run(tmp_path / "empty")
    folder = make_run(STEPS)
    with pytest.raises(ConfigError, match=rf"it contains the folders of runs, name one of them: {folder}"):
        read_run(tmp_path)
    with pytest.raises(ConfigError, match=r"metrics\.jsonl is a file"):
        read_run(folder / "metrics.jsonl")


@pytest.mark.parametrize(
    ("kl", "largest"),
    [
        ({}, 10.0),
        ({"output_clamp": 5.0}, 5.0),
        ({"output_clamp": None}, None),
        ({"estimator": "k2"}, None),
        ({"new": 1}, 10.0),
    ],
)
def test_the_clamp_of_the_kl_is_that_of_the_run(make_run, kl, largest):
    folder = make_run(STEPS)
    (folder / "config.yaml").write_text(yaml.safe_dump({"algorithm": {"kl": kl}}))
    assert read_run(folder).largest_kl == largest
