"""`hwgrpo env` from the shell, and what `hwgrpo train` does with the same variables before torch is imported."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from hwgrpo_backends import environment, registry

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = """
import dataclasses
from hwgrpo_backends.backend import EnvVar
from hwgrpo_backends.cpu import BACKEND as HOST

AWKWARD = "it's $HOME; `id`\\n#\\"'"
BACKEND = dataclasses.replace(
    HOST,
    name="acme",
    env_train={
        "ACME_QUEUE": EnvVar(value="2", why="acme's queue is slow without it", until="acme 9", source="acme's guide"),
        "ACME_TEXT": EnvVar(value=AWKWARD, why="a reason of\\nexport INJECTED=1\\ntwo lines"),
    },
    env_deterministic={"ACME_ORDER": EnvVar(value="fixed", why="acme adds in any order it likes")},
    env_rollout={"ACME_QUEUE": EnvVar(value="1", why="acme's engine takes no more than one")},
    env_optional={"ACME_NETWORK": EnvVar(value="eth0", why="with several interfaces", source="acme's manual")},
)
"""
UNUSED = {
    *("hwgrpo.planning.scale_plan", "hwgrpo.planning.planner", "hwgrpo.planning.memory", "hwgrpo.planning.dry_run"),
    *("peft", "datasets", "pyarrow", "pandas", "tensorboard", "math_verify", "deepspeed"),
}
"""Modules that a small run on a CPU does not import."""
NOTE_TORCH = '''
import atexit, json, os, sys

class Note:
    """Write down the environment as it is when torch is first looked for."""

    def find_spec(self, name, path=None, target=None):
        if name == "torch" and not os.path.exists(os.environ["NOTE"]):
            with open(os.environ["NOTE"], "w") as file:
                json.dump(dict(os.environ), file)

def note_modules():
    """Write down the modules that were imported."""
    with open(os.environ["NOTE"] + ".modules", "w") as file:
        json.dump([name for name, module in sys.modules.items() if module is not None], file)

if "NOTE" in os.environ:
    sys.meta_path.insert(0, Note())
    atexit.register(note_modules)
'''


@pytest.fixture
def acme(tmp_path: Path) -> str:
    """A PYTHONPATH on which a backend `acme`, the host processor with variables of its own, is installed."""
    folder = tmp_path / "site"
    info = folder / "acme-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[hwgrpo.backends]\nacme = acme_backend:BACKEND\n")
    (folder / "acme_backend.py").write_text(PLUGIN)
    (folder / "sitecustomize.py").write_text(NOTE_TORCH)
    return os.pathsep.join(map(str, (folder, ROOT, ROOT / "backends", ROOT / "kernels")))


def in_shell(text: str, lines: str, **variables: str) -> list[str]:
    """Return what `text` prints in a POSIX shell that has read `lines`, cut at NUL."""
    script = f'eval "$LINES_OF_ENV"\n{text}'
    done = subprocess.run(
        ["sh", "-eu", "-c", script],
        env={"PATH": os.environ["PATH"], "LINES_OF_ENV": lines, **variables},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split("\0")


def test_every_variable_is_shown_with_its_reason_on_a_host_without_that_device(fresh):
    for name in registry.BUILTIN:
        for purpose in ("train", "rollout"):
            done = fresh("env", "--backend", name, "--for", purpose)
            assert done.returncode == 0, done.stderr
            variables = registry.get(name).environment(purpose)
            for variable, said in variables.items():
                assert f"{variable}='{said.value}'" in done.stdout.splitlines()
                assert said.why in done.stdout
                assert said.until in done.stdout
                assert f"[{said.source}]" in done.stdout
            for variable, said in registry.get(name).env_optional.items():
                assert f"{variable}, e.g. '{said.value}'" in done.stdout
                assert f"{said.why} [{said.source}]" in done.stdout
            # a command that ran in the tests' process may have set the variables of another profile
            lines = [line for line in done.stdout.splitlines() if not line.endswith("it was set by another profile")]
            assert variables or lines in ([], [f"{name} needs no variables for {purpose}"])


def test_the_users_own_value_is_shown_as_kept_and_not_exported(fresh):
    words = ("env", "--backend", "npu")  # hw: the word under test
    shown = fresh(*words, TASK_QUEUE_ENABLE="0").stdout
    assert "TASK_QUEUE_ENABLE='0'  (your value is kept; profile: '2')" in shown
    told = json.loads(fresh(*words, "--json", TASK_QUEUE_ENABLE="0").stdout)
    assert told["schema"] == "hwgrpo.env/1"
    first = {variable["name"]: variable for variable in told["variables"]}["TASK_QUEUE_ENABLE"]
    assert (first["value"], first["wanted"], first["kept"]) == ("0", "2", True)
    lines = fresh(*words, "--shell", TASK_QUEUE_ENABLE="0").stdout
    assert "export TASK_QUEUE_ENABLE" not in lines
    assert in_shell('printf %s "$TASK_QUEUE_ENABLE"', lines, TASK_QUEUE_ENABLE="0") == ["0"]


def test_what_is_left_to_the_user_is_told_with_the_users_value_and_never_set(fresh, acme):
    words = ("env", "--backend", "acme")
    assert fresh(*words, PYTHONPATH=acme).stdout.endswith(
        "left to you, not set by hwgrpo:\nACME_NETWORK, e.g. 'eth0'\n    with several interfaces [acme's manual]\n"
    )
    told = json.loads(fresh(*words, "--json", PYTHONPATH=acme, ACME_NETWORK="ib0").stdout)
    assert [(v["name"], v["example"], v["value"]) for v in told["optional"]] == [("ACME_NETWORK", "eth0", "ib0")]
    assert told["variables"][0]["source"] == "acme's guide"
    assert "  (you have 'ib0')" in fresh(*words, PYTHONPATH=acme, ACME_NETWORK="ib0").stdout
    assert "ACME_NETWORK" not in fresh(*words, "--shell", PYTHONPATH=acme).stdout


def test_the_shell_lines_put_in_force_exactly_what_apply_does(fresh, acme):
    """Quotes, dollars, new lines and reasons of several lines change nothing else."""
    lines = fresh("env", "--backend", "acme", "--shell", PYTHONPATH=acme).stdout
    wanted = "it's $HOME; `id`\n#\"'"
    assert in_shell('printf "%s\\0%s\\0%s" "$ACME_QUEUE" "$ACME_TEXT" "${INJECTED-none}"', lines) == [
        "2",
        wanted,
        "none",
    ]
    assert "# acme's queue is slow without it (until acme 9)\nexport ACME_QUEUE='2'\n" in lines


def test_lines_for_the_rollout_take_out_what_training_set_and_nothing_of_the_users(fresh):
    words = ("env", "--backend", "npu", "--shell", "--for")  # hw: the word under test
    train = fresh(*words, "train", CPU_AFFINITY_CONF="2").stdout
    expected = {"CPU_AFFINITY_CONF": "2"}
    environment.apply(registry.get("npu"), "train", expected)  # hw: the word under test
    names = environment.APPLIED_VARIABLE, "TASK_QUEUE_ENABLE", "HCCL_EXEC_TIMEOUT", "CPU_AFFINITY_CONF"
    shown = "\\0".join("%s" for _ in names)
    values = in_shell(f"printf '{shown}' " + " ".join(f'"${name}"' for name in names), train, CPU_AFFINITY_CONF="2")
    after_train = dict(zip(names, values, strict=True))
    assert after_train == {name: expected[name] for name in names}

    rollout = fresh(*words, "rollout", **after_train).stdout
    shown = in_shell(
        'printf "%s\\0%s\\0%s" "$TASK_QUEUE_ENABLE" "${HCCL_EXEC_TIMEOUT-gone}" "$CPU_AFFINITY_CONF"',
        rollout,
        **after_train,
    )
    assert shown == ["1", "gone", "2"]


def test_no_torch_is_imported_for_it(fresh, acme, tmp_path):
    note = tmp_path / "note.json"
    for backend in ("auto", "acme"):
        done = fresh("env", "--backend", backend, PYTHONPATH=acme, NOTE=str(note), HWGRPO_BACKEND="cpu")
        assert done.returncode == 0, done.stderr
    assert not note.exists()


def test_a_backend_misspelt_is_a_usage_error_with_the_nearest_name(fresh):
    done = fresh("env", "--backend", "rocn")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "--backend='rocn' is not known" in done.stderr
    assert "Did you mean 'rocm'?" in done.stderr


def test_train_sets_the_variables_before_torch_imports_nothing_unused_and_the_runs_folder_tells_whose_they_are(
    fresh, acme, tmp_path
):
    note = tmp_path / "note.json"
    done = fresh(
        "train",
        "tiny_sort",
        "model.path=builtin://tiny?task=sort&hidden=32&layers=1&steps=2&batch=8&digits=3",
        "data.train=task://sort?digits=3",
        "rollout.n=2",
        "trainer.prompts_per_step=2",
        "trainer.max_steps=1",
        "trainer.save_every=0",
        "data.validation_max_rows=2",
        "trainer.output_dir=out",
        "observe.loggers=[jsonl]",
        "backend.name=acme",
        PYTHONPATH=acme,
        NOTE=str(note),
        ACME_QUEUE="7",
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(note.read_text())
    assert seen["ACME_QUEUE"] == "7"
    recorded = json.loads((tmp_path / "out" / "environment.json").read_text())["variables"]
    assert recorded == {
        "ACME_QUEUE": {"value": "7", "set by": "user"},
        "ACME_TEXT": {"value": "it's $HOME; `id`\n#\"'", "set by": "hwgrpo"},
    }
    assert seen["ACME_TEXT"] == recorded["ACME_TEXT"]["value"]
    modules = set(json.loads((tmp_path / "note.json.modules").read_text()))
    assert "transformers" in modules
    assert UNUSED & modules == set()


@pytest.mark.slow
def test_what_repeats_the_numbers_is_set_when_asked_for_and_only_then(fresh, acme, tmp_path):
    note = tmp_path / "note.json"
    words = (
        *("train", "tiny_sort", "model.path=builtin://tiny?task=sort&hidden=32&layers=1&steps=2&batch=8&digits=3"),
        *("data.train=task://sort?digits=3", "rollout.n=2", "trainer.prompts_per_step=2", "trainer.max_steps=1"),
        *("data.validation_max_rows=2", "trainer.output_dir=out", "backend.name=acme", "observe.loggers=[jsonl]"),
    )
    done = fresh(*words, "trainer.deterministic=true", PYTHONPATH=acme, NOTE=str(note))
    assert done.returncode == 0, done.stderr
    assert json.loads(note.read_text())["ACME_ORDER"] == "fixed"
    recorded = json.loads((tmp_path / "out" / "environment.json").read_text())["variables"]
    assert recorded["ACME_ORDER"] == {"value": "fixed", "set by": "hwgrpo"}

    shown = fresh("env", "--backend", "acme", "--deterministic", "--shell", PYTHONPATH=acme).stdout
    assert "export ACME_ORDER='fixed'" in shown
    assert "ACME_ORDER" not in fresh("env", "--backend", "acme", PYTHONPATH=acme).stdout


@pytest.mark.parametrize("form", [(), ("--shell",), ("--json",)])
def test_an_engine_is_not_asked_to_repeat_its_numbers(fresh, acme, form):
    done = fresh("env", "--backend", "acme", "--for", "rollout", "--deterministic", *form, PYTHONPATH=acme)
    assert (done.returncode, done.stdout) == (2, "")
    assert "--deterministic cannot be combined with --for rollout: it is for training" in done.stderr
