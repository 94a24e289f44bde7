"""Two machines are compared by file; a file that is not whole, or of another step, is refused."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from hwgrpo.cli.main import main
from hwgrpo.parity import saved_step

ARGUMENTS = ("parity", "backend.name=cpu", "model.dtype=float32", "trainer.threads=1")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What this machine computes in packed rows."""
    path = tmp_path_factory.mktemp("saved") / "step.safetensors"
    assert main([*ARGUMENTS, "model.layout=packed", "--save", str(path)]) == 0
    return path


def against(path: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    """Return the report of a comparison with a file."""
    capsys.readouterr()
    code = main([*ARGUMENTS, *arguments, "--against", str(path), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == (0 if report["passed"] else 1)
    with_fp64, with_file = report["comparisons"]
    assert with_fp64["against"] == "fp64"
    return with_file


def test_another_layout_computes_the_same(saved: Path, capsys):
    report = against(saved, capsys, "model.layout=padded")
    assert report["passed"], report
    assert "float32" in report["against"]
    assert [stage["name"] for stage in report["stages"]][-1] == "second update"
    assert any(stage["error"] for stage in report["stages"])


def test_a_coarser_dtype_decides_the_tolerance(saved: Path, capsys):
    report = against(saved, capsys, "model.dtype=bfloat16", "model.layout=packed")
    assert report["passed"]
    assert all(stage["tolerance"] > 1e-3 for stage in report["stages"] if stage["name"].startswith("layer"))


def test_a_file_with_other_tensors_is_refused(saved: Path, tmp_path: Path, capsys):
    step = saved_step.read(saved)
    tensors = {name: each for name, each in step.tensors.items() if not name.startswith("gradient of")}
    path = tmp_path / "fewer"
    saved_step.write(path, saved_step.SavedStep(tensors, step.model, step.machine))
    assert main([*ARGUMENTS, "model.layout=packed", "--against", str(path)]) == 2
    assert "only one of the two machines computed gradient of " in capsys.readouterr().err


def test_a_difference_is_found_at_its_stage(saved: Path, tmp_path: Path, capsys):
    step = saved_step.read(saved)
    name = "gradient of model.layers.0.mlp.up_proj.weight"
    changed = saved_step.SavedTensor(step.tensors[name].stage, step.tensors[name].values * 1.01, 0.0)
    path = tmp_path / "changed"
    saved_step.write(path, saved_step.SavedStep({**step.tensors, name: changed}, step.model, step.machine))
    report = against(path, capsys, "model.layout=packed")
    assert report["first_difference"] == "gradients, layer 1"
    (stage,) = (stage for stage in report["stages"] if stage["name"] == "gradients, layer 1")
    assert stage["tensor"] == name


@pytest.mark.parametrize("kept", [0, 4, 1000, -1])
def test_a_cut_file_is_refused(kept: int, saved: Path, tmp_path: Path, capsys):
    path = tmp_path / "cut"
    path.write_bytes(saved.read_bytes()[:kept])
    assert main([*ARGUMENTS, "--against", str(path)]) == 2
    assert f"--against {path} cannot be read" in capsys.readouterr().err


def test_a_changed_file_is_refused(saved: Path, tmp_path: Path, capsys):
    path = tmp_path / "changed"
    content = bytearray(saved.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    assert main([*ARGUMENTS, "--against", str(path)]) == 2
    assert "its checksum is not that of its tensors" in capsys.readouterr().err


def test_a_file_of_another_kind_is_refused(saved: Path, tmp_path: Path, capsys):
    path = tmp_path / "other"
    save_file(load_file(saved), path, {"schema": "hwgrpo.parity_step/0"})
    assert main([*ARGUMENTS, "--against", str(path)]) == 2
    assert "has the schema 'hwgrpo.parity_step/0'" in capsys.readouterr().err


@pytest.mark.parametrize("argument", ["trainer.seed=1", "model.path=builtin://tiny?task=sort&steps=0"])
def test_another_step_or_model_is_refused(argument: str, saved: Path, capsys):
    assert main([*ARGUMENTS, argument, "--against", str(saved)]) == 2
    assert "is of another model, seed or step" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, capsys):
    path = tmp_path / "missing" / "file"
    assert main([*ARGUMENTS, "--save", str(path)]) == 2
    captured = capsys.readouterr()
    assert f"--save {path}: its folder does not exist" in captured.err
    assert not captured.out
