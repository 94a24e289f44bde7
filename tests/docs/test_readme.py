"""Every command, link and figure of the README holds."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import launch, preloaded
from tests.support.processes.preloaded_programs import programs

REPO = Path(__file__).parents[2]
TEXT = (REPO / "README.md").read_text(encoding="utf-8")
PICTURES = REPO / "scripts" / "draw_readme_pictures.py"
MOST_LINES = 160
LARGEST_PICTURE = 200_000
ACTIVATE = "source .venv/bin/activate\n"

INLINE = {
    "hwgrpo bench step RECIPE": "hwgrpo bench step tiny_sort trainer.prompts_per_step=2 --repeat 1",
    "bash scripts/benchmarks.sh": "bash scripts/benchmarks.sh --list",
    "python scripts/record_hardware.py": "python scripts/record_hardware.py --help",
    "bash scripts/run_tiny_sort_npu.sh": "bash scripts/run_tiny_sort_npu.sh --dry-run || [ $? = 1 ]",
    "bash scripts/run_tiny_sort_rocm.sh": "bash scripts/run_tiny_sort_rocm.sh --dry-run || [ $? = 1 ]",
    "bash scripts/setup.sh --rollout vllm-ascend": (
        "HWGRPO_SETUP_FORCE=1 bash scripts/setup.sh --rollout vllm-ascend --backend npu --dry-run"
    ),
    "hwgrpo doctor --run": "hwgrpo doctor --run",
    "hwgrpo kernels": "hwgrpo kernels",
    "hwgrpo train mine.yaml --dry-run": "hwgrpo train tiny_sort --dry-run",  # mine.yaml: the test below
    "hwgrpo train mine.yaml": "hwgrpo train tiny_sort --print-config",
    "hwgrpo train --from verl run.sh": (
        "echo python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=train.parquet > run.sh"
        " && hwgrpo train --from verl run.sh --dry-run --set trainer.output_dir=runs/from_verl"
        " --set model.path=builtin://tiny --set 'data.train=task://sort?digits=2'"
        " --set 'reward.functions=[exact_match]'"
    ),
}
"""Command in a sentence -> its form for any machine: less work, or a dry run (exit code 1 without the device)."""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, flags=re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A folder with everything that a clone has, and the environment that `scripts/setup.sh` made."""
    folder = tmp_path_factory.mktemp("clone")
    for path in REPO.iterdir():
        if path.name not in ("runs", ".git"):
            (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture(scope="module")
def activated(tmp_path_factory):
    """Lines that activate the environment, in which `hwgrpo` is the program of `preloaded_programs`.

    The launcher of the first commands starts the environment's own.
    """
    tools = tmp_path_factory.mktemp("bin")
    with programs(tools):
        yield f"{ACTIVATE}export PATH={tools}:$PATH PYTHONPATH={launch.variables()['PYTHONPATH']}\n"


def run(clone: Path, command: str) -> str:
    """Run a command line as a person with a dumb terminal would; return what it prints."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=clone,
        env=env | {"TERM": "dumb", "OMP_NUM_THREADS": "1"},
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


@pytest.mark.slow
def test_the_first_commands_set_up_and_train_as_shown(clone, activated):
    begin, after, on_devices = blocks("bash")
    output = run(clone, begin)
    [shown] = blocks("text")
    labels = [re.split(r"\s{2,}", line)[0] for line in shown.splitlines()[2:]]
    assert [label for label in labels if label not in output] == []
    *_, greedy = re.findall(r"^task://sort greedy +([\d.]+) +([\d.]+)", output, flags=re.MULTILINE)
    assert float(greedy[1]) > float(greedy[0]) + 0.5
    assert after.startswith(ACTIVATE)
    output = run(clone, activated + after.removeprefix(ACTIVATE) + on_devices)
    assert (clone / "runs/tiny_sort/report.html").is_file()
    assert (clone / "runs/exported/model.safetensors").is_file()
    for expected in ("pass@8", "backend: cpu", "H100 SXM", "rollout.n = 8", "torchrun --nproc-per-node 8"):
        assert expected in output, expected


@pytest.mark.slow
@pytest.mark.parametrize("command", INLINE)
def test_a_command_in_a_sentence_runs(clone, activated, command):
    run(clone, activated + INLINE[command])


def test_every_command_in_a_sentence_is_among_those_that_run():
    assert set(re.findall(r"`((?:bash|python|hwgrpo) [^`]+)`", TEXT)) == set(INLINE)


@pytest.mark.slow
def test_the_recipe_trains_and_its_reward_is_called(clone, activated):
    [recipe] = blocks("yaml")
    (clone / "mine.yaml").write_text(recipe)
    (clone / "rewards.py").write_text("def brevity(completions, **columns):\n    return [0.25 for _ in completions]\n")
    for name in ("train.jsonl", "test.jsonl"):
        (clone / name).write_text('{"prompt": "sort 21=", "answer": "12"}\n{"prompt": "sort 43=", "answer": "34"}\n')
    assert "/models/Qwen3-0.6B" in recipe
    tiny = "'model.path=builtin://tiny?task=sort' rollout.max_response_tokens=4 trainer.prompts_per_step=2"
    output = run(clone, f"{activated}hwgrpo train mine.yaml {tiny} trainer.max_steps=1")
    assert "completed: 1 of 1 steps" in output
    assert '"rewards/brevity/mean": 0.25' in (clone / "runs/mine/metrics.jsonl").read_text()


def test_the_kernels_run_with_torch_alone(tmp_path):
    [block] = blocks("python")
    assert "with `PYTHONPATH=kernels`" in TEXT
    (tmp_path / "page.py").write_text(f"{block}\nassert hidden.grad.abs().sum() > 0\n")
    env = {"PYTHONPATH": str(REPO / "kernels"), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    subprocess.run([sys.executable, "page.py"], cwd=tmp_path, env=env, check=True)


def test_its_comparison_is_rows_of_the_page():
    text = TEXT.split("\n## Which one to use")[1].split("\n## ")[0]
    page = (REPO / "docs/compare.md").read_text(encoding="utf-8")
    rows, full = (
        [re.sub(r"\]\([^)]+\)|\[(docs/)?", "", line) for line in each.splitlines() if line.startswith("|")]
        for each in (text, page)
    )
    assert set(rows) <= set(full)
    assert len(rows) > 2


@pytest.mark.parametrize(
    ("sentence", "page", "pattern"),
    [
        (r"needs ([\d.]+) to ([\d.]+) times as much CPU time", "against_trl.md", r"ratio \| [\d.]+x \| ([\d.]+)x"),
        (r"samples ([\d.]+) to ([\d.]+) times as fast", "local_engine.md", r"ratio \| [\d.]+x \| ([\d.]+)x"),
    ],
)
def test_a_speed_is_the_range_on_its_page_of_results(sentence, page, pattern):
    [claimed] = re.findall(sentence, TEXT)
    ratios = [float(ratio) for ratio in re.findall(pattern, (REPO / "benchmarks/results" / page).read_text())]
    assert list(claimed) == [f"{min(ratios):.1f}", f"{max(ratios):.1f}"]


def test_it_is_short_and_its_pictures_are_small():
    assert len(TEXT.splitlines()) <= MOST_LINES
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", TEXT)
    assert pictures == ["docs/images/live.svg", "docs/images/report.png", "benchmarks/results/real_model.svg"]
    for picture in pictures:
        assert (REPO / picture).stat().st_size < LARGEST_PICTURE, picture
    assert "http://www.w3.org/2000/svg" in (drawn := (REPO / pictures[0]).read_text(encoding="utf-8"))
    assert drawn.count("://") == 2, "the namespace and task://sort: it loads nothing"


@pytest.mark.slow
def test_the_pictures_can_be_drawn_again(tmp_path):
    before = [(REPO / "docs/images" / name).stat().st_mtime_ns for name in ("live.svg", "report.png")]
    done = preloaded.run(0, str(PICTURES), "--smoke", cwd=tmp_path, env=launch.variables())
    assert done.returncode == 0, done.stderr
    assert "completed: 8 of 8 steps" in done.stdout
    for name in ("live.svg", "report.png"):
        assert int(re.findall(rf"{name}: (\d+) kB", done.stdout)[0]) > 5
    assert before == [(REPO / "docs/images" / name).stat().st_mtime_ns for name in ("live.svg", "report.png")]
