"""The command lines of verl's tutorials, pasted as they stand, end in a recipe that loads or are refused by name."""

from pathlib import Path

import pytest
import yaml

from hwgrpo.cli.main import main
from hwgrpo.config import Config, load_config
from hwgrpo.errors import ConfigError
from hwgrpo.migrate.imports.recipe_text import recipe_text
from hwgrpo.migrate.imports.verl_import import import_verl
from hwgrpo.migrate.imports.verl_reader import read_verl

ACTOR, MODEL = "actor_rollout_ref.actor.", "actor_rollout_ref.model."
GSM8K = """python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=$HOME/data/gsm8k/train.parquet \\
    data.val_files=$HOME/data/gsm8k/test.parquet \\
    data.train_batch_size=256 \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct \\
    actor_rollout_ref.rollout.n=4 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.001 \\
    trainer.n_gpus_per_node=2 \\
    trainer.total_epochs=15
"""
SCRIPT = GSM8K.rstrip() + " $@\n"
LORA = """python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=$HOME/data/gsm8k/train.parquet \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct \\
    actor_rollout_ref.actor.lora.enable=True \\
    actor_rollout_ref.actor.lora.r=16 \\
    actor_rollout_ref.actor.lora.alpha=32 \\
    actor_rollout_ref.actor.lora.target_modules='["q_proj","v_proj"]' \\
    actor_rollout_ref.rollout.n=4 \\
    trainer.n_gpus_per_node=2
"""
WHOLE = """python3 -m verl.trainer.main_ppo \\
    # the algorithm
    algorithm.adv_estimator=grpo \\
    algorithm.norm_adv_by_std_in_grpo=True \\

    # data
    data.train_files=$HOME/data/gsm8k/train.parquet \\
    data.val_files=$HOME/data/gsm8k/test.parquet \\
    data.train_batch_size=256 \\
    data.max_prompt_length=1024 \\
    data.max_response_length=512 \\
    # the model
    actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct \\
    actor_rollout_ref.rollout.n=4 \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
    actor_rollout_ref.actor.clip_ratio=0.2 \\
    actor_rollout_ref.actor.loss_agg_mode=token-mean \\
    # KL
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.kl_loss_coef=0.001 \\
    actor_rollout_ref.actor.kl_loss_type=kl \\
    # the run
    trainer.n_gpus_per_node=4 \\
    trainer.total_epochs=20 \\
    trainer.save_freq=5 \\
    trainer.logger='["console","wandb"]'
"""
DR_GRPO = """python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    algorithm.norm_adv_by_std_in_grpo=False \\
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm \\
    actor_rollout_ref.actor.loss_scale_factor=512 \\
    actor_rollout_ref.actor.use_kl_loss=False \\
    data.train_files=$HOME/data/gsm8k/train.parquet \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct \\
    actor_rollout_ref.rollout.n=4 \\
    trainer.n_gpus_per_node=4
"""


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/me")


def load(text: str, folder: Path, *arguments: str) -> Config:
    script, recipe = folder / "run.sh", folder / "recipe.yaml"
    script.write_text(text)
    settings, _ = read_verl(str(script), arguments, {"HOME": "/home/me"})
    result = import_verl(settings)
    assert result.refused() == []
    recipe.write_text(recipe_text(result, "run.sh"))
    return load_config(recipe, ["observe.loggers=[jsonl]"], data_may_be_missing=True)


def test_gsm8k_on_two_devices(tmp_path: Path):
    config = load(GSM8K, tmp_path)
    assert config.data.train == "/home/me/data/gsm8k/train.parquet"
    assert (config.trainer.prompts_per_step, config.trainer.prompts_per_update) == (256, None)
    assert (config.algorithm.kl.coef, config.algorithm.kl.estimator, config.trainer.epochs) == (0.001, "k3", 15)


def test_a_script_with_overrides(tmp_path: Path):
    config = load(
        SCRIPT, tmp_path, "data.train_batch_size=512", "actor_rollout_ref.rollout.n=8", "trainer.total_epochs=20"
    )
    assert (config.trainer.prompts_per_step, config.trainer.prompts_per_update) == (512, 256)
    assert (config.rollout.n, config.trainer.epochs) == (8, 20)


def test_lora_by_the_names_of_the_tutorial(tmp_path: Path):
    lora = load(LORA, tmp_path).model.lora
    assert (lora.rank, lora.alpha, lora.target_modules) == (16, 32.0, ["q_proj", "v_proj"])


def test_the_whole_config_with_comments_between_its_lines(tmp_path: Path):
    config = load(WHOLE, tmp_path)
    assert (config.algorithm.kl.estimator, config.algorithm.kl.coef) == ("k1", 0.001)
    assert (config.rollout.engine, config.rollout.tensor_parallel_size) == ("auto", 2)
    assert (config.trainer.tokens_per_micro_batch, config.trainer.save_every) == (4 * 1536, 5)


def test_a_small_test(tmp_path: Path):
    small = ("data.train_batch_size=128", "actor_rollout_ref.actor.ppo_mini_batch_size=128", "trainer.logger=console")
    config = load(SCRIPT, tmp_path, *small, "trainer.total_epochs=10")
    assert (config.trainer.prompts_per_step, config.trainer.prompts_per_update) == (128, None)


def test_math(tmp_path: Path):
    names = {"data.train_batch_size": 512, "actor_rollout_ref.actor.ppo_mini_batch_size": 512}
    more = [f"{name}={value}" for name, value in names.items()]
    model = "actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct"
    config = load(SCRIPT, tmp_path, *more, model, "actor_rollout_ref.rollout.tensor_model_parallel_size=2")
    assert (config.model.path, config.trainer.prompts_per_step) == ("Qwen/Qwen2-7B-Instruct", 512)


def test_dr_grpo(tmp_path: Path):
    algorithm = load(DR_GRPO, tmp_path).algorithm
    assert (algorithm.advantage.std, algorithm.kl.coef) == ("none", 0.0)
    assert (algorithm.aggregation.name, algorithm.aggregation.norm_length) == ("seq-mean-token-sum-norm", 512)


@pytest.mark.parametrize(
    ("key", "here"),
    [
        ("actor_rollout.ref.rollout.n=6", lambda config: config.rollout.n == 6),
        (
            "actor_rollout_ref.actor.fsdp_config.gradient_checkpointing=False",
            lambda config: config.model.gradient_checkpointing is False,
        ),
        ("actor_rollout_ref.actor.optim.warmup_style=cosine", lambda config: config.optim.schedule == "cosine"),
    ],
)
def test_names_that_verl_does_not_have_any_more(key: str, here: object, tmp_path: Path):
    text = GSM8K.replace("    actor_rollout_ref.rollout.n=4 \\\n", "")
    assert callable(here)
    assert here(load(text, tmp_path, key, "actor_rollout_ref.actor.ppo_mini_batch_size=256"))


def test_an_example_of_verl_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"no file run_qwen3-8b.sh.*verl's examples"):
        read_verl("run_qwen3-8b.sh", [], {})


def test_the_command_writes_a_recipe_and_shows_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    script, recipe = tmp_path / "run.sh", tmp_path / "recipe.yaml"
    script.write_text(GSM8K)
    assert main(["import", "verl", str(script), "trainer.total_epochs=2", "--output", str(recipe)]) == 0
    shown = capsys.readouterr()
    assert shown.out == ""
    for title in ("Mapped (", "Defaults of verl that differ", "Without meaning here ("):
        assert title in shown.err
    assert f"hwgrpo launch {recipe} --devices 2" in shown.err
    assert "  # verl: trainer.total_epochs=2\n  epochs: 2\n" in recipe.read_text()
    assert main(["import", "verl", str(script)]) == 0
    assert capsys.readouterr().out.startswith("# Imported from ")


def test_refused_keys_stop_it_unless_they_are_dropped(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    refused = ["data.video_key=videos", "trainer.val_only=True"]
    command = ["import", "verl", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4", *refused]
    assert main(command) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "data.video_key=videos, trainer.val_only=True" in shown.err.splitlines()[-1]
    assert main([*command, "--drop-refused"]) == 0
    assert "# Left out, refused: data.video_key=videos" in capsys.readouterr().out


COMMENTED = (*(each.replace(" \\\n", " \\\n    # why\n", 2) for each in (GSM8K, SCRIPT, LORA, DR_GRPO)), WHOLE)
SMALL = ("data.train_batch_size=128", f"{ACTOR}ppo_mini_batch_size=128", "trainer.logger=console")
MATH = ("data.train_batch_size=512", f"{ACTOR}ppo_mini_batch_size=512", f"{MODEL}path=Qwen/Qwen2-7B-Instruct")
SEVEN = {
    "two devices": (COMMENTED[0], ()),
    "a script with overrides": (
        COMMENTED[1], ("data.train_batch_size=512", "actor_rollout_ref.rollout.n=8", "trainer.total_epochs=20"),
    ),
    "adapters": (COMMENTED[2], ()),
    "a whole config": (COMMENTED[4], ()),
    "a small test": (COMMENTED[1], (*SMALL, "trainer.total_epochs=10")),
    "mathematics": (COMMENTED[1], (*MATH, "trainer.n_gpus_per_node=4", "trainer.total_epochs=20")),
    "Dr. GRPO": (COMMENTED[3], ()),
}  # fmt: skip


@pytest.mark.parametrize(("text", "arguments"), SEVEN.values(), ids=SEVEN)
def test_a_line_of_a_tutorial_is_planned(
    text: str, arguments: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    script = tmp_path / "run.sh"
    script.write_text(text)
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "1 + 1 = ", "answer": "2", "data_source": "openai/gsm8k"}\n' * 4)
    sets = (
        f"data.train={data}",
        "data.validation=null",
        "model.path=builtin://tiny?steps=0",
        "observe.loggers=[jsonl]",
    )
    command = ["train", "--from", "verl", str(script), *arguments, "--dry-run"]
    assert main([*command, *(part for each in sets for part in ("--set", each))]) == 0
    shown = capsys.readouterr()
    assert "# why" in text or "# KL" in text
    assert "a comment or an empty line between continued lines" in shown.err
    for title in ("Mapped (", "Defaults of verl that differ", "Without meaning here ("):
        assert title in shown.err
    assert "Refused" not in shown.err
    assert "schedule " in shown.out


RUN = (
    *("algorithm.adv_estimator=grpo", "data.train_files=task://sort", "data.train_batch_size=4"),
    *("actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.rollout.n=4"),
    *("actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct", "data.max_response_length=8"),
    *("actor_rollout_ref.actor.use_kl_loss=True", "trainer.total_training_steps=2", "trainer.val_before_train=False"),
)
OURS = (
    "--set",
    "model.path=builtin://tiny",
    "--set",
    "rollout.engine=local",
    "--set",
    "reward.functions=[exact_match]",
)


def test_train_takes_the_settings_of_an_import_and_ours_above_them(capsys: pytest.CaptureFixture[str]):
    assert main(["train", "--from", "verl", *RUN, "--print-config", *OURS]) == 0
    shown = capsys.readouterr()
    settings = yaml.safe_load(shown.out)
    assert settings["model"]["path"] == "builtin://tiny"
    assert settings["trainer"]["prompts_per_update"] == 2
    assert settings["trainer"]["max_steps"] == 2
    assert "Mapped (" in shown.err


@pytest.mark.parametrize("option", [["--set", "optim.lr=1e-5"], ["--entry", "main_ppo"], ["--drop-refused"]])
def test_train_refuses_options_of_an_import_without_an_import(option: list[str], capsys: pytest.CaptureFixture[str]):
    assert main(["train", "tiny_sort", *option]) == 2
    assert f"{option[0]} is for --from verl" in capsys.readouterr().err


@pytest.mark.slow
def test_train_trains_an_import(tmp_path: Path):
    assert main(["train", "--from", "verl", *RUN, *OURS, "--set", f"trainer.output_dir={tmp_path / 'run'}"]) == 0
    assert (tmp_path / "run" / "final").is_dir()
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) >= 2
