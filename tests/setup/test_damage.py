"""An environment that was damaged after set-up is repaired by running set-up again; only pip is played here."""

import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
sys.path.insert(0, str(REPO / "scripts"))
import setup_env  # noqa: E402
import setup_plan  # noqa: E402

# Installs what it is asked for where a record is missing, as pip does, and removes by the record; writes down commands.
PIP = """
import shutil, sys
from pathlib import Path
site, (verb, *words) = Path(__file__).parent.parent, sys.argv[1:]
if "--dry-run" in words:
    raise SystemExit
with open(LOG, "a") as log:
    print(verb, words[-1], file=log)
records = {path.name.split("-")[0]: path for path in site.glob("*.dist-info")}
if verb == "uninstall":
    for record in (records[name] for name in {word.replace("-", "_") for word in words} if name in records):
        for line in (record / "RECORD").read_text().splitlines():
            (site / line.split(",")[0]).unlink(missing_ok=True)
        shutil.rmtree(record)
for name in [] if verb == "uninstall" else ["torch", "sympy"] if "torch==" in words[-1] else ALL:
    module = {"pyyaml": "yaml", "pillow": "PIL", "pytest_xdist": "xdist", "import_linter": "importlinter",
              "mkdocs_material": "material"}.get(name, name)
    if name not in records and not (name == "torch" and "torch==" not in words[-1]):
        needs = "import sympy\\n" if name == "torch" else ""
        says = {f"{module}/__init__.py": f"{needs}from . import version\\n__version__ = '2.13.0'\\n",
                f"{module}/version.py": "cuda = hip = None\\n"}
        (site / module).mkdir(exist_ok=True)
        (site / f"{name}-2.13.0.dist-info").mkdir()
        for file, text in says.items():
            (site / file).write_text(text)
        record = "".join(f"{file},sha256=x,{len(text)}\\n" for file, text in says.items())
        (site / f"{name}-2.13.0.dist-info/RECORD").write_text(record + f"{module}/__pycache__/x.pyc,,\\n")
"""


TOOLS = (*tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["optional-dependencies"]["dev"], "triton")


class Environment:
    """A repository with an environment that set-up has just made."""

    def __init__(self, folder, patch):
        self.log, self.root = folder / "log", folder / "root"
        self.root.mkdir()
        requirements = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]["dependencies"]
        names = [requirement.split(">")[0].replace("-", "_") for requirement in (*requirements, *TOOLS)]
        (folder / "pip.py").write_text(f"LOG, ALL = {str(self.log)!r}, {names!r}\n{PIP}")
        repo = folder / "repo"
        shutil.copytree(REPO / "scripts" / "constraints", repo / "scripts" / "constraints")
        shutil.copy(REPO / "pyproject.toml", repo)
        self.venv = repo / ".venv"
        python = folder / "python"
        python.write_text(
            f'#!/bin/sh\n"{sys.executable}" -m venv --without-pip "$3" || exit\ncd "$3"/lib/python*/site-packages\n'
            f'mkdir pip && touch pip/__init__.py && cp "{folder}/pip.py" pip/__main__.py\n'
        )
        python.chmod(0o755)
        patch.setattr(setup_env, "REPO", repo)
        patch.setattr(sys, "executable", str(python))
        patch.setenv("HWGRPO_TORCH_INDEX", "")
        self.setup()

    @property
    def site(self):
        return next(self.venv.glob("lib/python*/site-packages"))

    def setup(self, *options):
        """Run set-up; return what pip was asked to do."""
        self.log.write_text("")
        assert setup_env.main(["--root", str(self.root), *options]) == 0
        return self.log.read_text().splitlines()

    def imports(self, module):
        code = [self.venv / "bin" / "python", "-I", "-c", f"import {module}"]
        return subprocess.run(code, capture_output=True).returncode == 0


@pytest.fixture
def environment(tmp_path, monkeypatch):
    for name in [name for name in os.environ if name.startswith("HWGRPO_")]:
        monkeypatch.delenv(name)
    return Environment(tmp_path, monkeypatch)


def remove(*paths):
    for path in paths:
        shutil.rmtree(path)


def write(file, text):
    file.write_text(text)
    os.utime(file, (9, 9))  # Python's compiled copy is for the time and size of its source: in seconds


DAMAGE = {
    "torch was uninstalled": ("torch", lambda site: remove(site / "torch", *site.glob("torch-*"))),
    "torch's folder was removed": ("torch", lambda site: remove(site / "torch")),
    "torch lacks a file": ("torch", lambda site: (site / "torch" / "version.py").unlink()),
    "torch does not load": (
        "torch", lambda site: write(site / "torch/__init__.py", "raise ImportError('libtorch.so: file too short')\n")),
    "torch has a damaged file of the right size": (
        "torch", lambda site: write(site / "torch/__init__.py", "?" * (site / "torch/__init__.py").stat().st_size)),
    "what torch requires was removed": ("sympy", lambda site: remove(site / "sympy")),
    "torch ends its process": (
        "torch", lambda site: write(site / "torch/__init__.py", "import os\nos.kill(os.getpid(), 11)\n")),
    "another requirement was removed": ("omegaconf", lambda site: remove(site / "omegaconf")),
    "a requirement of another name was removed": ("yaml", lambda site: remove(site / "yaml")),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_set_up_repairs_an_environment_in_which(environment, name, capsys):
    module, damage = DAMAGE[name]
    assert environment.setup() == []
    damage(environment.site)
    assert not environment.imports(module)
    done = environment.setup()
    assert environment.imports(module), done
    named = {"yaml": "pyyaml", "sympy": "torch"}.get(module, module)
    assert f"damaged      {named}: " in capsys.readouterr().out
    assert done[0].startswith("uninstall "), "pip takes what has a record for installed"
    assert "install torch==2.13.0" in done
    assert environment.setup() == []


def test_tools_that_do_not_import_are_repaired_for_developers_alone(environment):
    assert environment.setup("--dev")[-1].startswith("install triton")
    assert environment.setup("--dev") == environment.setup() == []
    shutil.rmtree(environment.site / "xdist")
    assert environment.setup() == []
    assert environment.setup("--dev")[0].startswith("uninstall pytest")
    assert environment.setup("--dev") == environment.setup() == []


def test_files_that_changed_and_still_import_are_left_alone(environment, monkeypatch):
    with (environment.site / "torch" / "version.py").open("a") as file:
        file.write("# somebody's note\n")
    assert environment.setup() == []
    monkeypatch.setattr(setup_env, "import_problems", lambda *_: pytest.fail("nothing has changed since"))
    assert environment.setup() == []


def test_a_stamp_of_an_older_set_up_costs_one_look(environment):
    stamp = environment.venv / setup_env.STAMP
    stamp.write_text(json.dumps({k: v for k, v in json.loads(stamp.read_text()).items() if k != "files"}))
    assert environment.setup() == []
    assert "files" in json.loads(stamp.read_text())


def test_what_set_up_cannot_repair_is_named_with_the_way_out(environment, tmp_path):
    module = "import types\n__version__, version = '1', types.SimpleNamespace(cuda='', hip='')\n"
    (tmp_path / "torch.py").write_text(module)
    (environment.site / "first.pth").write_text(f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n")
    with pytest.raises(setup_plan.SetupError, match=r"torch: .*torch\.py is imported in its place.*--fresh"):
        environment.setup()


def test_a_dry_run_of_set_up_shows_a_repair_and_changes_nothing(environment, capsys):
    shutil.rmtree(environment.site / "torch")
    before = sorted(path for path in environment.venv.rglob("*"))
    assert setup_env.main(["--root", str(environment.root), "--dry-run"]) == 0
    assert "damaged      torch: ModuleNotFoundError" in capsys.readouterr().out
    assert sorted(path for path in environment.venv.rglob("*")) == before


def test_set_up_goes_on_where_the_file_system_has_no_locks(environment, monkeypatch):
    def without(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", without)
    assert environment.setup() == []
