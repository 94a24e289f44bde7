"""A run that was given secrets leaves them nowhere: not in its folder, not on the terminal."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hwgrpo.cli.main import main
from tests.support.runs import runs

REWARD = Path(__file__).with_name("judging_reward.py")
PLANTED = ("planted-judge-0001", "planted-word-0002")
TYPED = "planted-typed-0003"

Call = Callable[..., tuple[int, str]]


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JUDGE_KEY", PLANTED[0])
    monkeypatch.setenv("PASS_WORD", PLANTED[1])


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Call:
    """Return a function that runs a command in a forked child, and returns its exit code and what it printed."""

    def call(*words: object) -> tuple[int, str]:
        def body() -> None:
            code = main(list(map(str, words)))
            if code:
                raise SystemExit(code)

        code = runs.forked(body)
        shown = capfd.readouterr()
        return (1 if code else 0), shown.out + shown.err

    return call


def recipe_of(folder: Path, function: str = "share_right", more: str = "") -> list[str]:
    """Write a recipe with secrets into a folder that is not the run's; return the words of a command."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        "reward:\n  functions:\n"
        f"    - name: {REWARD}:{function}\n"
        "      kwargs: {key: '${oc.env:JUDGE_KEY}'" + more + "}\n"
    )
    kept = [word for word in runs.SMALL if not word.startswith(("reward.", "observe."))]
    kept += ["observe.progress=plain", "trainer.max_steps=2", "data.validation_max_rows=2", "backend.name=cpu"]
    return [str(recipe), *kept, f"trainer.output_dir={folder / 'run'}"]


def leaks(folder: Path, *texts: str) -> list[str]:
    """Return the files below a folder, and the texts, that contain a secret."""
    contents = {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    contents |= {text[:60]: text.encode() for text in texts}
    assert contents
    return [f"{where}: {secret}" for secret in PLANTED for where, text in contents.items() if secret.encode() in text]


def test_neither_a_runs_folder_nor_what_its_commands_print_holds_a_secret(tmp_path, call, monkeypatch):
    words, folder = recipe_of(tmp_path), tmp_path / "run"
    url = "rollout.server.url=http://ada:${oc.env:PASS_WORD}@127.0.0.1:9"
    seen = [
        call("train", *words, "--print-config"),
        call("train", *words, "rollout.engine=vllm_server", url, "--print-config"),
        call("train", *words, "--dry-run"),
        call("train", *words),
        call("train", *words, "trainer.max_steps=3"),
        call("train", *words, "trainer.max_steps=3"),
    ]
    assert [code for code, _ in seen] == [0] * len(seen), seen
    assert "http://ada:${oc.env:PASS_WORD}@127.0.0.1:9" in seen[1][1]
    failing = recipe_of(tmp_path, "failing")
    failed = [
        call("train", *failing, f"trainer.output_dir={tmp_path / 'failed'}"),
        call("train", *failing, "--dry-run"),
        call("train", *words, "rollout.engine=vllm_server", url, f"trainer.output_dir={tmp_path / 'failed'}"),
        call("train", *words, "rollout.n=${oc.env:PASS_WORD}"),
    ]
    assert [code for code, _ in failed] == [1] * len(failed), failed
    assert "api_key=***" in failed[0][1]
    monkeypatch.delenv("JUDGE_KEY")
    recipe_of(tmp_path)
    without = [
        call("report", folder),
        call("eval", folder, "--n", 1, "--max-rows", 2),
        call("export", folder, tmp_path / "exported"),
        call("plan", *words, "--chip", "mine=100,1000,80"),
        call("train", *words, "--print-config"),
    ]
    assert [code for code, _ in without] == [0] * len(without), without
    assert "the environment variable JUDGE_KEY is not set" in without[1][1]
    assert leaks(tmp_path, *(text for _, text in (*seen, *failed, *without))) == []
    for stored in (folder / "config.yaml").read_text(), (folder / "report.html").read_text():
        assert "${oc.env:JUDGE_KEY}" in stored
    events = list((folder / "tensorboard").iterdir())
    assert events, "the logger that writes them is on"


def test_another_secret_is_said_on_resume_and_neither_is_shown(tmp_path, call, monkeypatch):
    words = recipe_of(tmp_path)
    assert call("train", *words)[0] == 0
    monkeypatch.setenv("JUDGE_KEY", PLANTED[1])
    code, told = call("train", *words, "trainer.max_steps=3")
    assert code == 0
    assert "changed since the checkpoint: reward.functions.0.kwargs.key (its value, not shown)" in told
    code, told = call("train", *words, "trainer.max_steps=3")
    assert code == 0, "it is that of the last checkpoint now, and a key that was changed is no other run"
    assert "not shown" not in told
    assert leaks(tmp_path, told) == []


def test_a_secret_that_was_typed_is_stored_and_not_shown(tmp_path, call):
    words = recipe_of(tmp_path, more=f", api_token: {TYPED}")
    words[words.index("trainer.max_steps=2")] = "trainer.max_steps=1"
    shown = [call("train", *words, "--print-config"), call("train", *words), call("report", tmp_path / "run")]
    page = (tmp_path / "run/report.html").read_text()
    assert not any(TYPED in text for text in (*(text for _, text in shown), page))
    assert "(set, not shown)" in page
    manifest = json.loads((tmp_path / "run/checkpoints/step-00000001/manifest.json").read_text())
    assert TYPED in manifest["state"]["config"]
