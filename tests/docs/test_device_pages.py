"""docs/ascend.md and docs/rocm.md: their commands parse or run, their figures and variables are those of the code."""

import argparse
import importlib
import importlib.util
import io
import json
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout

import pytest
from hwgrpo_backends import registry

from hwgrpo.cli.main import COMMANDS, main
from hwgrpo.migrate.names_here import VERL
from tests.docs.pages import REPO, blocks, code, page, table

PAGES = {"npu": "ascend.md", "rocm": "rocm.md"}
VENDORS = {
    "npu-smi info",
    "cat /usr/local/Ascend/driver/version.info",
    "source /usr/local/Ascend/ascend-toolkit/set_env.sh",
    "source /usr/local/Ascend/nnal/atb/set_env.sh",
    "rocminfo",
    "amd-smi firmware",
    "cat /proc/sys/kernel/numa_balancing",
    "source .venv/bin/activate",
}
"""Commands of a page that are not ours."""
KEY = re.compile(r"[a-z_0-9]+\.[a-z_0-9.]*[a-z0-9]")
LINES = [
    (name, shlex.split(line, comments=True))
    for name, file in PAGES.items()
    for block in blocks(page(file), "bash")
    for line in block.replace("\\\n", " ").splitlines()
]
OURS = [(name, words[1:]) for name, words in LINES if words[0] == "hwgrpo"]
SCRIPTS = [(name, words[1:]) for name, words in LINES if words[0] == "bash"]
PLANS = [(file, row) for file in PAGES.values() for row in table(page(file), "`hwgrpo plan`", "fits")]


def shown(words: list[str]) -> str:
    """Return what a command prints; it must end with 0."""
    with redirect_stdout(io.StringIO()) as out:
        assert main(words) == 0
    return out.getvalue()


def test_every_command_is_ours_or_a_vendors():
    others = {" ".join(words) for _, words in LINES if words[0] not in ("hwgrpo", "bash", "docker")}
    assert others == VENDORS
    assert {words[0] for _, words in OURS} == {"detect", "doctor", "data", "plan", "launch"}
    assert len(SCRIPTS) == 8


@pytest.mark.parametrize(("name", "words"), OURS, ids=lambda each: each if isinstance(each, str) else each[0])
def test_a_command_parses_with_settings_that_are_right(name: str, words: list[str]):
    assert words[0] in COMMANDS
    if words[0] == "plan":
        shown(words)
    elif words[0] == "launch":
        printed = shown([word if word != "--run" else "--print" for word in words])
        assert (f"{registry.get(name).visible_env}=0,1,2,3" in printed) == ("--visible" in words)
        assert ("--nproc-per-node 8" in printed) == ("--devices" in words)
        assert f"backend.name={name}" in words
    else:
        module = importlib.import_module(f"hwgrpo.cli.{words[0]}")
        parser = argparse.ArgumentParser()
        module.add_arguments(parser)
        assert getattr(parser.parse_args(words[1:]), "backend", name) == name


@pytest.mark.parametrize(("name", "words"), SCRIPTS, ids=lambda each: each if isinstance(each, str) else each[0])
def test_a_script_is_there_and_takes_its_arguments(name: str, words: list[str]):
    script, *arguments = words
    text = (REPO / script).read_text(encoding="utf-8")
    if script == "scripts/setup.sh":
        spec = importlib.util.spec_from_file_location("setup_env", REPO / "scripts" / "setup_env.py")
        assert spec is not None
        assert spec.loader is not None
        setup = importlib.util.module_from_spec(spec)
        sys.path.insert(0, str(REPO / "scripts"))
        try:
            spec.loader.exec_module(setup)
        finally:
            sys.path.remove(str(REPO / "scripts"))
        assert setup._parse(arguments).backend in (name, None)
        return
    [recipe] = re.findall(rf'run_recipe\.sh" "\$0" (\w+) {name} -- ', text)
    settings = [f"backend.name={name}", *arguments]
    assert " ".join(shlex.quote(word) for word in settings[1:]) in shown(["launch", "--print", recipe, *settings])


@pytest.mark.parametrize(("file", "row"), PLANS, ids=lambda each: each if isinstance(each, str) else None)
def test_a_figure_is_the_plans(file: str, row: dict[str, str]):
    [command] = code(row["`hwgrpo plan`"])
    [chip] = json.loads(shown(["plan", *shlex.split(command), "--json"]))["chips"]
    assert row["GiB per device"] == f"{chip['peak'] / 2**30:.0f}"
    assert row["fits"] == ("yes" if chip["fits"] else "no")


def test_there_are_figures():
    assert len(PLANS) >= 8


def test_the_plan_with_verls_lengths_is_of_the_command_below_it():
    """A page's last command has the settings of the last row of its plans."""
    for name, file in PAGES.items():
        words = [words for backend, words in LINES if backend == name][-1]
        [command] = code([row for each, row in PLANS if each == file][-1]["`hwgrpo plan`"])
        planned = {word for word in shlex.split(command) if "=" in word}
        ignored = {f"backend.name={name}", *(word for word in words if word.startswith("rollout.server."))}
        assert {word for word in words if "=" in word} - ignored == planned, name


def test_what_verls_lengths_need_is_what_the_plan_says(capsys):
    text = " ".join(page("ascend.md").split())
    [(offload, figure)] = re.findall(r"Without `(trainer\.offload=\w+)` it is (\d+) GiB and fits", text)
    [parallel] = re.findall(r"without `(trainer\.sequence_parallel_size=\d)` the budget of tokens is refused", text)
    [command] = code([row for each, row in PLANS if each == "ascend.md"][-1]["`hwgrpo plan`"])
    words = ["plan", *shlex.split(command), "--json"]
    [chip] = json.loads(shown([word for word in words if word != offload]))["chips"]
    assert (f"{chip['peak'] / 2**30:.0f}", chip["fits"]) == (figure, True)
    assert main([word for word in words if word != parallel]) == 2
    assert "smaller than one sequence" in capsys.readouterr().err


def test_the_variables_are_the_backends():
    command = [sys.executable, "scripts/generate_variable_tables.py", "--check"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for name, file in PAGES.items():
        backend = registry.get(name)
        rows = table(page(file), "variable")
        listed = [name for row in rows for name in code(row["variable"])]
        profiles = (backend.env_train, backend.env_rollout, backend.env_deterministic, backend.env_optional)
        assert set(listed) == {variable for profile in profiles for variable in profile}


def test_a_container_gets_what_detect_tells_it_to_have():
    for name in PAGES:
        access = importlib.import_module(f"hwgrpo_backends.{name}").ACCESS
        [command] = [" ".join(words) for backend, words in LINES if backend == name and words[0] == "docker"]
        flags = re.findall(r"--device=\S+?(?=[ ,]|$)|--group-add \w+|-v [\w/.:]+", access)
        assert len(flags) > 2
        assert [flag for flag in flags if flag not in command] == []


def test_scripts_of_can_are_those_that_the_launcher_sources():
    text = (REPO / "scripts" / "run_recipe.sh").read_text()
    paths = set(re.findall(r"/usr/local/Ascend/\S+set_env\.sh", page("ascend.md")))
    assert paths == set(re.findall(r"/usr/local/Ascend/\S+set_env\.sh", text))


@pytest.mark.parametrize("file", PAGES.values())
def test_a_setting_of_verl_stands_beside_ours(file: str):
    rows = table(page(file), "verl", "here", "why")
    ends: dict[str, set[str]] = {}
    for name, here in VERL.items():
        ends.setdefault(name.rpartition(".")[2], set()).update(KEY.findall(here.partition(" | ")[0]))
    compared = 0
    for row in rows:
        for word in (each.partition("=")[0].rpartition(".")[2] for each in code(row["verl"])):
            if word in ends and (ours := code(row["here"])):
                named = {each.partition("=")[0] for each in ours + code(row["why"])}
                assert named & ends[word], (row["verl"], ends[word])
                compared += 1
    assert compared > 5


@pytest.mark.parametrize("file", PAGES.values())
def test_a_page_says_first_what_is_unproven(file: str):
    text = page(file)
    assert "has run on an" in text.split("\n## ")[0]
