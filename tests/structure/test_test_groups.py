"""Every folder of tests is in exactly one group of scripts/test.sh, so that no test is left out unnoticed."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes.groups import begin_with_slow_files, group_of_folder, scope_of

REPO = Path(__file__).parents[2]
RUNNER = REPO / "scripts" / "test.sh"


def groups():
    listed = subprocess.run(["bash", RUNNER, "--list"], capture_output=True, text=True, check=True).stdout
    return {name: folders for name, *folders in map(str.split, listed.splitlines())}


def numeric_files() -> list[str]:
    """Return the test files of the group older_cpu."""
    [files] = re.findall(r'^numeric="\\\n((?:.*\n)*?.*)"$', RUNNER.read_text(), re.MULTILINE)
    return files.split()


def test_every_test_folder_is_in_a_group_and_every_folder_of_a_group_exists():
    there = {str(path.relative_to(REPO / "tests").parent) for path in (REPO / "tests").rglob("test_*.py")}
    top = {folder.split("/")[0] for folder in there}
    grouped = {folder for folders in groups().values() for folder in folders}
    assert "." not in top, "a test file lies in tests/ itself: move it into a folder that a group runs"
    assert not [file for file in numeric_files() if not (REPO / "tests" / file).is_file()]
    assert top - grouped == set(), "folders of tests that no group in scripts/test.sh runs"
    assert grouped - top == set(), "folders in scripts/test.sh that hold no test"


def test_no_folder_is_in_two_groups():
    folders = [folder for folders in groups().values() for folder in folders]
    assert len(folders) == len(set(folders))


def test_every_group_says_how_it_runs():
    lines = [line.split() for line in (REPO / "tests" / "groups.txt").read_text().splitlines()]
    assert {how for _, how, *_ in lines} == {"together", "own_process", "alone", "-"}
    assert [name for name, how, *_ in lines if how == "-"] == ["slow", "older_cpu"]


def test_a_group_is_a_marker_of_its_tests(request: pytest.FixtureRequest):
    assert request.node.get_closest_marker("structure")
    assert set(groups()) - {"slow", "older_cpu"} == set(group_of_folder().values())


@pytest.mark.parametrize(
    ("nodeid", "dist", "scope"),
    [
        ("tests/vllm/test_runs.py::test_some", "loadfile", "vllm"),
        ("tests/cli/test_env.py::test_some[a-b]", "loadfile", "tests/cli/test_env.py"),
        ("tests/compile/test_binaries.py::test_some[sm_90-bf16 V=1-row_stats]", "loadgroup", "sm_90"),
        (
            "tests/interpreter/test_rows.py::test_some[a-b]",
            "loadgroup",
            "tests/interpreter/test_rows.py::test_some[a-b]",
        ),
    ],
)
def test_tests_that_share_what_takes_long_to_start_stay_on_one_worker(nodeid, dist, scope):
    assert scope_of(nodeid, dist) == scope


def test_files_with_slow_tests_begin_first_and_each_kind_keeps_its_order():
    class Item:
        def __init__(self, path: str, name: str) -> None:
            self.path, self.name = Path(path), name

        def get_closest_marker(self, name: str) -> bool:
            return self.name.startswith(name)

    names = ["fast1", "fast2", "fast3", "slow4", "slow5", "fast6", "fast7"]
    items = [Item(file, name) for file, name in zip("aabbccd", names, strict=True)]
    begin_with_slow_files(items)  # pyright: ignore[reportArgumentType]
    assert [item.name[-1] for item in items] == [*"3456127"]


def test_an_unknown_group_is_refused_with_the_list_of_groups():
    result = subprocess.run(["bash", RUNNER, "unti"], capture_output=True, text=True)
    assert result.returncode == 2
    assert "'unti'" in result.stderr
    assert all(name in result.stderr for name in groups())


@pytest.fixture
def runner(tmp_path):
    """A copy of the runner in a repository where no group has a test; tests/gpu/accelerator.py is given."""
    for folder in ("scripts", "tests/gpu", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(RUNNER, tmp_path / "scripts" / "test.sh")
    shutil.copy(REPO / "tests" / "groups.txt", tmp_path / "tests")
    (tmp_path / "scripts" / "setup.sh").write_text("")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n")
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    # these tests start some fifty processes of pytest: those of hypothesis and others are four fifths of each start
    environ = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}

    def run(accelerator, *groups):
        (tmp_path / "tests" / "gpu" / "accelerator.py").write_text(accelerator)
        return subprocess.run(
            ["bash", tmp_path / "scripts" / "test.sh", *groups],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env=environ,
        )

    return run


def test_a_machine_without_an_accelerator_has_nothing_for_the_group_gpu_and_says_why(runner):
    done = runner("print('no GPU in sight')", "gpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing here for the group gpu: no GPU in sight" in done.stdout
    assert "0 passed, 0 failed, 0 skipped" in done.stdout


@pytest.mark.parametrize("accelerator", ["raise SystemExit(1)", "raise RuntimeError('it is here, and broken')"])
def test_a_group_gpu_without_tests_fails_where_an_accelerator_is(runner, accelerator):
    done = runner(accelerator, "gpu")
    assert done.returncode == 1
    assert "no test ran in: gpu" in done.stdout


def test_any_other_group_without_tests_fails(runner):
    done = runner("print('no GPU in sight')", "interpreter")
    assert done.returncode == 1
    assert "no test ran in: interpreter" in done.stdout


def test_tests_that_run_side_by_side_are_all_counted_and_one_that_fails_fails_the_group(runner, tmp_path):
    (tmp_path / "tests" / "kernels").mkdir()
    file = tmp_path / "tests" / "kernels" / "test_some.py"
    some = "import pytest\n@pytest.mark.parametrize('number', range(9))\ndef test_some(number): assert number != {}\n"
    file.write_text(some.format(9))
    done = runner("", "kernels")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "9 passed, 0 failed, 0 skipped" in done.stdout
    file.write_text(some.format(8))
    done = runner("", "kernels")
    assert done.returncode == 1
    assert "8 passed, 1 failed, 0 skipped" in done.stdout


def test_what_failed_is_told_once_more_at_the_end_each_reason_once(runner, tmp_path):
    (tmp_path / "tests" / "perf").mkdir()
    (tmp_path / "tests" / "perf" / "test_some.py").write_text(
        "import pytest\n@pytest.fixture(scope='module')\ndef made(): raise OSError('no room')\n"
        "def test_first(made): pass\ndef test_second(made): pass\ndef test_third(): assert 1 == 2, 'so many'\n"
    )
    done = runner("", "perf")
    assert done.returncode == 1
    *_, first, why, second, third, message, values, summary = done.stdout.splitlines()
    assert [line.partition(" ")[0] for line in (first, second, third)] == ["error", "error", "failure"]
    assert [line.partition("::")[2] for line in (first, second, third)] == ["test_first", "test_second", "test_third"]
    assert "no room" in why
    assert "so many" in message
    assert values == "    assert 1 == 2"
    assert summary == "0 passed, 3 failed, 0 skipped"


@pytest.mark.parametrize(
    ("folder", "wrong"),
    [
        ("compile", "compile"),
        pytest.param("compile", "perf", marks=pytest.mark.slow),
        pytest.param("perf", "perf", marks=pytest.mark.slow),
    ],
)
def test_slow_tests_are_those_of_all_folders_and_one_that_fails_fails_the_group(runner, tmp_path, folder, wrong):
    for name in {folder, wrong}:
        (tmp_path / "tests" / name).mkdir()
        slow = f"import pytest\n@pytest.mark.slow\ndef test_slow(): assert {wrong != name}\n"
        (tmp_path / "tests" / name / f"test_{name}.py").write_text(slow + "def test_fast(): assert False\n")
    done = runner("", "slow")
    assert done.returncode == 1
    assert f"{len({folder, wrong}) - 1} passed, 1 failed, 0 skipped" in done.stdout
    (tmp_path / "tests" / wrong / f"test_{wrong}.py").write_text("def test_fast(): assert False\n")
    done = runner("", "slow")
    assert done.returncode == (0 if folder != wrong else 1), done.stdout + done.stderr


@pytest.mark.slow
def test_where_everything_is_wanted_slow_tests_run_beside_the_others_and_are_counted_as_slow(runner, tmp_path):
    folders = {name: folders[0] for name, folders in groups().items() if folders}
    for name, folder in folders.items():
        (tmp_path / "tests" / folder).mkdir(exist_ok=True)
        (tmp_path / "tests" / folder / f"test_of_{name}.py").write_text("def test_fast(): pass\n")
    for name in numeric_files():
        (tmp_path / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / name).write_text("def test_some(): pass\n")
    slow = "import pytest\n@pytest.mark.slow\ndef test_slow(record_property): record_property('slow', '')\n"
    (tmp_path / "tests" / "perf" / "test_of_perf.py").write_text(slow + "def test_fast(): pass\n")
    done = runner("", "--all")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^== alone", done.stdout, re.MULTILINE)) == 1
    assert re.search(r"^slow +passed", done.stdout, re.MULTILINE)
    assert f"{len(folders) + 2 * len(numeric_files()) + 1} passed, 0 failed, 0 skipped" in done.stdout


def test_numeric_tests_run_once_more_as_on_an_older_processor_when_asked_for(runner, tmp_path):
    for name in numeric_files():
        (tmp_path / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / name).write_text("def test_some(): pass\n")
    wanted = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
    (tmp_path / "tests" / numeric_files()[0]).write_text(
        f"import os\ndef test_some(): assert {wanted}.items() <= os.environ.items()\n"
    )
    (tmp_path / "tests/kernels/test_other.py").write_text("def test_other(): assert False\n")
    done = runner("", "older_cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(numeric_files())} passed, 0 failed, 0 skipped" in done.stdout


def test_tests_that_could_not_run_are_named_with_their_reason(runner, tmp_path):
    (tmp_path / "tests" / "real").mkdir()
    file = tmp_path / "tests" / "real" / "test_some.py"
    skipped = "import pytest\n@pytest.mark.parametrize('n', (1, 2))\ndef test_far(n): pytest.skip('no registry')\n"
    file.write_text(skipped)
    done = runner("", "real")
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^real +not run ", done.stdout, re.MULTILINE)
    assert "\nnot run: 2 tests: no registry\n" in done.stdout
    assert "0 passed, 0 failed, 2 skipped" in done.stdout
    file.write_text(skipped + "def test_near(): pass\n")
    done = runner("", "real")
    assert re.search(r"^real +passed ", done.stdout, re.MULTILINE)
    assert "\nnot run: 2 tests: no registry\n" in done.stdout


def test_the_slowest_tests_are_listed_before_what_failed(runner, tmp_path):
    (tmp_path / "tests" / "perf").mkdir()
    (tmp_path / "tests" / "perf" / "test_some.py").write_text(
        "import time\ndef test_quick(): pass\ndef test_sleepy(): time.sleep(0.3)\n"
    )
    lines = runner("", "perf").stdout.splitlines()
    first = lines.index("the slowest tests:")
    assert [line.partition("::")[2] for line in lines[first + 1 : first + 3]] == ["test_sleepy", "test_quick"]


def test_a_test_of_the_group_gpu_that_fails_is_a_failure_wherever_it_runs(runner, tmp_path):
    (tmp_path / "tests" / "gpu" / "test_wrong.py").write_text("def test_wrong(): assert False")
    assert runner("print('no GPU in sight')", "gpu").returncode == 1
