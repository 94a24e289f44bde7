"""Chat templates with a clock write the date of a run's first start, whenever it is resumed or evaluated."""

import json
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hwgrpo_backends.cpu import BACKEND
from transformers import PreTrainedTokenizerFast

from hwgrpo.cli import eval
from hwgrpo.config import load_config
from hwgrpo.data.prompts import build_dataset
from hwgrpo.errors import CheckpointError, ConfigError
from hwgrpo.models.loading import load_tokenizer
from hwgrpo.planning.dry_run import make_plan
from hwgrpo.support.jsonlines import read_lines
from hwgrpo.training.checkpoint import manifest
from hwgrpo.training.resume import compare_data
from tests.support.models.reward_models import character_tokenizer, save_reward_model
from tests.support.runs import runs, supervised_runs
from tests.support.servers.reward_server import rewards_by

CLOCK = "{{ strftime_now('%d %b %Y') }}|{% for m in messages %}{{ m.content }}{% endfor %}"
BEFORE, AFTER = "2026-01-01T10:00:00", "2026-02-02T10:00:00"


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch):
    """Return a function that sets the date of the next start."""

    def set_date(date: str) -> None:
        monkeypatch.setattr("hwgrpo.training.resume.present_date", lambda: date)

    return set_date


def words(tmp_path: Path, template: str = CLOCK) -> tuple[str, ...]:
    file = tmp_path / "clock.jinja"
    file.write_text(template)
    return (f"model.chat_template={file}", "data.chat=always", "data.max_prompt_tokens=40", "trainer.save_every=1")


def manifest_of(run: Path, step: int) -> dict[str, Any]:
    return manifest.read(run / f"checkpoints/step-{step:08}").content["state"]


def test_a_resumed_run_and_its_evaluation_write_the_date_of_its_first_start(tmp_path, at, capsys):
    run, own = tmp_path / "run", words(tmp_path)
    at(BEFORE)
    assert runs.run(run, *own, "trainer.max_steps=1", "trainer.keep_checkpoints=5") == "completed"
    at(AFTER)
    assert runs.run(run, *own, "trainer.max_steps=2", "observe.progress=plain") == "completed"
    assert "has changed since" not in capsys.readouterr().out
    prompts = [(line["step"], line["prompt"]) for line in read_lines(run / "completions.jsonl")]
    assert {step for step, _ in prompts} == {1, 2}
    assert all(prompt.startswith("01 Jan 2026|sort ") for _, prompt in prompts)
    assert manifest_of(run, 2)["template_date"] == json.loads((run / "environment.json").read_text())["template_date"]
    assert manifest_of(run, 2)["template_date"] == BEFORE
    for recipe in (run, run / "checkpoints/step-00000002"):
        settings = eval.evaluation_settings(Namespace(recipe=str(recipe), overrides=(), model=None, max_rows=None))
        assert settings.data.template_date == BEFORE
    plan = make_plan(runs.small(run, *own, "trainer.max_steps=3"), BACKEND, 1).text
    assert "continuing after step 2" in plan
    assert "has changed since" not in plan
    assert "template_date: null" in (run / "config.yaml").read_text()
    assert runs.run(run, *own, "trainer.max_steps=2") == "finished", "its prompts are the same"
    named = eval.evaluation_settings(
        Namespace(recipe=str(run), overrides=[f"data.template_date={AFTER}"], model=None, max_rows=None)
    )
    assert named.data.template_date == AFTER


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of the texts that chat templates write from now on."""
    texts = []
    apply = PreTrainedTokenizerFast.apply_chat_template

    def recorded(*args: Any, **kwargs: Any) -> Any:
        texts.append(apply(*args, **kwargs))
        return texts[-1]

    monkeypatch.setattr(PreTrainedTokenizerFast, "apply_chat_template", recorded)
    return texts


REWARD_MODELS = {
    "reward_model": ("decoder", {}),
    "process_reward_model": ("encoder of tokens", {"delimiter": "\n", "reduce": "last"}),
    "online_reward_model": ("language model", {"verifier": "format"}),
    "served_reward_model": ("decoder", {}),
}
"""Reward -> the kind of its model, its further arguments."""


@pytest.mark.parametrize("name", REWARD_MODELS)
def test_reward_models_write_the_date_of_the_first_start(name, tmp_path, at, rendered):
    kind, kwargs = REWARD_MODELS[name]
    save_reward_model(tmp_path / "rm", kind, labels=2 if name == "process_reward_model" else 1, chat=True)
    tokenizer = character_tokenizer()
    tokenizer.chat_template = "RM " + CLOCK
    tokenizer.save_pretrained(tmp_path / "rm")
    with rewards_by(lambda asked, n: {"data": [{"probs": [float(n)]}]}) as server:
        folder = {"path": str(tmp_path / "rm")}
        if name == "served_reward_model":
            folder = {"url": server.url, "tokenizer": str(tmp_path / "rm")}
        reward = json.dumps([{"name": name, "kwargs": {**folder, **kwargs}}])
        for date, steps in ((BEFORE, 1), (AFTER, 2)):
            at(date)
            own = (f"reward.functions={reward}", f"trainer.max_steps={steps}", "trainer.save_every=1")
            assert runs.run(tmp_path / "run", *own) == "completed"
            dates = {text.partition("|")[0] for text in rendered if text.startswith("RM ")}
            assert dates == {"RM 01 Jan 2026"}
            rendered.clear()


def test_a_date_that_is_set_is_written_from_the_first_start_on(tmp_path, at):
    at(AFTER)
    own = (*words(tmp_path), "data.template_date=2025-07-04")
    assert runs.run(tmp_path / "run", *own, "trainer.max_steps=1") == "completed"
    [first, *_] = read_lines(tmp_path / "run/completions.jsonl")
    assert first["prompt"].startswith("04 Jul 2025|")


def test_fine_tuning_keeps_the_date_of_its_first_start(tmp_path, at):
    own = words(tmp_path)
    rows = tmp_path / "rows.jsonl"
    row = {"prompt": [{"role": "user", "content": "a"}], "response": "b"}
    rows.write_text(f"{json.dumps(row)}\n" * 8)
    more = (f"data.train={rows}", "trainer.prompts_per_step=4", "data.validation=null")
    for date, steps in ((BEFORE, 1), (AFTER, 2)):
        at(date)
        assert supervised_runs.run(tmp_path / "run", *own, *more, f"trainer.max_steps={steps}") == "completed"
        assert manifest_of(tmp_path / "run", steps)["template_date"] == BEFORE


def test_prompts_that_a_template_writes_otherwise_are_named_and_older_checkpoints_are_compared_as_before(
    jsonl_rows, data_of
):
    config, tokenizer = data_of
    then = build_dataset(config, tokenizer, "train")
    checkpoint: Any = SimpleNamespace(manifest={"state": {"data": {"train": dict(then.fingerprint)}}})
    assert compare_data(checkpoint, train=then) == []
    tokenizer.chat_template = CLOCK + "!"
    now = build_dataset(config, tokenizer, "train")
    [said] = compare_data(checkpoint, train=now)
    assert f"the text of data.train='{jsonl_rows}', which is the same, has changed since the checkpoint" in said
    assert then.fingerprint["text_sha256"][:12] in said
    del checkpoint.manifest["state"]["data"]["train"]["text_sha256"]
    assert compare_data(checkpoint, train=now) == []


@pytest.fixture
def jsonl_rows(tmp_path: Path) -> Path:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "a"}) + "\n")
    return rows


@pytest.fixture
def data_of(jsonl_rows: Path, tmp_path: Path):
    own = (*words(tmp_path), f"data.train={jsonl_rows}", "data.validation=null", "data.template_date=2026-01-01")
    config = runs.small(tmp_path / "run", *own, "reward.functions=[format]")
    return config.data, load_tokenizer(config.model)


@pytest.mark.parametrize("date", ["yesterday", "2026-13-01", "12"])
def test_what_is_no_date_is_refused_when_settings_are_read(date, tmp_path):
    with pytest.raises(ConfigError, match=rf"data.template_date='{date}' is no date; write it as 2026-07-31"):
        runs.small(tmp_path, f"data.template_date={date}")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("data: {template_date: 2026-07-31}\n")
    written = load_config(recipe, [*runs.SMALL, "trainer.output_dir=x"])
    assert written.data.template_date == "2026-07-31"


def test_a_date_in_a_checkpoint_that_is_none_is_damage(tmp_path, at):
    at(BEFORE)
    run = tmp_path / "run"
    assert runs.run(run, *words(tmp_path), "trainer.max_steps=1") == "completed"
    folder = run / "checkpoints/step-00000001"
    content = json.loads((folder / "manifest.json").read_text())
    content["state"]["template_date"] = "soon"
    (folder / "manifest.json").write_text(json.dumps(content))
    (folder / "manifest.sha256").unlink()
    with pytest.raises(CheckpointError, match=r"state\.template_date='soon' is not a valid value"):
        manifest.read(folder)
