"""Runs on prompts with images, and on trajectories that show some: layouts, resume, what is refused."""

from pathlib import Path

import pytest

from hwgrpo.cli.main import main
from hwgrpo.errors import ConfigError
from hwgrpo.models.loading import load_model_config
from hwgrpo.training.vision_checks import check_vision
from tests.support.runs import runs
from tests.training.update.test_turn_runs import IN_FLIGHT, cut

SEEN = (
    "model.path=builtin://tiny?task=squares&steps=2&batch=8",
    "data.train=task://squares",
    "data.max_prompt_tokens=64",
    "reward.functions=[{name: cosine_length, kwargs: {max_length: 8}}]",
    "trainer.validate_every=0",
    "data.validation_max_rows=4",
    "data.max_rows=16",
    "trainer.max_steps=3",
    "rollout.max_response_tokens=8",
)
SHOW = """
import base64, io
from PIL import Image
from hwgrpo.api import StepResult


class Show:
    def reset(self, row):
        self.row, self.turn = row, 0
        return None

    def step(self, action):
        self.turn += 1
        reward = float(ord(action.text[0]) % 5) if action.text else 0.0
        image = Image.new("RGB", (16, 16 * self.turn), (40 * len(action.text) % 256, 90, 10))
        return StepResult([{"role": "user", "content": [{"type": "image", "image": image}]}], reward, self.turn == 3)
"""
DENSE = """
def first_letters(completions, **columns):
    return [float(sum(map(ord, one[0]["content"][:2])) % 7) for one in completions]
"""


@pytest.fixture
def words(tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "dense.py").write_text(DENSE)
    return (*SEEN, f"reward.functions=['{tmp_path}/dense.py:first_letters']")


@pytest.fixture
def shown(tmp_path: Path) -> tuple[str, ...]:
    """Return the settings of a run whose environment shows images after the first turns."""
    (tmp_path / "show.py").write_text(SHOW)
    return (
        *SEEN,
        "rollout.workflow=environment",
        f"rollout.agent.environments=['{tmp_path}/show.py:Show']",
        "rollout.agent.max_turn_tokens=3",
        "rollout.max_response_tokens=60",
        "reward.functions=[environment]",
    )


def steps(output: Path) -> list[dict]:
    return [line for line in runs.metrics(output) if "actor/loss" in line]


def test_layouts_train_alike_on_images_and_the_engine_and_the_trainer_agree(words, shown, tmp_path: Path):
    for name, run in (("prompts", words), ("observed", shown)):
        found = []
        for layout in ("padded", "packed", "grouped"):
            output = tmp_path / name / layout
            more = (f"model.layout={layout}", "trainer.max_steps=1", "optim.eps=1e-2", "model.train_vision=all")
            runs.run(output, *run, *more)
            found += steps(output)
        for line in found:
            assert line["rollout_corr/log_ratio_max"] < 1e-4
            for metric in ("actor/grad_norm", "actor/pg_loss", "actor/entropy"):
                assert line[metric] == pytest.approx(found[0][metric], rel=1e-3, abs=1e-5), (name, metric)
            assert line["actor/grad_norm"] > 0


FILTERED = (
    *("algorithm.filter_groups.enable=true", "algorithm.filter_groups.replay_groups=2"),
    "algorithm.correction.name=sequence_truncate",
)


@pytest.mark.parametrize("more", [IN_FLIGHT, FILTERED], ids=["in flight", "filtered and replayed"])
@pytest.mark.parametrize("kind", ["prompts", "observed"])
def test_a_run_resumes_bit_for_bit_with_the_images_of_what_was_in_flight(kind, more, words, shown, tmp_path: Path):
    run = (*(words if kind == "prompts" else shown), *more, "trainer.save_every=1")
    runs.run(tmp_path / "whole", *run)
    cut(tmp_path / "cut", *run, after=2)
    runs.run(tmp_path / "cut", *run)
    assert runs.everything(tmp_path / "cut") == runs.everything(tmp_path / "whole")
    assert len(steps(tmp_path / "whole")) == 3
    assert any(line["actor/grad_norm"] > 0 for line in steps(tmp_path / "whole"))


def test_adapters_of_the_tower_are_trained_at_a_rate_of_their_own(words, tmp_path: Path):
    more = ("model.lora.rank=2", "model.lora.vision=all", "optim.vision_lr=1e-4", "algorithm.kl.coef=0.1")
    runs.run(tmp_path / "run", *words, *more, "trainer.max_steps=2")
    first, second = steps(tmp_path / "run")
    assert first["actor/kl_loss"] == pytest.approx(0, abs=1e-6)  # the reference has the tower without adapters
    assert second["actor/kl_loss"] > 1e-7
    assert second["rollout_corr/log_ratio_max"] < 1e-4


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        ("trainer.capture_steps=[1]", "images are not captured"),
        ("optim.name=muon", "one learning rate"),
    ],
)
def test_what_does_not_take_images_is_refused_by_name(word, problem, words, tmp_path: Path, capsys):
    more = ("optim.vision_lr=1e-4", "model.train_vision=all") if "muon" in word else ()
    with pytest.raises(ConfigError, match=problem):
        runs.run(tmp_path / "run", *words, word, *more)


def test_an_engine_that_takes_prompts_of_text_is_refused_by_name(words, tmp_path: Path):
    config = runs.small(tmp_path / "run", *words, "rollout.engine=sglang_server")
    with pytest.raises(ConfigError, match=r"rollout\.engine='sglang_server' does not take; use rollout\.engine=local"):
        check_vision(config, load_model_config(config.model))


def test_settings_of_towers_are_refused_for_text_models(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"model.train_vision='all': .* reads text alone"):
        runs.run(tmp_path / "run", "model.train_vision=all")


def test_a_trained_model_is_evaluated_from_its_folder(words, tmp_path: Path, capsys):
    runs.run(tmp_path / "run", *words, "trainer.max_steps=1")
    rows = ("data.validation=task://squares", "data.validation_max_rows=4", "reward.functions=[exact_match]")
    assert main(["eval", str(tmp_path / "run"), *rows]) == 0
    assert (tmp_path / "run" / "final" / "preprocessor_config.json").is_file()
