"""The page for vendors shows the plug-in that is tested, and its commands do what it says on a host with the device."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hwgrpo_backends import device

from tests.support.devices import acme, simulated_device
from tests.support.processes.preloaded_programs import HWGRPO, programs

REPO = Path(__file__).parents[2]
PAGE = REPO / "docs" / "add-a-backend.md"
FILES = {"toml": ["pyproject.toml"], "python": ["hwgrpo_acme/__init__.py", "hwgrpo_acme/kernels.py"]}


def blocks(language: str) -> list[str]:
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("language", FILES)
def test_the_files_of_the_page_are_those_of_the_tested_plug_in(language: str):
    assert blocks(language) == [(acme.SOURCE / name).read_text() for name in FILES[language]]


def device_calls() -> dict[str, set[str]]:
    """Return, by public call of the device layer, the names of the device's module that it uses."""
    (layer,) = (node for node in ast.parse(Path(device.__file__).read_text()).body if is_class(node, "Device"))
    methods = [node for node in ast.walk(layer) if isinstance(node, ast.FunctionDef)]
    public = [method for method in methods if method.name == "__init__" or not method.name.startswith("_")]
    return {method.name: {attribute for attribute in map(of_the_module, ast.walk(method)) if attribute}
            for method in public}  # fmt: skip


def is_class(node: ast.stmt, name: str) -> bool:
    return isinstance(node, ast.ClassDef) and node.name == name


def of_the_module(node: ast.AST) -> str | None:
    used = isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self._module"
    return node.attr if used else None


def listed_calls() -> dict[str, set[str]]:
    """Return the same of the page's table."""
    rows = re.findall(r"^\| `([^`]+)` \|(.*?)\|(.*?)\|(.*?)\|$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for call, _, meaning, check in rows:
        assert meaning.strip(), call
        assert check.strip(), call
    names = ["__init__" if call.startswith("Device(") else call for call, *_ in rows]
    assert len(set(names)) == len(names)
    return {name: set(re.findall("`([^`]+)`", asked)) for name, (_, asked, *_) in zip(names, rows, strict=True)}


def test_the_page_lists_every_call_on_a_device_and_what_it_asks_the_vendors_module_for():
    assert listed_calls() == device_calls()


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory):
    """Yield a function that runs a block on a host with the device, whose plug-in is not installed yet."""
    folder, tools = tmp_path_factory.mktemp("vendor"), tmp_path_factory.mktemp("bin")
    shutil.copytree(acme.SOURCE, folder / "hwgrpo-acme", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "scripts").mkdir()
    shutil.copy(REPO / "scripts" / "generate_launchers.py", folder / "scripts")
    site = folder / "site"
    site.mkdir()  # which the processes that others are forked from look for as they start
    pip = tools / "pip"
    pip.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pip "$@" --quiet --no-index --target "{site}"\n')
    pip.chmod(0o755)
    environ = simulated_device.environment([site, acme.device()], TERM="dumb")
    environ["PATH"] = f"{tools}{os.pathsep}{environ['PATH']}"

    def run(block: str) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block], cwd=folder, env=environ, text=True, capture_output=True
        )
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    run.folder = folder  # pyright: ignore[reportFunctionMemberAccess]
    with programs(tools, {**HWGRPO, "python": ()}):
        yield run


@pytest.mark.slow
def test_every_command_of_the_page_runs_and_says_what_the_page_says(shell):
    install, backend, kernels, way, launchers = blocks("bash")
    said = shell(install)
    assert "* acme  works     1 x Acme One" in said
    assert "acme (hwgrpo_acme.kernels:IMPLEMENTATIONS): row_stats=acme" in said
    assert "ACME_SUBMIT_THREADS" in said
    assert shell(backend).splitlines() == [
        "data",
        "names: kernels, modules, attention, rollout",
        "probe",
        "device: Acme One (acme_one)",
        "memory: figures follow a block of 64 MiB",
        "visible devices: ACME_VISIBLE_DEVICES='-1' leaves 0 of 1",
        "collectives: all_reduce, broadcast, all_gather, all_gather_into_tensor, reduce_scatter_tensor, "
        "all_to_all_single in bfloat16, float32 by acmecl over 1 rank",
    ]
    assert "float32: 44 calls agree with the definition" in shell(kernels)
    said = shell(way)
    assert re.search(r"PASS +acme:0 +kernel row_stats=acme", said)
    assert "completed: 3 of 3 steps" in said
    shell(launchers)
    written = sorted(file.name for file in (shell.folder / "scripts").glob("*.sh"))
    assert "run_tiny_sort_acme.sh" in written
    assert all(name.endswith("_acme.sh") for name in written)
    text = (shell.folder / "scripts/run_tiny_sort_acme.sh").read_text()
    assert "with GRPO on Acme accelerators;" in text
    assert " tiny_sort acme -- " in text
