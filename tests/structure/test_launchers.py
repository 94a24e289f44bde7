"""The launchers are what their generator writes, and hand everything on to set-up and `hwgrpo launch`."""

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hwgrpo_backends import registry

from tests.support.processes.launch import variables
from tests.support.processes.preloaded_programs import programs

REPO = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("generate_launchers", REPO / "scripts" / "generate_launchers.py")
assert _spec is not None
assert _spec.loader is not None
generator = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(generator)
TEXTS = generator.launchers()
SHARED = "run_recipe.sh"


def test_the_launchers_in_scripts_are_what_the_generator_writes():
    there = {path.name: path.read_text() for path in (REPO / "scripts").glob("run_*.sh") if path.name != SHARED}
    assert there == TEXTS, "run `python scripts/generate_launchers.py`"


def test_every_recipe_has_one_launcher_for_each_device_and_one_that_looks():
    recipes = {path.stem for path in (REPO / "configs").glob("*.yaml")}
    assert set(TEXTS) == {
        f"run_{recipe}{device}.sh" for recipe in recipes for device in ("", "_cpu", "_cuda", "_rocm", "_npu")
    }
    assert all(os.access(REPO / "scripts" / name, os.X_OK) for name in TEXTS)


def test_the_help_of_a_launcher_is_the_same_for_every_device_but_for_its_names(stubbed):
    for recipe in generator.RECIPES:
        helps = [launch(stubbed, of(recipe, device), "--help").stdout for device in DEVICES]
        described = {
            text.replace(of(recipe, device), "FILE").replace(f"on {generator.DEVICES[device]};", "on DEVICE;")
            for text, device in zip(helps, DEVICES, strict=True)
        }
        assert len(described) == 1
        for task in re.findall(r"train: data/(\w+)/", (REPO / "configs" / f"{recipe}.yaml").read_text()):
            assert f"Reads data/{task} in the current folder; `hwgrpo data {task}` writes it." in helps[0]


def test_no_launcher_sets_a_variable_that_is_a_backends():
    names = {name for b in registry.load_all().backends.values() for name in {**b.env_train, **b.env_rollout}}
    assert len(names) > 5
    texts = {**TEXTS, SHARED: (REPO / "scripts" / SHARED).read_text()}
    assert [file for file, text in texts.items() for name in names if name in text] == []


@pytest.fixture
def stubbed(tmp_path):
    """A repository whose set-up and `hwgrpo` only say how they were called."""
    repo = tmp_path / "a repo"
    (repo / "scripts").mkdir(parents=True)
    (repo / ".venv" / "bin").mkdir(parents=True)
    for name, text in TEXTS.items():
        (repo / "scripts" / name).write_text(text)
    shutil.copy(REPO / "scripts" / SHARED, repo / "scripts")
    (repo / "configs").symlink_to(REPO / "configs")
    (repo / "scripts" / "setup.sh").write_text('echo setup "$@"; exit "${SETUP_STATUS:-0}"\n')
    stub(repo, "hwgrpo", 'printf "<%s>" "$@"; echo " cann=$CANN"')
    return repo


def stub(repo, name, text):
    """Put a command into .venv that runs lines of shell."""
    command = repo / ".venv" / "bin" / name
    command.write_text(f"#!/bin/sh\n{text}\n")
    command.chmod(0o755)


ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in ("ASCEND_HOME_PATH", "CANN")}


def launch(repo, name, *arguments, **env):
    return subprocess.run(
        ["bash", repo / "scripts" / name, *arguments],
        cwd="/",
        env={**ENVIRONMENT, **env},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "rocm", "npu"])
def test_a_launcher_sets_up_for_its_device_then_trains_with_the_callers_settings_last(stubbed, device):
    name = "run_tiny_sort.sh" if device == "auto" else f"run_tiny_sort_{device}.sh"
    result = launch(stubbed, name, "rollout.n=16", "data.train=my file.jsonl", ASCEND_HOME_PATH="/there")
    config = stubbed / "configs" / "tiny_sort.yaml"
    assert result.stdout.splitlines() == [
        "setup" if device == "auto" else f"setup --backend {device}",
        f"<launch><--run><{config}><backend.name={device}><rollout.n=16><data.train=my file.jsonl> cann=",
    ]
    assert result.returncode == 0


DEVICES = ["auto", "cpu", "cuda", "rocm", "npu"]


def of(recipe, device):
    return f"run_{recipe}.sh" if device == "auto" else f"run_{recipe}_{device}.sh"


@pytest.mark.parametrize("device", DEVICES)
def test_a_plan_sets_up_for_no_device_and_takes_the_environment_that_is_there(stubbed, device):
    result = launch(stubbed, of("qwen3_8b_math", device), "rollout.n=16", "--dry-run")
    assert "setup" not in result.stdout
    assert f"<backend.name={device}><rollout.n=16><--dry-run>" in result.stdout
    (stubbed / ".venv/bin/hwgrpo").unlink()
    assert launch(stubbed, of("qwen3_8b_math", device), "--dry-run").stdout == "setup\n", "what this machine has"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("word", ["--help", "-h"])
def test_a_launcher_explains_itself_without_any_set_up(stubbed, device, word):
    shutil.rmtree(stubbed / ".venv")
    result = launch(stubbed, of("qwen3_8b_math", device), "trainer.max_steps=3", word)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("Train Qwen3-8B on MATH with GRPO on ")
    for told in (of("qwen3_8b_math", device), "trainer.max_steps=50", "--dry-run", "data/math"):
        assert told in result.stdout
    assert "set -" not in result.stdout


def test_a_value_that_holds_an_option_is_no_option(stubbed):
    assert "setup" in launch(stubbed, "run_tiny_sort_cpu.sh", "trainer.output_dir=a --dry-run b").stdout


def test_a_launcher_stops_when_set_up_fails(stubbed):
    result = launch(stubbed, "run_tiny_sort_cuda.sh", SETUP_STATUS="1")
    assert result.returncode == 1
    assert "train" not in result.stdout


@pytest.mark.parametrize("device, sourced", [("auto", True), ("npu", True), ("cuda", False)])
@pytest.mark.parametrize("there", [["ascend-toolkit"], ["cann"], ["ascend-toolkit", "cann"]])
def test_the_launchers_that_may_meet_an_npu_read_canns_variables(stubbed, device, sourced, there):
    for name in there:
        (stubbed / name).mkdir()
        (stubbed / name / "set_env.sh").write_text(f'export CANN="${{CANN:-}}{name}${{UNSET_BEFORE}}"\n')
    script = stubbed / "scripts" / SHARED
    script.write_text(
        script.read_text().replace("/usr/local/Ascend", str(stubbed)).replace("=" + str(stubbed), f"='{stubbed}'")
    )
    assert launch(stubbed, of("tiny_sort", device)).stdout.endswith(f"cann={there[-1]}\n" if sourced else "cann=\n")


REFUSED = r"""
[ "$1" = detect ] || { echo "trains: $*"; exit 0; }
[ "$*" = "detect --backend npu --probe" ] || exit 99
printf '%s\n' '* cpu  works' '  npu  unusable' '' 'no backend (requested: npu): no libhccl.so. Fix: source it'
exit 1
"""


def test_the_npu_launcher_stops_with_the_line_of_detect_where_there_is_no_cann(stubbed):
    stub(stubbed, "hwgrpo", REFUSED)
    result = launch(stubbed, "run_qwen3_8b_math_npu.sh")
    assert result.returncode == 1
    assert result.stderr == "no backend (requested: npu): no libhccl.so. Fix: source it\n"
    assert result.stdout == "setup --backend npu\n"
    with_cann = launch(stubbed, "run_qwen3_8b_math_npu.sh", ASCEND_HOME_PATH="/there")
    assert (with_cann.returncode, "trains: launch --run" in with_cann.stdout) == (0, True)
    planned = launch(stubbed, "run_qwen3_8b_math_npu.sh", "rollout.n=16", "--dry-run")
    assert (planned.returncode, "--dry-run\n" in planned.stdout) == (0, True), "a plan needs no CANN"


def test_the_npu_launcher_trains_where_an_image_brings_cann_without_its_variables(stubbed):
    stub(stubbed, "hwgrpo", '[ "$1" = detect ] || echo "trains: $*"')
    result = launch(stubbed, "run_tiny_sort_npu.sh")
    assert result.stdout.splitlines()[-1].startswith("trains: launch --run ")
    assert result.returncode == 0


def test_the_npu_launcher_of_a_recipe_with_a_server_names_the_servers_environment(stubbed):
    recipes = {path.stem: path.read_text() for path in (REPO / "configs").glob("*.yaml")}
    served = {name for name, text in recipes.items() if re.search(r"^  engine: vllm_server", text, re.MULTILINE)}
    assert served
    for recipe in sorted(served):
        words = f"<backend.name=npu><rollout.server.python={stubbed}/.venv-vllm-ascend/bin/python><--dry-run>"
        assert words in launch(stubbed, of(recipe, "npu"), "--dry-run").stdout
        running = launch(stubbed, of(recipe, "npu"), "rollout.server.url=http://here", "--dry-run").stdout
        assert "<backend.name=npu><rollout.server.url=http://here><--dry-run>" in running
        assert "server.python" not in launch(stubbed, of(recipe, "cuda"), "--dry-run").stdout
    assert "server.python" not in launch(stubbed, "run_tiny_sort_npu.sh", "--dry-run").stdout


def test_options_of_launch_and_settings_are_written_into_a_launcher(stubbed):
    script = stubbed / "scripts" / "run_qwen2_5_7b_gsm8k_rocm.sh"
    script.write_text(script.read_text().replace(" -- ", " --devices 4 trainer.seed=7 'data.system_prompt=a b' -- "))
    result = launch(stubbed, script.name, "rollout.n=16")
    config = stubbed / "configs" / "qwen2_5_7b_gsm8k.yaml"
    words = f"<launch><--run><--devices><4><{config}><backend.name=rocm><trainer.seed=7>"
    words += "<data.system_prompt=a b><rollout.n=16>"
    assert result.stdout.splitlines()[-1].startswith(words)


@pytest.mark.parametrize(
    "name, code",
    [pytest.param("run_tiny_sort_cpu.sh", 0, marks=pytest.mark.slow), ("run_qwen2_5_0_5b_gsm8k_cpu.sh", 1)],
)
def test_a_launcher_plans_with_dry_run_as_a_further_word(stubbed, tmp_path, name, code):
    """The real command behind the stubbed set-up; without data the plan is shown, and what is missing told."""
    small = ["model.path=builtin://tiny?task=sort&steps=2"] if "tiny" in name else []
    environ = variables(HWGRPO_CACHE=str(tmp_path / "cache"), HF_HUB_OFFLINE="1")
    with programs(stubbed / ".venv" / "bin"):
        result = launch(stubbed, name, *small, "--dry-run", **environ)
    assert result.returncode == code, result.stderr
    assert result.stdout.startswith("backend    cpu, 1 process\n"), "nothing is set up before it"
    assert "\nmemory     about " in result.stdout
    assert ("not ready here: data.train='data/gsm8k/train.parquet'" in result.stderr) == bool(code)
