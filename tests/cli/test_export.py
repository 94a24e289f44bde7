"""`hwgrpo export`: a checkpoint becomes the folder that the run itself would have left."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from hwgrpo.cli.main import main
from hwgrpo.errors import ConfigError
from hwgrpo.models import builtin
from hwgrpo.training.checkpoint import restore
from tests.support.processes import ranks
from tests.support.runs import runs

LORA = ("model.lora.rank=2", "model.lora.dropout=0")
RUNS = {"full": (1, ()), "lora": (1, LORA), "fsdp2": (2, ()), "fsdp2, lora": (2, LORA)}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory):
    """Return the folder of a finished run of two steps by the name of its kind."""
    folders: dict[str, Path] = {}
    patch = pytest.MonkeyPatch()
    patch.setenv("HWGRPO_CACHE", str(tmp_path_factory.mktemp("cache")))

    def run(kind: str) -> Path:
        if kind not in folders:
            folders[kind] = tmp_path_factory.mktemp("run") / "run"
            processes, words = RUNS[kind]
            words = (*words, "trainer.max_steps=2", "trainer.save_every=1", "trainer.validate_at_start=false")
            if processes == 1:
                assert runs.forked(lambda: runs.run(folders[kind], *words)) == 0
            else:
                words = (*words, "trainer.strategy=fsdp2")
                assert ranks.forked(processes, lambda rank: runs.run(folders[kind], *words)) == [0] * processes
        return folders[kind]

    yield run
    patch.undo()


def contents(folder: Path) -> dict[str, bytes]:
    assert folder.is_dir()
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("kind", RUNS)
def test_the_last_checkpoint_exports_to_what_the_run_left_byte_for_byte(tmp_path: Path, done, kind: str, capsys):
    run = done(kind)
    assert main(["export", str(run / "checkpoints/step-00000002"), str(tmp_path / "out")]) == 0
    assert f"step 2 of {run}/checkpoints/step-00000002 is in {tmp_path}/out" in capsys.readouterr().out
    assert contents(tmp_path / "out") == contents(run / "final")
    if "lora" in kind:
        assert main(["export", str(run), str(tmp_path / "adapter"), "--adapter"]) == 0
        assert contents(tmp_path / "adapter") == contents(run / "final-adapter")
    assert not list(tmp_path.glob(".*"))


def test_an_exported_model_loads_in_plain_transformers_with_exactly_the_weights(tmp_path: Path, done):
    run = done("full")
    earlier = run / "checkpoints/step-00000001"
    assert main(["export", str(earlier), str(tmp_path / "out"), "--max-shard-size", "20KB"]) == 0
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    weights = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).state_dict()
    saved = load_file(earlier / "weights-rank0.safetensors")
    assert saved.keys() <= weights.keys()
    for name, weight in saved.items():
        assert torch.equal(weight, weights[name].view(-1)), name
    last = load_file(run / "checkpoints/step-00000002/weights-rank0.safetensors")
    assert any(not torch.equal(last[name], weight) for name, weight in saved.items())
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("12")["input_ids"]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["{run}", "{out}", "--adapter"], 2, "was trained without LoRA"),
        (["{run}", "{out}", "--max-shard-size", "5"], 2, "--max-shard-size 5: use an integer and KB, MB or GB"),
        (["{run}", "{run}"], 2, "{run} already exists"),
        (["{run}", "{run}/config.yaml/out"], 2, "cannot be written"),
        (["{out}", "{out}"], 1, "not a checkpoint, it has no manifest.json"),
        (["{run}/final", "{out}"], 1, "not a checkpoint, it has no manifest.json"),
    ],
)
def test_what_cannot_be_exported_is_said(tmp_path: Path, done, capsys, words: list[str], code: int, said: str):
    places = {"run": done("full"), "out": tmp_path / "out"}
    assert main(["export", *(word.format(**places) for word in words)]) == code
    assert said.format(**places) in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_settings_that_this_version_does_not_have_are_named(tmp_path: Path, done, capsys):
    run = tmp_path / "run"
    shutil.copytree(done("full"), run)
    manifest = run / "checkpoints/step-00000002/manifest.json"
    content = json.loads(manifest.read_text())
    content["state"]["config"] += "unheard_of: 1\n"
    manifest.write_text(json.dumps(content))
    manifest.with_name("manifest.sha256").unlink()  # as checkpoints of earlier versions are
    assert main(["export", str(manifest.parent), str(tmp_path / "out")]) == 1
    said = capsys.readouterr()
    assert "settings that this version does not have" in said.err
    assert "unheard_of" in said.err
    assert "used without a checksum" in said.out
    assert not (tmp_path / "out").exists()


def test_of_a_run_the_newest_checkpoint_that_is_good_is_taken(tmp_path: Path, done, capsys):
    run = tmp_path / "run"
    shutil.copytree(done("full"), run)
    manifest = run / "checkpoints/step-00000002/manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"files": {}}))
    assert main(["export", str(run), str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "skipped a checkpoint: " in said
    assert "step 1 of" in said
    shutil.rmtree(run / "checkpoints/step-00000001")
    assert restore.newest(run / "checkpoints")[0] is None
    assert main(["export", str(run), str(tmp_path / "again")]) == 1
    assert "has no readable checkpoint" in capsys.readouterr().err


def test_a_leading_tilde_is_the_home_folder_in_settings_and_arguments(tmp_path, monkeypatch, capsys):
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "work")
    shutil.copytree(builtin.resolve(runs.SMALL[0].partition("=")[2]), tmp_path / "home/base")
    shutil.copyfile(runs.__file__.replace("runs.py", "dense_reward.py"), tmp_path / "home/own.py")
    (tmp_path / "home/rows.jsonl").write_text('{"prompt": "sort 21=", "answer": "12"}\n' * 8)
    named = ("model.path", "data.train", "reward", *runs.VALIDATING)
    kept = [word for word in runs.SMALL if not word.startswith(named)]
    words = ("model.path=~/base", "data.train=[~/rows.jsonl]", "reward.functions=['~/own.py:share_right']")
    words = (*kept, *words, "trainer.max_steps=1", "trainer.output_dir=~/run")
    OmegaConf.save(OmegaConf.from_dotlist(list(words)), tmp_path / "home/recipe.yaml")
    assert main(["train", "~/recipe.yaml"]) == 0
    assert main(["export", "~/run", "~/out"]) == 0
    assert main(["report", "~/run", "--output", "~/page.html"]) == 0
    resumed = "trainer.max_steps=2", "trainer.resume=~/run/checkpoints/step-00000001"
    assert main(["train", "~/recipe.yaml", *resumed]) == 0
    assert "changed since the checkpoint" not in capsys.readouterr().out
    for name in ("run/final", "out/model.safetensors", "page.html", "run/checkpoints/step-00000002"):
        assert (tmp_path / "home" / name).exists(), name
    assert list((tmp_path / "work").iterdir()) == []
    with pytest.raises(ConfigError, match="there is no such user's home"):
        runs.small(tmp_path / "run", "model.path=~nobody-of-this-name/model")
