"""What settings of OpenRLHF, ROLL and NeMo-RL mean here: units, losses, KL, advantages, devices."""

from pathlib import Path
from typing import Any

import pytest

from hwgrpo.config import load_config
from hwgrpo.errors import ConfigError
from hwgrpo.imports.core_imports import import_core
from hwgrpo.imports.core_reader import read_yaml_settings
from hwgrpo.imports.import_result import Imported
from hwgrpo.imports.openrlhf_reader import flag_values
from hwgrpo.imports.recipe_text import recipe_text
from hwgrpo.imports.roll_import import device_list
from hwgrpo.peer_tables.nemo_rl_mapped import NEMO_RL
from tests.imports.core_runs import BASES, entry, imported

IS_OPENRLHF = "algo.advantage.is_correction_enable"
ROLL = "actor_train.training_args."
SCRIPT = """
set -x
export WANDB_MODE=offline
GPUS=4
ray job submit --address=http://127.0.0.1:8265 -- python3 -m openrlhf.cli.train_ppo_ray \\
   --actor_num_nodes 2 --actor_num_gpus_per_node ${GPUS} \\
   --pretrain Qwen/Qwen2.5-7B --prompt_data train.jsonl --label_key answer --apply_chat_template \\
   --advantage_estimator dr_grpo --use_kl_loss --kl_estimator k2 --init_kl_coef 1e-3 \\
   --rollout_batch_size 128 --n_samples_per_prompt 8 --train_batch_size 256 --max_epochs 2 \\
   --prompt_max_len 512 --generate_max_len 3072 --eps_clip_low_high 0.2 0.28 \\
   --actor_learning_rate 5e-7 --adam_betas 0.9 0.99 --l2 0.01 --vllm_num_engines 8 --colocate_all_models \\
   --zero_stage 3 --adam_offload --ckpt_path $(pwd)/$(date +%m) --flash_attn
"""


def config_of(result: Imported, folder: Path) -> Any:
    file = folder / "imported.yaml"
    file.write_text(recipe_text(result, "a test"))
    own = () if "reward.functions" in result.settings else ("reward.functions=[exact_match]",)
    return load_config(file, own, data_may_be_missing=True)


def given(system: str, *settings: str) -> dict[str, Any]:
    """Return the settings here that an import has, those at their defaults left out."""
    keys = tuple(each.partition("=")[0] + "=" for each in settings)
    base = tuple(each for each in BASES[system] if not each.startswith(keys))
    result = imported(system, *settings, base=base)
    assert not result.refused()
    return result.settings


def test_a_script_of_openrlhf_with_names_before_0_10(tmp_path: Path):
    file = tmp_path / "run.sh"
    file.write_text(SCRIPT)
    result, notices = import_core("openrlhf", str(file), ["rollout_batch_size=64"], {})
    assert not result.refused()
    assert result.launch is not None
    assert (result.launch.devices, result.launch.nodes) == (4, 2)
    config = config_of(result, tmp_path)
    assert (config.model.path, config.data.train, config.data.ground_truth_key) == (
        "Qwen/Qwen2.5-7B",
        "train.jsonl",
        "answer",
    )
    assert (config.trainer.prompts_per_step, config.trainer.prompts_per_update, config.rollout.n) == (64, 32, 8)
    assert (config.data.max_prompt_tokens, config.rollout.max_response_tokens) == (512, 3072)
    assert (config.algorithm.advantage.name, config.algorithm.advantage.std) == ("grpo", "none")
    assert (config.algorithm.kl.coef, config.algorithm.kl.estimator, config.algorithm.kl.in_reward) == (
        1e-3,
        "k2",
        False,
    )
    assert (config.algorithm.loss.clip_low, config.algorithm.loss.clip_high) == (0.2, 0.28)
    assert config.algorithm.loss.dual_clip is None
    assert (config.optim.lr, list(config.optim.betas), config.optim.weight_decay) == (5e-7, [0.9, 0.99], 0.01)
    assert (config.trainer.epochs_per_batch, config.rollout.engine) == (2, "vllm")
    assert (config.trainer.strategy, config.trainer.deepspeed.stage) == ("deepspeed", 3)
    assert config.trainer.deepspeed.offload_optimizer
    assert entry(result, "flash_attn").group == "unread"
    assert entry(result, "ckpt_path").value == "(unknown)"
    assert any("ckpt_path" in notice for notice in notices)
    assert any("reward.functions does not follow" in notice for notice in notices)
    assert not any("data.train" in notice for notice in notices)


def test_a_number_of_devices_that_a_program_prints_is_not_openrlhfs_default(tmp_path: Path):
    file = tmp_path / "run.sh"
    file.write_text(SCRIPT.replace("GPUS=4", "GPUS=$(nvidia-smi -L | wc -l)"))
    result, notices = import_core("openrlhf", str(file), [], {})
    assert result.launch is not None
    assert (result.launch.devices, result.launch.nodes) == (None, 2)
    assert any("actor_num_gpus_per_node: run.sh, line 4: $(nvidia-smi" in notice for notice in notices)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("python3 -m openrlhf.cli.train_sft --a 1", "has no command `python3 -m openrlhf.cli.train_ppo_ray`"),
        (
            "python3 -m openrlhf.cli.train_ppo_ray --rollout.batch_size $(nproc)",
            r"rollout.batch_size='\?' is not known: run.sh, line 1: .* is the output of a program",
        ),
    ],
)
def test_scripts_that_cannot_be_read(text: str, message: str, tmp_path: Path):
    file = tmp_path / "run.sh"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        import_core("openrlhf", str(file), [], {})


def test_flags():
    flags = ["--a.b", "--c", "1e-3", "-10", "--d=x=y", "e=f"]
    assert flag_values(flags) == {"a.b": True, "c": [1e-3, -10.0], "d": "x=y", "e": "f"}
    with pytest.raises(ConfigError, match="'x' belongs to no flag"):
        flag_values(["x"])


@pytest.mark.parametrize(
    ("system", "settings", "expected"),
    [
        ("openrlhf", "train.batch_size=2048", {"trainer.prompts_per_update": 256, "trainer.prompts_per_step": 1024}),
        ("openrlhf", "algo.advantage.estimator=rloo", {"algorithm.advantage.name": "rloo"}),
        (
            "openrlhf",
            "algo.advantage.estimator=reinforce_baseline",
            {"algorithm.advantage.name": "reinforce_plus_plus_baseline"},
        ),
        (
            "openrlhf",
            "actor.policy_loss_type=gspo",
            {"algorithm.loss.name": "gspo", "algorithm.aggregation.name": "seq-mean-token-mean"},
        ),
        (
            "openrlhf",
            "train.dynamic_batch_enable=true train.max_tokens_per_gpu=4096 data.max_len=20000 ds.ring_attn_size=2"
            " rollout.max_new_tokens=1000",
            {"trainer.tokens_per_micro_batch": 10000},
        ),
        ("openrlhf", "data.max_len=5000 rollout.max_new_tokens=4000", {"data.max_prompt_tokens": 1000}),
        ("openrlhf", "algo.kl.use_loss=true algo.kl.init_coef=0.1", {"algorithm.kl.estimator": "k1"}),
        (
            "openrlhf",
            "algo.advantage.is_correction_enable=true algo.advantage.is_correction_type=icepop",
            {
                "algorithm.correction.name": "token_mask",
                "algorithm.correction.low": 0.5,
                "algorithm.correction.high": 5.0,
            },
        ),
        ("openrlhf", "actor.lr_warmup_ratio=0.1", {"optim.warmup_ratio": 0.1}),
        ("openrlhf", "actor.lr_warmup_ratio=0.1 actor.lr_scheduler=constant", {"optim.warmup_ratio": None}),
        ("roll", f"{ROLL}warmup_ratio=0.1", {"optim.warmup_ratio": 0.1}),
        ("roll", f"{ROLL}warmup_ratio=0.1 {ROLL}warmup_steps=5", {"optim.warmup_ratio": None, "optim.warmup_steps": 5}),
        (
            "roll",
            f"{ROLL}warmup_steps=5 {ROLL}lr_scheduler_type=constant",  # of Megatron, ROLL's default
            {"optim.schedule": None, "optim.warmup_steps": 5},
        ),
        (
            "roll",
            f"{ROLL}warmup_steps=5 {ROLL}lr_scheduler_type=constant "
            "actor_train.strategy_args.strategy_name=fsdp2_train",
            {"optim.warmup_steps": None},
        ),
        ("openrlhf", "ds.tensor_parallel_size=2", {"trainer.strategy": "fsdp2", "trainer.tensor_parallel_size": 2}),
        (
            "openrlhf",
            "ds.lora.rank=8 ds.lora.target_modules=q_proj,v_proj",
            {"model.lora.rank": 8, "model.lora.alpha": 16.0, "model.lora.target_modules": ["q_proj", "v_proj"]},
        ),
        ("openrlhf", "actor.lr_scheduler=constant", {"optim.betas": [0.9, 0.95]}),
        ("openrlhf", "eval.dataset=test.jsonl", {"data.validation": "test.jsonl", "trainer.validate_every": None}),
        ("openrlhf", "actor.eps_clip=5", {"algorithm.loss.clip_low": 1.0, "algorithm.loss.clip_high": 5.0}),
        ("nemo-rl", "loss_fn.ratio_clip_min=5", {"algorithm.loss.clip_low": 1.0}),
        ("roll", "pg_clip=5", {"algorithm.loss.clip_low": 1.0, "algorithm.loss.clip_high": 5.0}),
        ("roll", "dual_clip_loss=true", {"algorithm.loss.dual_clip": 1.4}),
        ("roll", "rollout_batch_size=256", {"trainer.prompts_per_update": 128}),
        ("roll", "pg_clip_high=0.28 use_pg_clip_range=true", {"algorithm.loss.clip_high": 0.28}),
        ("roll", "use_kl_loss=true kl_loss_coef=0.01", {"algorithm.kl.coef": 0.01, "algorithm.kl.input_clamp": None}),
        ("roll", "adv_estimator=reinforce norm_mean_type=group", {"algorithm.advantage.std": "none"}),
        (
            "roll",
            "adv_estimator=reinforce norm_mean_type=group norm_std_type=batch",
            {"algorithm.advantage.std": "batch"},
        ),
        (
            "roll",
            "adv_estimator=reinforce norm_mean_type=group whiten_advantages=true",
            {"algorithm.advantage.name": "reinforce_plus_plus_baseline"},
        ),
        ("roll", "importance_sampling=seq", {"algorithm.loss.name": "gspo"}),
        ("roll", "sequence_length=3072", {"rollout.max_response_tokens": 2048}),
        (
            "roll",
            "actor_train.model_args.ulysses_size=2 actor_train.training_args.gradient_accumulation_steps=128",
            {"trainer.sequence_parallel_size": 2, "trainer.strategy": "fsdp2"},
        ),
        ("roll", "actor_infer.device_mapping=[8,9]", {"rollout.engine": "vllm_server"}),
        ("roll", "actor_infer.device_mapping=list(range(0,8))", {"rollout.engine": "vllm"}),
        (
            "roll",
            "actor_train.model_args.lora_target='q_proj,v_proj' actor_train.model_args.lora_dropout=0.1",
            {"model.lora.rank": 8, "model.lora.alpha": 16.0, "model.lora.dropout": 0.1},
        ),
        ("roll", "actor_train.model_args.lora_rank=16", {"model.lora.rank": None}),
        ("roll", "pg_variant=cispo", {"algorithm.loss.clip_low": 0.1, "algorithm.loss.clip_high": 0.1}),
        (
            "roll",
            "actor_train.strategy_args.strategy_config.pipeline_model_parallel_size=1"
            " adv_estimator=reinforce norm_mean_type=group norm_std_type=null",
            {"optim.lr": 5e-5, "optim.schedule": "linear", "rollout.temperature": 0.95, "rollout.top_p": 0.7}
            | {"rollout.top_k": 50},
        ),
        (
            "roll",
            "actor_train.training_args.per_device_train_batch_size=8"
            " actor_train.training_args.gradient_accumulation_steps=1",
            {"trainer.prompts_per_update": 8},
        ),
        ("nemo-rl", "policy.train_global_batch_size=256", {"trainer.prompts_per_update": 16}),
        ("nemo-rl", "policy.train_global_batch_size=128", {"optim.warmup_steps": 200}),
        ("nemo-rl", "policy.max_total_sequence_length=4096", {"data.max_prompt_tokens": 4096}),
        (
            "nemo-rl",
            "policy.train_micro_batch_size=2 policy.max_total_sequence_length=4096 data.max_input_seq_length=1024",
            {"trainer.tokens_per_micro_batch": 2 * (1024 + 4096)},
        ),
        (
            "nemo-rl",
            "loss_fn.kl_input_clamp_value=null loss_fn.kl_output_clamp_value=5",
            {"algorithm.kl.estimator": "k3+", "algorithm.kl.input_clamp": None, "algorithm.kl.output_clamp": 5.0},
        ),
        (
            "nemo-rl",
            "loss_fn.reference_policy_kl_type=k2",
            {"algorithm.kl.estimator": "k2", "algorithm.kl.times_ratio": True},
        ),
        (
            "nemo-rl",
            "loss_fn.reference_policy_kl_type=k1 policy.train_global_batch_size=256",
            {"algorithm.kl.estimator": "k1+", "algorithm.kl.times_ratio": None},
        ),
        (
            "nemo-rl",
            "grpo.adv_estimator.name=reinforce_plus_plus grpo.adv_estimator.minus_baseline=false",
            {"algorithm.advantage.name": "reinforce_plus_plus"},
        ),
        (
            "nemo-rl",
            "grpo.adv_estimator.name=reinforce_plus_plus",
            {"algorithm.advantage.name": "reinforce_plus_plus_baseline"},
        ),
        (
            "nemo-rl",
            "loss_fn.sequence_level_importance_ratios=true loss_fn.token_level_loss=false"
            " loss_fn.use_importance_sampling_correction=true loss_fn.truncated_importance_sampling_ratio=3",
            {"algorithm.loss.name": "gspo", "algorithm.correction.name": "sequence_truncate"},
        ),
        (
            "nemo-rl",
            "loss_fn.use_importance_sampling_correction=true loss_fn.truncated_importance_sampling_ratio=3"
            " loss_fn.truncated_importance_sampling_ratio_min=0.5",
            {"algorithm.correction.low": 0.5},
        ),
        (
            "nemo-rl",
            "policy.megatron_cfg.enabled=true policy.megatron_cfg.optimizer.lr=3e-7"
            " policy.megatron_cfg.optimizer.adam_beta2=0.95 policy.megatron_cfg.peft.enabled=true"
            " policy.train_global_batch_size=256",
            {"optim.lr": 3e-7, "optim.betas": [0.9, 0.95], "optim.warmup_steps": 26, "model.lora.rank": 8},
        ),
        (
            "nemo-rl",
            "policy.dtensor_cfg.lora_cfg.enabled=true policy.dtensor_cfg.lora_cfg.target_modules=[q_proj]"
            " policy.dtensor_cfg.lora_cfg.match_all_linear=false",
            {"model.lora.target_modules": ["q_proj"]},
        ),
        ("nemo-rl", "loss_fn.force_on_policy_ratio=true", {"trainer.prompts_per_update": None}),
        (
            "nemo-rl",
            "grpo.use_leave_one_out_baseline=true grpo.normalize_rewards=false",
            {"algorithm.advantage.name": "rloo"},
        ),
        ("nemo-rl", "grpo.normalize_rewards=false", {"algorithm.advantage.std": "none"}),
        ("nemo-rl", "loss_fn.token_level_loss=false", {"algorithm.aggregation.name": "seq-mean-token-mean"}),
        (
            "nemo-rl",
            "loss_fn.use_importance_sampling_correction=true loss_fn.truncated_importance_sampling_ratio=3",
            {"algorithm.correction.name": "token_truncate", "algorithm.correction.high": 3.0},
        ),
        ("nemo-rl", "policy.generation.colocated.enabled=false", {"rollout.engine": "vllm_server"}),
        ("nemo-rl", "policy.scheduler=[{name: torch.optim.lr_scheduler.ConstantLR}]", {"optim.lr": 5e-6}),
        ("nemo-rl", "env.math.num_workers=8", {"reward.functions": [{"name": "math"}]}),
        ("nemo-rl", "cluster.gpus_per_node=8", {"trainer.strategy": "fsdp2", "algorithm.kl.coef": 0.01}),
    ],
)
def test_meaning(system: str, settings: str, expected: dict[str, Any], tmp_path: Path):
    pieces = [settings] if "[{" in settings else settings.split()
    found = given(system, *pieces)
    assert {key: found.get(key) for key in expected} == expected
    config_of(imported(system, *pieces, base=_without(system, pieces)), tmp_path)


def _without(system: str, pieces: list[str]) -> tuple[str, ...]:
    return tuple(each for each in BASES[system] if each.partition("=")[0] not in {p.partition("=")[0] for p in pieces})


def test_what_a_default_would_add_is_left_out():
    assert "optim.warmup_steps" not in given("nemo-rl", "policy.scheduler=[{name: x.ConstantLR}]")
    assert given("nemo-rl")["optim.warmup_steps"] == 50
    assert "optim.schedule" not in given("openrlhf", "actor.lr_scheduler=constant")
    assert given("openrlhf")["optim.warmup_ratio"] == 0.03
    assert "trainer.max_steps" not in given("nemo-rl")


@pytest.mark.parametrize(
    ("system", "settings", "key"),
    [
        ("openrlhf", "algo.kl.init_coef=0.01", "algo.kl.use_loss"),
        ("openrlhf", "algo.advantage.estimator=gae", "algo.advantage.estimator"),
        ("openrlhf", "reward.remote_url=reward.py", "reward.remote_url"),
        ("openrlhf", "train.async_enable=true", "train.async_enable"),
        ("roll", "add_token_level_kl=true", "add_token_level_kl"),
        ("roll", "loss_agg_mode=seq-mean-token-sum-norm", "loss_agg_mode"),
        ("roll", "reward_clip=10", "reward_clip"),
        ("roll", "rewards.code.worker_cls=roll.CodeSandboxRewardWorker", "rewards.code.worker_cls"),
        ("roll", "adv_estimator=reinforce norm_mean_type=batch", "norm_mean_type"),
        ("openrlhf", "actor.policy_loss_type=gspo algo.advantage.is_correction_enable=true", IS_OPENRLHF),
        ("roll", "actor_train.worker_cls=x.ActorPGWorker", "actor_train.worker_cls"),
        (
            "roll",
            "actor_infer.generating_args.repetition_penalty=1.1",
            "actor_infer.generating_args.repetition_penalty",
        ),
        (
            "nemo-rl",
            "loss_fn.reference_policy_kl_type=k2 policy.train_global_batch_size=256",
            "loss_fn.reference_policy_kl_type",
        ),
        (
            "nemo-rl",
            "loss_fn.force_on_policy_ratio=true policy.train_global_batch_size=256",
            "loss_fn.force_on_policy_ratio",
        ),
        ("nemo-rl", "loss_fn.use_kl_in_reward=true", "loss_fn.use_kl_in_reward"),
        (
            "nemo-rl",
            "policy.megatron_cfg.enabled=true policy.megatron_cfg.scheduler.lr_decay_style=cosine",
            "policy.megatron_cfg.scheduler.lr_decay_style",
        ),
        ("nemo-rl", "data.train=[{data_path:t.jsonl}]", "data.train"),
        ("nemo-rl", "data.default.prompt_file=cot.txt", "data.default.prompt_file"),
        ("nemo-rl", "grpo.use_leave_one_out_baseline=true", "grpo.use_leave_one_out_baseline"),
        ("nemo-rl", "loss_fn.use_importance_sampling_correction=true", "loss_fn.use_importance_sampling_correction"),
        ("nemo-rl", "env.workplace.x=1", "env.workplace.x"),
        ("nemo-rl", "grpo.async_grpo.enabled=true", "grpo.async_grpo.enabled"),
    ],
)
def test_refused(system: str, settings: str, key: str):
    result = imported(system, *settings.split(), base=_without(system, settings.split()))
    assert [each.key for each in result.refused()] == [key]
    assert "nearest: " in result.refused()[0].note


def test_a_pipeline_of_roll_has_fewer_ranks_that_share_an_update():
    ranks = "actor_train.strategy_args.strategy_config.pipeline_model_parallel_size=2"
    result = imported("roll", ranks)
    assert [each.key for each in result.refused()] == [ranks.partition("=")[0]]
    assert result.settings["trainer.prompts_per_update"] == 64


def test_a_section_of_nemo_rl_counts_more_than_that_of_the_defaults():
    settings = ("grpo.use_leave_one_out_baseline=true", "grpo.adv_estimator.use_leave_one_out_baseline=false")
    result = imported("nemo-rl", *settings, "data.train.input_key=q", "data.default.input_key=p")
    assert not result.refused()
    assert result.settings["data.prompt_key"] == "q"
    for key in ("grpo.use_leave_one_out_baseline", "data.default.input_key"):
        assert "without effect beside" in entry(result, key).note


def test_defaults_of_a_yaml_file_are_read_where_they_lie(tmp_path: Path):
    (tmp_path / "base.yaml").write_text("grpo: {seed: 3, num_prompts_per_step: 64}\npolicy: {model_name: a/b}\n")
    file = tmp_path / "run.yaml"
    file.write_text("defaults: [base, missing]\ngrpo: {seed: 4}\npolicy: {tokenizer: {name: '${policy.model_name}'}}\n")
    settings, notices = read_yaml_settings(NEMO_RL, str(file), ["grpo.max_num_steps=9"], {})
    assert settings.given["grpo.seed"] == 4
    assert settings.given["grpo.num_prompts_per_step"] == 64
    assert settings.given["policy.tokenizer.name"] == "a/b"
    assert settings.given["grpo.max_num_steps"] == 9
    assert [notice for notice in notices if "missing" in notice] == notices != []


@pytest.mark.parametrize(
    ("value", "devices"),
    [("list(range(0,8))", 8), ("list(range(4))", 4), ("[0, 3]", 2), ([1, 2, 3], 3), (None, 1)],
)
def test_devices_of_roll(value: Any, devices: int):
    assert len(device_list("actor_train.device_mapping", value)) == devices
