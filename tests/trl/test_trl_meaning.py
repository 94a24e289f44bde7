"""A setting of TRL changes the run here as it changes TRL's."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from hwgrpo.config import Config
from hwgrpo.errors import ConfigError
from hwgrpo.migrate.imports.trl_import import import_trl
from hwgrpo.migrate.imports.trl_reader import trl_settings
from tests.trl.trl_runs import BASE, config_of, imported


def value(config: Config, key: str) -> Any:
    return functools.reduce(lambda section, name: getattr(section, name), key.split("."), config)


def test_the_defaults_of_trl_are_applied(tmp_path: Path):
    result = imported()
    config = config_of(result, tmp_path)
    expected = {
        "rollout.n": 8,
        "trainer.prompts_per_step": 1,
        "trainer.prompts_per_update": None,
        "trainer.epochs_per_batch": 1,
        "trainer.epochs": 3,
        "trainer.seed": 42,
        "trainer.save_every": 500,
        "trainer.resume": "never",
        "trainer.output_dir": "trainer_output",
        "rollout.max_response_tokens": 512,
        "rollout.temperature": 1.0,
        "rollout.engine": "local",
        "rollout.skip_special_tokens": True,
        "model.gradient_checkpointing": True,
        "model.dtype": "bfloat16",
        "optim.lr": 1e-6,
        "optim.weight_decay": 0.0,
        "optim.betas": [0.9, 0.999],
        "optim.grad_clip": 1.0,
        "optim.schedule": "linear",
        "optim.warmup_steps": 0,
        "algorithm.kl.coef": 0.0,
        "algorithm.loss.name": "ppo_clip",
        "algorithm.loss.clip_low": 0.2,
        "algorithm.loss.clip_high": 0.2,
        "algorithm.loss.dual_clip": None,
        "algorithm.loss.log_ratio_clamp": None,
        "algorithm.aggregation.name": "token-mean",
        "algorithm.advantage.eps": 1e-4,
        "algorithm.advantage.std": "group",
        "algorithm.correction.name": "none",
        "observe.loggers": ["jsonl"],
        "observe.log_every": 10,
    }
    assert {key: value(config, key) for key in expected} == expected
    applied = " ".join(each.key for each in result.entries if each.group == "default")
    for name in ("lr_scheduler_type", "seed", "bf16", "num_train_epochs", "save_steps", "logging_steps"):
        assert name in applied


CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("num_generations=4", {"rollout.n": 4, "trainer.prompts_per_step": 2}),
    ("per_device_train_batch_size=32 gradient_accumulation_steps=2", {"trainer.prompts_per_step": 8}),
    (
        "per_device_train_batch_size=16 steps_per_generation=4 num_iterations=2 max_steps=16 save_steps=20",
        {
            "trainer.prompts_per_step": 8,
            "trainer.prompts_per_update": 2,
            "trainer.epochs_per_batch": 2,
            "trainer.max_steps": 2,
            "trainer.save_every": 3,
        },
    ),
    ("gradient_accumulation_steps=4 steps_per_generation=1", {"trainer.prompts_per_step": 4}),
    ("generation_batch_size=64", {"trainer.prompts_per_step": 8, "trainer.prompts_per_update": 1}),
    ("beta=0.04", {"algorithm.kl.coef": 0.04, "algorithm.kl.times_ratio": True, "algorithm.kl.input_clamp": None}),
    ("beta=0.04 use_bias_correction_kl=false", {"algorithm.kl.coef": 0.04, "algorithm.kl.times_ratio": False}),
    (
        "beta=0.1 sync_ref_model=true ref_model_sync_steps=64 ref_model_mixup_alpha=0.5",
        {"algorithm.kl.sync_every": 64, "algorithm.kl.sync_share": 0.5},
    ),
    ("epsilon=0.1 epsilon_high=0.28", {"algorithm.loss.clip_low": 0.1, "algorithm.loss.clip_high": 0.28}),
    ("epsilon=0.1", {"algorithm.loss.clip_high": 0.1}),
    ("epsilon=10.0", {"algorithm.loss.clip_low": 1.0, "algorithm.loss.clip_high": 10.0}),
    ("loss_type=grpo", {"algorithm.aggregation.name": "seq-mean-token-mean"}),
    ("loss_type=dr_grpo scale_rewards=False", {"algorithm.aggregation.name": "seq-mean-token-sum-norm"}),
    ("loss_type=cispo epsilon_high=5", {"algorithm.loss.name": "cispo", "algorithm.loss.clip_high": 4.0}),
    ("loss_type=cispo", {"algorithm.loss.clip_high": -0.8, "algorithm.loss.clip_low": 1.0}),
    ("loss_type=sapo sapo_temperature_neg=1.2", {"algorithm.loss.name": "sapo", "algorithm.loss.tau_neg": 1.2}),
    (
        "loss_type=vespo vespo_k_pos=1",
        {"algorithm.loss.kwargs": {"k_pos": 1, "lambda_pos": 3, "k_neg": 3, "lambda_neg": 2}},
    ),
    ("importance_sampling_level=sequence", {"algorithm.loss.name": "gspo"}),
    ("scale_rewards=batch", {"algorithm.advantage.std": "batch"}),
    ("scale_rewards=false", {"algorithm.advantage.std": "none"}),
    ("multi_objective_aggregation=normalize_then_sum", {"algorithm.advantage.name": "gdpo"}),
    ("delta=4", {"algorithm.loss.delta": 4.0}),
    ("mask_truncated_completions=true", {"algorithm.mask_truncated": True}),
    ("top_entropy_quantile=0.2", {"algorithm.top_entropy_share": 0.2}),
    ("use_adaptive_entropy=true entropy_target=0.3", {"algorithm.entropy_target": 0.3}),
    ("learning_rate=2e-6 weight_decay=0.1", {"optim.lr": 2e-6, "optim.weight_decay": 0.1}),
    ("lr_scheduler_type=constant_with_warmup warmup_steps=5", {"optim.schedule": "constant", "optim.warmup_steps": 5}),
    ("lr_scheduler_type=constant warmup_steps=5", {"optim.schedule": "constant", "optim.warmup_steps": 0}),
    ("warmup_ratio=0.1 max_steps=25", {"optim.warmup_steps": 3, "trainer.max_steps": 25}),
    ("warmup_ratio=0.1", {"optim.warmup_ratio": 0.1}),
    ("system_prompt=Think.", {"data.system_prompt": "Think.", "data.chat": "always"}),
    ("dataset_prompt_column=problem", {"data.prompt_key": "problem", "data.chat": "always"}),
    ("report_to=wandb wandb_project=r1", {"observe.project": "r1"}),
    (
        "lr_scheduler_type=cosine_with_min_lr lr_scheduler_kwargs={min_lr_rate: 0.1}",
        {"optim.schedule": "cosine", "optim.min_lr_ratio": 0.1},
    ),
    ("optim=adamw_8bit", {"optim.name": "adamw_8bit"}),
    ("bf16=false", {"model.dtype": "float32"}),
    ("generation_kwargs={stop: [END]} top_k=20 min_p=0.1", {"rollout.stop": ["END"], "rollout.top_k": 20}),
    ("max_prompt_length=256", {"data.max_prompt_tokens": 256, "data.overlong": "truncate_left"}),
    ("model_name_or_path=Qwen/Qwen2.5-VL-3B-Instruct", {"model.train_vision": "all"}),
    ("model_name_or_path=HuggingFaceTB/SmolVLM2-2.2B-Instruct use_peft=true", {"model.lora.vision": "all"}),
    ("use_peft=true lora_r=8", {"model.lora.rank": 8, "model.lora.dropout": 0.05, "model.lora.vision": "none"}),
    ("use_peft=true load_in_4bit=true", {"model.quantize": "nf4", "model.lora.target_modules": ["q_proj", "v_proj"]}),
    (
        "use_vllm=true vllm_gpu_memory_utilization=0.4",
        {
            "rollout.engine": "vllm",
            "rollout.gpu_memory_utilization": 0.4,
            "algorithm.correction.name": "sequence_mask",
            "algorithm.correction.high": 3.0,
        },
    ),
    (
        "use_vllm=true vllm_mode=server vllm_server_host=10.0.0.1 vllm_importance_sampling_correction=false",
        {
            "rollout.engine": "vllm_server",
            "rollout.server.url": "http://10.0.0.1:8000",
            "algorithm.correction.name": "none",
        },
    ),
    ("use_vllm=true vllm_importance_sampling_cap=2.0", {"rollout.engine": "vllm", "algorithm.correction.high": 2.0}),
    (
        "eval_strategy=steps eval_steps=20 num_generations_eval=2",
        {
            "data.validation": "train.jsonl",
            "trainer.validate_every": 20,
            "trainer.validate_at_start": False,
            "trainer.validation_n": 2,
            "data.validation_max_rows": 0,
        },
    ),
    ("fsdp=full_shard", {"trainer.strategy": "fsdp2"}),
    ("use_cpu=true", {"backend.name": "cpu"}),
    ("report_to=[tensorboard]", {"observe.loggers": ["jsonl", "tensorboard"], "observe.project": None}),
]


@pytest.mark.parametrize(("settings", "expected"), CHANGES, ids=[each for each, _ in CHANGES])
def test_a_changed_setting_changes_the_run(settings: str, expected: dict[str, Any], tmp_path: Path):
    import re

    given = re.findall(r"\w+=(?:[\[{].*?[\]}]+|\S+)(?=\s\w+=|$)", settings)
    config = config_of(imported(*given), tmp_path)
    assert {key: value(config, key) for key in expected} == expected
    plain = config_of(imported(), tmp_path)
    assert any(value(plain, key) != each for key, each in expected.items())


ILLEGAL = [
    # the tutorial's own: 16 completions are no whole groups of 6
    (
        {"num_generations": 6, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 16},
        1,
        "use num_generations=8, or gradient_accumulation_steps=18",
    ),
    ({"num_generations": 8, "per_device_train_batch_size": 3}, 2, "gradient_accumulation_steps=4"),
    ({"num_generations": 1}, 1, "num_generations=2 or more"),
    ({"generation_batch_size": 20, "per_device_train_batch_size": 8}, 1, "generation_batch_size=16"),
    ({"generation_batch_size": 64, "steps_per_generation": 8}, 1, "one setting"),
    ({"steps_per_generation": 3, "gradient_accumulation_steps": 2}, 1, "steps_per_generation=2"),
    (
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "steps_per_generation": 8},
        1,
        "gradient_accumulation_steps=8, or steps_per_generation=4",
    ),
]


@pytest.mark.parametrize(("settings", "processes", "remedy"), ILLEGAL)
def test_an_illegal_batch_is_refused_with_the_nearest_legal_values(
    settings: dict[str, Any], processes: int, remedy: str
):
    with pytest.raises(ConfigError) as error:
        trl_settings(settings, {"WORLD_SIZE": str(processes)}).batches()
    assert remedy in str(error.value)


@pytest.mark.parametrize("settings", [each for each, _, _ in ILLEGAL[:2]])
def test_the_values_of_the_remedy_are_legal(settings: dict[str, Any]):
    import re

    with pytest.raises(ConfigError) as error:
        trl_settings(settings, {"WORLD_SIZE": "2"} if "gradient" not in str(settings) else {}).batches()
    remedies = re.findall(
        r"(num_generations|gradient_accumulation_steps)=(\d+)", str(error.value).rpartition("use ")[2]
    )
    for key, text in remedies:
        environment = {"WORLD_SIZE": "2"} if "gradient" not in str(settings) else {}
        assert trl_settings({**settings, key: int(text)}, environment).batches().prompts_per_step >= 1


def test_rows_that_are_known_give_the_steps_of_epochs():
    settings = {"num_generations": 4, "per_device_train_batch_size": 8, "num_train_epochs": 1.5, "warmup_steps": 0.1}
    result = import_trl(trl_settings({**settings, "save_strategy": "epoch"}, {}, prompts=21))
    # 21 rows are 10 generations of 2 prompts; the rest of an epoch is dropped, as in TRL
    assert result.settings["trainer.max_steps"] == 15
    assert result.settings["optim.warmup_steps"] == 2
    assert result.settings["trainer.save_every"] == 10


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_OFFLOAD_PARAMS": "true"}, {"strategy": "fsdp2", "offload": True}),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_SHARDING_STRATEGY": "NO_SHARD"}, {"strategy": "ddp"}),
        ({"ACCELERATE_USE_FSDP": "true", "FSDP_RESHARD_AFTER_FORWARD": "false"}, {"reshard_after_forward": False}),
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, {"strategy": "deepspeed"}),
        (
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
            {"strategy": "deepspeed", "stage": 3},
        ),
        (
            {
                "ACCELERATE_USE_DEEPSPEED": "true",
                "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
                "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu",
            },
            {"offload_parameters": True},
        ),
        ({"ACCELERATE_USE_CPU": "true"}, {"name": "cpu"}),
    ],
)
def test_plug_ins_of_accelerate_launch_are_strategies(environment: dict[str, str], expected: dict[str, Any]):
    settings = imported(environment=environment).settings
    found = {key.rpartition(".")[2]: each for key, each in settings.items()}
    assert {key: found[key] for key in expected} == expected


def test_a_script_in_one_process_shards_nothing():
    for processes, expected in (("1", None), ("2", "fsdp2")):
        settings = trl_settings({"fsdp": "full_shard"}, {"WORLD_SIZE": processes}, prompts=8)
        assert import_trl(settings).settings.get("trainer.strategy") == expected


def test_a_deepspeed_file_is_read(tmp_path: Path):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}))
    settings = imported(f"deepspeed={file}").settings
    assert settings["trainer.strategy"] == "deepspeed"
    assert settings["trainer.deepspeed.stage"] == 1
    assert settings["trainer.deepspeed.offload_optimizer"] is True


@pytest.mark.parametrize(
    "environment", [{"ACCELERATE_MIXED_PRECISION": "fp16"}, {"ACCELERATE_USE_MEGATRON_LM": "true"}]
)
def test_plug_ins_without_counterpart_are_refused(environment: dict[str, str]):
    with pytest.raises(ConfigError, match=next(iter(environment))):
        imported(environment=environment)


def test_processes_divide_the_batch():
    assert (
        imported("gradient_accumulation_steps=2", environment={"WORLD_SIZE": "4"}).settings["trainer.prompts_per_step"]
        == 8
    )
    result = imported("num_processes=4")
    assert result.launch is not None
    assert (result.launch.devices, result.launch.nodes) == (4, 1)


def test_rewards_of_the_script_are_rewards_here():
    result = imported("reward_funcs=[my.rewards.good,accuracy_reward]", "reward_weights=[1,0.5]", base=BASE)
    assert result.settings["reward.functions"] == [
        {"name": "my/rewards.py:good"},
        {"name": "math", "weight": 0.5},
    ]


@pytest.mark.parametrize(
    "settings, environment, project",
    [
        ("report_to=[wandb]", {}, "huggingface"),
        ("report_to=[wandb]", {"WANDB_PROJECT": "mine"}, "mine"),
        ("report_to=[trackio]", {"WANDB_PROJECT": "mine"}, "huggingface"),
        ("report_to=[wandb] project=other", {"WANDB_PROJECT": "mine"}, "mine"),
        ("report_to=[wandb] project=other", {}, "other"),
        ("report_to=[tensorboard]", {"WANDB_PROJECT": "mine"}, None),
    ],
)
def test_the_project_of_wandb_is_that_of_the_environment(
    settings: str, environment: dict[str, str], project: str | None
):
    assert imported(*settings.split(), environment=environment).settings.get("observe.project") == project


@pytest.mark.parametrize("settings", ["save_strategy=epoch", "save_steps=0.05"])
def test_checkpoints_of_an_unknown_number_of_updates_are_at_the_end(settings: str):
    result = imported(settings)
    assert "trainer.save_every" not in result.settings
    [entry] = [each for each in result.entries if each.key == settings.partition("=")[0]]
    assert "the number of rows is not known: one at the end" in entry.note
    assert result.refused() == []
