"""Recipes as settings of verl and TRL: imported again they give the recipe, but for what is listed as lost."""

import re
from pathlib import Path
from typing import Any

import pytest

from hwgrpo.cli.main import main
from hwgrpo.config import Config, load_config
from hwgrpo.config.document import entries
from hwgrpo.config.uses import unused_settings
from hwgrpo.exports.export_text import hydra_value, lost_text, trl_yaml, verl_script
from hwgrpo.exports.peer_export import Exported
from hwgrpo.exports.trl_export import export_trl
from hwgrpo.exports.verl_export import export_verl
from hwgrpo.imports.hydra_values import parse_value
from hwgrpo.imports.import_result import Imported
from hwgrpo.imports.recipe_text import recipe_text
from hwgrpo.imports.trl_import import import_trl
from hwgrpo.imports.trl_reader import read_trl
from hwgrpo.imports.verl_import import import_verl
from hwgrpo.imports.verl_reader import read_verl

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
PRESETS = sorted(path.stem for path in (ROOT / "configs" / "presets").glob("*.yaml"))
BASE = {"model.path": "some/model", "data.train": "train.parquet", "reward.functions": ["rewards/mine.py:score"]}
NAMES = {
    "verl": set((ROOT / "tests/imports/verl_keys.txt").read_text().split("\n")),
    "trl": {line.split()[1] for line in (ROOT / "tests/trl/trl_fields.txt").read_text().splitlines() if line},
}


@pytest.fixture(autouse=True)
def _reward_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "rewards").mkdir()
    (tmp_path / "rewards" / "mine.py").write_text("def score(completions): return [0.0 for _ in completions]\n")
    monkeypatch.chdir(tmp_path)


def recipe(*overrides: str, name: str | None = None) -> Config:
    return load_config(name or dict_of(BASE), overrides, data_may_be_missing=True, variables_may_be_missing=True)


def dict_of(dotted: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in dotted.items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = value
    return tree


def exported(project: str, config: Config, folder: Path) -> tuple[Exported, Imported]:
    """Return the export, and what its file is as an import."""
    if project == "verl":
        result = export_verl(config)
        (folder / "run.sh").write_text(verl_script(result, "a test"))
        return result, import_verl(read_verl(str(folder / "run.sh"), [], {})[0])
    result = export_trl(config)
    (folder / "run.yaml").write_text(trl_yaml(result, "a test"))
    return result, import_trl(read_trl(str(folder / "run.yaml"), [], {})[0])


def value(config: Config, key: str) -> Any:
    for name in key.split("."):
        config = getattr(config, name)
    return config


def check(project: str, config: Config, folder: Path) -> None:
    result, imported = exported(project, config, folder)
    assert not imported.refused()
    (folder / "again.yaml").write_text(recipe_text(imported, "a test"))
    overrides = [] if "reward.functions" in imported.settings else ["reward.functions=[exact_match]"]
    again = load_config(folder / "again.yaml", overrides, data_may_be_missing=True)
    unused = unused_settings(config)
    keys = [each.key for each in entries() if "[]" not in each.key and each.key != "algorithm.preset"]
    differing = {key for key in keys if key not in unused and value(config, key) != value(again, key)}
    assert differing <= {each.key for each in result.lost}
    for key in sorted({each.key for each in result.lost} - differing):
        assert "://" in str(value(config, key)) or key == "reward.functions"
    unknown = [key for key in result.settings if key not in NAMES[project] and not key.startswith(FREE)]
    assert not unknown


FREE = (
    "data.apply_chat_template_kwargs.",
    "actor_rollout_ref.rollout.engine_kwargs.",
    "reward.custom_reward_function.",
    "algorithm.filter_groups.",
)
"""Beginnings of keys that verl's scripts have beside those of its examples."""


@pytest.mark.parametrize("project", ["verl", "trl"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_shipped_recipe_comes_back_but_for_what_is_listed(name, project, tmp_path):
    check(project, recipe(name=name), tmp_path)


@pytest.mark.parametrize("project", ["verl", "trl"])
@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_comes_back_but_for_what_is_listed(preset, project, tmp_path):
    check(project, recipe(f"algorithm.preset={preset}"), tmp_path)


A, R, M = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout.", "actor_rollout_ref.model."
LOSS = A + "policy_loss."
VERL: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (("trainer.prompts_per_step=256",), {"data.train_batch_size": 256}),
    (
        ("trainer.prompts_per_step=512", "trainer.prompts_per_update=128"),
        {"data.train_batch_size": 512, A + "ppo_mini_batch_size": 128},
    ),
    (
        ("optim.warmup_steps=8", "trainer.prompts_per_step=64", "trainer.prompts_per_update=32"),
        {A + "optim.lr_warmup_steps": 4},
    ),
    (
        ("optim.warmup_ratio=0.1",),
        {A + "optim.lr_warmup_steps_ratio": 0.1},
    ),
    (("trainer.max_steps=50",), {"trainer.total_training_steps": 50, "trainer.total_epochs": 50}),
    (("algorithm.kl.coef=0.02",), {A + "use_kl_loss": True, A + "kl_loss_coef": 0.02}),
    (
        ("algorithm.kl.coef=0.02", "algorithm.kl.in_reward=true", "algorithm.kl.estimator=k1"),
        {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.02},
    ),
    (("algorithm.loss.clip_high=0.28",), {A + "clip_ratio_high": 0.28}),
    (
        ("algorithm.aggregation.name=seq-mean-token-sum-norm", "algorithm.aggregation.norm_length=512"),
        {A + "loss_agg_mode": "seq-mean-token-sum-norm", A + "loss_scale_factor": 512},
    ),
    (("algorithm.advantage.std=none",), {"algorithm.norm_adv_by_std_in_grpo": False}),
    (("algorithm.advantage.name=rloo",), {"algorithm.adv_estimator": "rloo"}),
    (
        ("algorithm.loss.name=gspo", "algorithm.aggregation.name=seq-mean-token-mean"),
        {A + "policy_loss.loss_mode": "gspo"},
    ),
    (
        ("rollout.engine=auto", "algorithm.correction.name=token_mask", "algorithm.correction.low=0.5"),
        {
            "algorithm.rollout_correction.rollout_is": "token",
            "algorithm.rollout_correction.rollout_is_threshold": "0.5_2.0",
        },
    ),
    (("algorithm.loss.name=kl_cov", "algorithm.loss.kwargs={coef: 0.5}"), {LOSS + "ppo_kl_coef": 0.5}),
    (("algorithm.loss.name=dppo_tv", "algorithm.loss.kwargs={cap: 5}"), {A + "clip_ratio_c": 5}),
    (("model.lora.rank=16", "model.lora.alpha=64"), {M + "lora_rank": 16, M + "lora_alpha": 64}),
    (("data.overlong=truncate_left",), {"data.truncation": "left"}),
    (("trainer.validation_n=0",), {}),
    (("rollout.top_k=50",), {R + "top_k": 50}),
    (("trainer.tokens_per_micro_batch=8192",), {A + "use_dynamic_bsz": True, A + "ppo_max_token_len_per_gpu": 8192}),
    ((), {A + "use_dynamic_bsz": True, R + "tensor_model_parallel_size": 1, R + "name": "vllm"}),
    (("data.max_prompt_tokens=20000",), {A + "ppo_max_token_len_per_gpu": 20512}),
    (
        ("optim.name=adamw_8bit",),
        {A + "optim.optimizer": "AdamW8bit", A + "optim.optimizer_impl": "bitsandbytes.optim"},
    ),
    ((), {"reward.custom_reward_function.path": "rewards/mine.py", "reward.custom_reward_function.name": "score"}),
]


@pytest.mark.parametrize(("overrides", "expected"), VERL, ids=lambda each: " ".join(each)[:60])
def test_settings_of_verl_mean_the_same_there(overrides, expected, tmp_path):
    config = recipe("data.validation=test.parquet", *overrides)
    result, _ = exported("verl", config, tmp_path)
    assert expected.items() <= result.settings.items()
    check("verl", config, tmp_path)


TRL: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (
        ("trainer.prompts_per_step=16", "rollout.n=4"),
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 16, "num_generations": 4},
    ),
    (
        ("trainer.prompts_per_step=16", "trainer.prompts_per_update=8", "trainer.max_steps=5"),
        {"gradient_accumulation_steps": 8, "steps_per_generation": 16, "max_steps": 10},
    ),
    (("algorithm.loss.clip_high=0.28",), {"epsilon_high": 0.28}),
    (("algorithm.loss.name=cispo", "algorithm.loss.clip_high=4"), {"loss_type": "cispo", "epsilon_high": 5.0}),
    (("algorithm.aggregation.name=seq-mean-token-mean",), {"loss_type": "grpo"}),
    (("algorithm.aggregation.name=seq-mean-token-sum-norm",), {"loss_type": "dr_grpo"}),
    (("algorithm.loss.name=gspo",), {"importance_sampling_level": "sequence"}),
    (("algorithm.kl.coef=0.04",), {"beta": 0.04, "use_bias_correction_kl": False}),
    (("algorithm.advantage.std=none",), {"scale_rewards": "none"}),
    (
        ("optim.schedule=cosine", "optim.min_lr_ratio=0.1"),
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
    ),
    (("model.lora.rank=16", "model.quantize=nf4"), {"use_peft": True, "load_in_4bit": True}),
    (("rollout.engine=vllm", "rollout.tensor_parallel_size=2"), {"use_vllm": True, "vllm_tensor_parallel_size": 2}),
    (("trainer.save_every=10",), {"save_steps": 10}),
    (("model.dtype=float32",), {"bf16": False}),
    (
        (),
        {
            "reward_funcs": ["rewards.mine.score"],
            "datasets": [{"path": "parquet", "data_files": "train.parquet", "split": "train"}],
        },
    ),
]


@pytest.mark.parametrize(("overrides", "expected"), TRL, ids=lambda each: " ".join(each)[:60])
def test_settings_of_trl_mean_the_same_there(overrides, expected, tmp_path):
    config = recipe(*overrides)
    result, _ = exported("trl", config, tmp_path)
    assert expected.items() <= result.settings.items()
    check("trl", config, tmp_path)


@pytest.mark.parametrize(
    ("project", "setting", "not_written"),
    [
        ("verl", ("optim.schedule=linear",), "lr_scheduler_type"),
        ("verl", ("optim.name=muon",), "optimizer"),
        ("verl", ("trainer.strategy=fsdp2", "trainer.tensor_parallel_size=2"), "megatron"),
        ("verl", ("model.lora.rank=8", "model.lora.dropout=0.1"), "dropout"),
        ("trl", ("rollout.stop=[END]",), "generation_kwargs"),
        ("trl", ("algorithm.aggregation.name=token-sum",), "loss_type"),
    ],
)
def test_what_the_project_refuses_or_does_not_pass_on_is_lost(project, setting, not_written, tmp_path):
    result, _ = exported(project, recipe(*setting), tmp_path)
    assert setting[-1].partition("=")[0] in {each.key for each in result.lost}
    assert not [key for key in result.settings if not_written in key]


def test_a_recipe_without_validation_has_none_in_verl(tmp_path):
    result, _ = exported("verl", recipe(), tmp_path)
    assert result.settings["data.val_files"] == "train.parquet"
    assert result.settings["trainer.val_before_train"] is False
    assert "trainer.test_freq" not in result.settings  # verl's default is never
    assert "data.validation" in {each.key for each in result.lost}


def test_evaluations_of_trl_have_a_batch_that_its_samples_divide(tmp_path):
    both = ("data.train=org/name", "data.validation=org/name", "trainer.validate_every=2", "trainer.validation_n=5")
    result, _ = exported("trl", recipe(*both), tmp_path)
    assert (result.settings["num_generations_eval"], result.settings["per_device_eval_batch_size"]) == (5, 5)


def test_hydra_may_add_only_keys_that_its_configuration_cannot_have(tmp_path):
    text = verl_script(
        export_verl(recipe("data.train=~/x.parquet", "data.chat_template_kwargs={thinking: true}")), "it"
    )
    assert text.count("++") == 1
    assert "++data.apply_chat_template_kwargs.thinking=True" in text
    assert """'data.train_files="~/x.parquet"'""" in text


def test_what_is_lost_has_both_values_and_the_reason():
    config = recipe("rollout.min_p=0.1", "model.lora.rank=8", "model.quantize=nf4")
    lost = {each.key: lost_text(each, "verl") for each in export_verl(config).lost}
    assert lost["rollout.min_p"] == "rollout.min_p=0.1: verl's run has 0.0"
    assert lost["model.quantize"] == "model.quantize=nf4: verl's run has none; verl's base model is not quantized"
    assert "reward.functions" not in lost


@pytest.mark.parametrize(
    "each",
    [
        "a b",
        "it's",
        'say "yes"',
        "null",
        "3",
        "1e-3",
        "True",
        "a,b",
        "[x]",
        "",
        1e-6,
        True,
        None,
        [1, "2", "a b"],
        "x=1",
    ],
)
def test_values_are_read_by_hydra_as_they_were(each):
    assert parse_value(hydra_value(each), "key") == each


def test_the_command_writes_a_file_and_prints_what_is_lost(tmp_path, capsys):
    assert (
        main(
            [
                "export",
                "--to",
                "verl",
                "tiny_sort",
                "rollout.n=4",
                "--devices",
                "2",
                "--output",
                str(tmp_path / "run.sh"),
            ]
        )
        == 0
    )
    text = (tmp_path / "run.sh").read_text()
    assert "actor_rollout_ref.rollout.n=4 \\\n" in text
    assert "trainer.n_gpus_per_node=2" in text
    printed = capsys.readouterr().err
    assert "lost: data.train=task://sort: verl has no task://: give it a path" in printed
    assert text.count("# Lost: ") == printed.count("hwgrpo: lost: ")


def test_what_only_hwgrpo_has_of_a_recipe_is_lost(tmp_path, capsys):
    assert main(["export", "--to", "trl", "smollm2_135m_arithmetic", "--output", str(tmp_path / "run.yaml")]) == 0
    printed = capsys.readouterr().err
    assert re.search(r"lost: data.train=reasoning_gym://\S+: TRL has no reasoning_gym://: give it a path", printed)
    assert "lost: data.instruction=Answer with the number only.: TRL's run has null" in printed


@pytest.mark.parametrize("task", ["task://sort", "reasoning_gym://chain_sum"])
def test_a_task_is_not_its_own_validation_file_for_verl(task, tmp_path):
    output = tmp_path / "run.sh"
    assert (
        main(
            [
                "export",
                "--to",
                "verl",
                "smollm2_135m_arithmetic",
                f"data.train={task}",
                "data.validation=null",
                "--output",
                str(output),
            ]
        )
        == 0
    )
    assert "data.val_files" not in output.read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "name one output folder: hwgrpo export run OUT"),
        (["run", "out", "--output", "x"], "--output is an option of --to"),
        (["run", "out", "--devices", "2"], "--devices is an option of --to"),
        (["tiny_sort", "--to", "trl", "--devices", "2"], "--devices 2: it is a number of at least 1, of --to verl"),
        (
            ["tiny_sort", "--to", "verl", "--adapter"],
            "--merge, --adapter, --dtype, --max-shard-size and --trust-remote-code are of a checkpoint",
        ),
        (["tiny_sort", "--to", "verl", "--output", "/no/such/folder/x"], "--output='/no/such/folder/x' cannot be"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments, message, capsys):
    assert main(["export", *arguments]) == 2
    assert message in capsys.readouterr().err
