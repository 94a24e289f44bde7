"""A setting of verl changes the run here as it changes verl's."""

import functools
from pathlib import Path
from typing import Any

import pytest

from hwgrpo.config import Config
from hwgrpo.errors import ConfigError
from tests.migrate.verl_runs import config_of, imported

ACTOR, MODEL, ROLLOUT = (f"actor_rollout_ref.{each}." for each in ("actor", "model", "rollout"))
CORRECTION = "algorithm.rollout_correction."


def value(config: Config, key: str) -> Any:
    return functools.reduce(lambda section, name: getattr(section, name), key.split("."), config)


def test_the_defaults_of_verl_are_applied(tmp_path: Path):
    result = imported()
    config = config_of(result, tmp_path)
    expected = {
        "trainer.prompts_per_step": 1024,
        "trainer.prompts_per_update": 256,
        "trainer.epochs_per_batch": 1,
        "trainer.epochs": 30,
        "trainer.save_every": 0,
        "trainer.validate_every": 0,
        "trainer.validate_at_start": True,
        "trainer.validation_n": 0,
        "trainer.resume": "auto",
        "trainer.output_dir": "checkpoints/verl_examples/gsm8k",
        "data.max_prompt_tokens": 512,
        "data.overlong": "error",
        "data.validation_max_rows": 0,
        "rollout.max_response_tokens": 512,
        "rollout.temperature": 1.0,
        "model.gradient_checkpointing": True,
        "optim.lr": 1e-6,
        "optim.weight_decay": 0.01,
        "optim.betas": [0.9, 0.999],
        "optim.grad_clip": 1.0,
        "optim.schedule": "constant",
        "optim.warmup_steps": 0,
        "algorithm.kl.coef": 0.0,
        "algorithm.loss.name": "ppo_clip",
        "algorithm.loss.clip_low": 0.2,
        "algorithm.loss.clip_high": 0.2,
        "algorithm.loss.dual_clip": 3.0,
        "algorithm.loss.log_ratio_clamp": 20.0,
        "algorithm.aggregation.name": "token-mean",
        "algorithm.advantage.eps": 1e-6,
        "algorithm.advantage.std": "group",
        "algorithm.advantage.std_correction": 1,
        "algorithm.advantage.singleton": "raw",
        "algorithm.correction.name": "none",
    }
    assert {key: value(config, key) for key in expected} == expected
    applied = " ".join(each.key for each in result.entries if each.group == "default")
    for name in ("weight_decay", "total_epochs", "train_batch_size", "truncation", "val_kwargs.n", "val_max_samples"):
        assert name in applied


CHANGES: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (("data.train_batch_size=512",), {"trainer.prompts_per_step": 512, "trainer.prompts_per_update": 256}),
    ((f"{ACTOR}ppo_mini_batch_size=1024",), {"trainer.prompts_per_update": None}),
    ((f"{ACTOR}ppo_epochs=2",), {"trainer.epochs_per_batch": 2}),
    ((f"{ROLLOUT}n=8",), {"rollout.n": 8}),
    ((f"{ROLLOUT}n=1",), {"rollout.n": 1, "algorithm.advantage.singleton": "raw"}),
    (("algorithm.norm_adv_by_std_in_grpo=False",), {"algorithm.advantage.std": "none"}),
    (("algorithm.adv_estimator=rloo",), {"algorithm.advantage.name": "rloo"}),
    (
        ("algorithm.adv_estimator=grpo_passk",),
        {"algorithm.advantage.name": "grpo_passk", "algorithm.advantage.singleton": "error"},
    ),
    # clip_ratio counts only where the two others are null
    ((f"{ACTOR}clip_ratio=0.1",), {"algorithm.loss.clip_low": 0.2, "algorithm.loss.clip_high": 0.2}),
    (
        (f"{ACTOR}clip_ratio=0.1", f"{ACTOR}clip_ratio_low=null"),
        {"algorithm.loss.clip_low": 0.1, "algorithm.loss.clip_high": 0.2},
    ),
    ((f"{ACTOR}clip_ratio_high=0.28",), {"algorithm.loss.clip_low": 0.2, "algorithm.loss.clip_high": 0.28}),
    # a ratio is positive, so that a bound of 1 - 10 is none
    (
        (f"{ACTOR}policy_loss.loss_mode=cispo", f"{ACTOR}clip_ratio_low=10", f"{ACTOR}clip_ratio_high=0.2"),
        {"algorithm.loss.name": "cispo", "algorithm.loss.clip_low": 1.0, "algorithm.loss.clip_high": 0.2},
    ),
    (
        (f"{ACTOR}clip_ratio=3", f"{ACTOR}clip_ratio_low=null"),
        {"algorithm.loss.clip_low": 1.0, "algorithm.loss.clip_high": 0.2},
    ),
    ((f"{ACTOR}clip_ratio_c=10.0",), {"algorithm.loss.dual_clip": 10.0}),
    # verl aggregates sapo as means of sequences, whatever loss_agg_mode says
    (
        (f"{ACTOR}policy_loss.loss_mode=sapo", f"{ACTOR}loss_agg_mode=token-mean"),
        {"algorithm.loss.name": "sapo", "algorithm.aggregation.name": "seq-mean-token-mean"},
    ),
    (
        (f"{ACTOR}policy_loss.loss_mode=gspo",),
        {"algorithm.loss.name": "gspo", "algorithm.aggregation.name": "token-mean"},
    ),
    # dual clip's bound is the cap of the ratio in these
    (
        (f"{ACTOR}policy_loss.loss_mode=dppo_tv",),
        {"algorithm.loss.name": "dppo_tv", "algorithm.loss.kwargs": {"cap": 3.0}},
    ),
    # with grpo_vectorized verl's trainer does not pass the key on
    (
        ("algorithm.adv_estimator=grpo_vectorized", "algorithm.norm_adv_by_std_in_grpo=False"),
        {"algorithm.advantage.name": "grpo", "algorithm.advantage.std": "group"},
    ),
    (
        (f"{ACTOR}policy_loss.loss_mode=clip_cov", f"{ACTOR}policy_loss.clip_cov_ub=4"),
        {"algorithm.loss.name": "clip_cov", "algorithm.loss.kwargs": {"share": 2e-4, "low": 1.0, "high": 4.0}},
    ),
    ((f"{ACTOR}loss_agg_mode=seq-mean-token-sum",), {"algorithm.aggregation.name": "seq-mean-token-sum"}),
    (
        (f"{ACTOR}loss_agg_mode=seq-mean-token-sum-norm", f"{ACTOR}loss_scale_factor=512"),
        {"algorithm.aggregation.name": "seq-mean-token-sum-norm", "algorithm.aggregation.norm_length": 512},
    ),
    # a coefficient alone turns nothing on
    ((f"{ACTOR}kl_loss_coef=0.01",), {"algorithm.kl.coef": 0.0}),
    ((f"{ACTOR}use_kl_loss=True",), {"algorithm.kl.coef": 0.001, "algorithm.kl.estimator": "k3"}),
    ((f"{ACTOR}use_kl_loss=True", f"{ACTOR}kl_loss_type=mse"), {"algorithm.kl.estimator": "k2"}),
    ((f"{ACTOR}use_kl_loss=True", f"{ACTOR}kl_loss_type=kl+"), {"algorithm.kl.estimator": "k1+"}),
    (
        ("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.05"),
        {"algorithm.kl.in_reward": True, "algorithm.kl.coef": 0.05, "algorithm.kl.estimator": "k1"},
    ),
    (
        ("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.horizon=5000"),
        {"algorithm.kl.target": 0.1, "algorithm.kl.horizon": 5000},
    ),
    ((f"{ACTOR}entropy_coeff=0.001",), {"algorithm.entropy_coef": 0.001}),
    # verl steps its schedule once per batch, here it is once per update: 1024 / 256 = 4 updates
    ((f"{ACTOR}optim.lr_warmup_steps=10",), {"optim.warmup_steps": 40}),
    (
        (f"{ACTOR}optim.lr_warmup_steps_ratio=0.1", "trainer.total_training_steps=200"),
        {"optim.warmup_steps": 80, "trainer.max_steps": 200},
    ),
    # 0 steps leave it to the share in verl's engine, as -1 and null do
    *(
        (
            (
                f"{ACTOR}optim.lr_warmup_steps={none}",
                f"{ACTOR}optim.lr_warmup_steps_ratio=0.1",
                "trainer.total_training_steps=100",
            ),
            {"optim.warmup_steps": 40},
        )
        for none in ("0", "-1", "null")
    ),
    ((f"{ACTOR}optim.lr_warmup_steps=null",), {"optim.warmup_steps": 0}),
    ((f"{ACTOR}optim.lr_warmup_steps_ratio=0.1",), {"optim.warmup_steps": 0, "optim.warmup_ratio": 0.1}),
    (
        (f"{ACTOR}optim.lr_warmup_steps_ratio=0.19", "trainer.total_training_steps=10"),  # rounded down
        {"optim.warmup_steps": 4, "optim.warmup_ratio": 0.0},
    ),
    (
        (f"{ACTOR}optim.lr_warmup_steps=2", f"{ACTOR}optim.lr_warmup_steps_ratio=0.1"),
        {"optim.warmup_steps": 8, "optim.warmup_ratio": 0.0},
    ),
    (
        (f"{ACTOR}optim.lr_scheduler_type=cosine", f"{ACTOR}optim.min_lr=5e-7"),
        {"optim.schedule": "cosine", "optim.min_lr_ratio": 0.5},
    ),
    ((f"{ACTOR}optim.clip_grad=0.5",), {"optim.grad_clip": 0.5}),
    (
        (f"{ACTOR}ppo_micro_batch_size_per_gpu=4", "data.max_response_length=1024"),
        {"trainer.tokens_per_micro_batch": 4 * 1536},
    ),
    (
        (f"{ACTOR}use_dynamic_bsz=True", f"{ACTOR}ppo_max_token_len_per_gpu=8192"),
        {"trainer.tokens_per_micro_batch": 8192},
    ),
    (
        (f"{ACTOR}use_dynamic_bsz=True", f"{ACTOR}ppo_max_token_len_per_gpu=100"),
        {"trainer.tokens_per_micro_batch": 1024},
    ),
    ((f"{ACTOR}ulysses_sequence_parallel_size=2",), {"trainer.sequence_parallel_size": 2}),
    (
        ("model_engine=megatron", f"{ACTOR}megatron.tensor_model_parallel_size=2"),
        {"trainer.tensor_parallel_size": 2, "trainer.strategy": "fsdp2"},
    ),
    ((f"{ACTOR}fsdp_config.optimizer_offload=True",), {"trainer.offload": "optimizer"}),
    (
        (f"{ACTOR}strategy=fsdp2", f"{ACTOR}fsdp_config.offload_policy=True"),
        {"trainer.strategy": "fsdp2", "trainer.fsdp2.offload": True, "trainer.offload": "none"},
    ),
    (("data.filter_overlong_prompts=True", "data.truncation=left"), {"data.overlong": "filter"}),
    (("data.truncation=left",), {"data.overlong": "truncate_left"}),
    (
        ("data.apply_chat_template_kwargs.enable_thinking=False",),
        {"data.chat_template_kwargs": {"enable_thinking": False}},
    ),
    (("data.trust_remote_code=True",), {"model.trust_remote_code": True}),
    ((f"{MODEL}lora_alpha=32",), {"model.lora.rank": 0}),
    ((f"{MODEL}lora_rank=16",), {"model.lora.rank": 16, "model.lora.alpha": 16.0}),
    (
        (f"{MODEL}lora_rank=16", f"{MODEL}target_modules='.*q_proj'"),
        {"model.lora.target_modules": ["re:.*q_proj"]},
    ),
    (
        (f"{MODEL}lora.rank=8", f"{MODEL}lora.target_modules=[linear_qkv,linear_proj,linear_fc1,linear_fc2]"),
        {
            "model.lora.target_modules": [
                *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
            ]
        },
    ),
    ((f"{MODEL}lora_rank=8", f"{MODEL}target_modules=[q_proj]"), {"model.lora.target_modules": ["q_proj"]}),
    ((f"{ROLLOUT}val_kwargs.do_sample=True",), {"trainer.validation_n": 0}),
    ((f"{ROLLOUT}name=hf",), {"rollout.engine": "local"}),
    ((f"{ROLLOUT}top_k=50",), {"rollout.top_k": 50}),
    ((f"{ROLLOUT}free_cache_engine=False",), {"rollout.engine": "auto", "rollout.sleep_mode": "never"}),
    (
        (
            f"{ROLLOUT}name=vllm",
            f"{ROLLOUT}engine_kwargs.vllm.kv_cache_dtype=fp8",
            f"{ROLLOUT}enable_chunked_prefill=False",
        ),
        {"rollout.engine_kwargs": {"enable_chunked_prefill": False, "kv_cache_dtype": "fp8"}},
    ),
    (
        (f"{ROLLOUT}val_kwargs.do_sample=True", f"{ROLLOUT}val_kwargs.temperature=1.0", f"{ROLLOUT}val_kwargs.n=16"),
        {"trainer.validation_n": 16, "trainer.validation_sampling.temperature": None},
    ),
    # the temperature alone decides, there too
    (
        (f"{ROLLOUT}val_kwargs.temperature=0.6", f"{ROLLOUT}val_kwargs.top_p=0.95", f"{ROLLOUT}val_kwargs.n=4"),
        {
            "trainer.validation_n": 4,
            "trainer.validation_sampling.temperature": 0.6,
            "trainer.validation_sampling.top_p": 0.95,
            "trainer.validation_sampling.top_k": None,
        },
    ),
    (
        (f"{ROLLOUT}val_kwargs.temperature=1.0", f"{ROLLOUT}top_k=50"),
        {"rollout.top_k": 50, "trainer.validation_n": 1, "trainer.validation_sampling.top_k": 0},
    ),
    ((f"{ROLLOUT}val_kwargs.n=16",), {"trainer.validation_n": 0}),
    (("trainer.save_freq=20", "trainer.test_freq=5"), {"trainer.save_every": 20, "trainer.validate_every": 5}),
    (("trainer.resume_mode=disable",), {"trainer.resume": "never"}),
    (("trainer.logger=[console,tensorboard]",), {"observe.loggers": ["jsonl", "tensorboard"]}),
    (("trainer.project_name=p", "trainer.experiment_name=e"), {"trainer.output_dir": "checkpoints/p/e"}),
    (("trainer.device=npu",), {"backend.name": "npu"}),
    (
        (f"{CORRECTION}rollout_is=token", f"{CORRECTION}rollout_is_threshold=5"),
        {"algorithm.correction.name": "token_truncate", "algorithm.correction.high": 5.0},
    ),
    (
        (f"{CORRECTION}rollout_is=sequence", f"{CORRECTION}rollout_is_threshold='0.5_5.0'"),
        {
            "algorithm.correction.name": "sequence_mask",
            "algorithm.correction.low": 0.5,
            "algorithm.correction.high": 5.0,
        },
    ),
    (
        (f"{CORRECTION}rollout_rs='seq_mean_k1,token_k3'", f"{CORRECTION}rollout_rs_threshold='2.0,0.1'"),
        {"algorithm.correction.reject": {"seq_mean_k1": [0.5, 2.0], "token_k3": 0.1}},
    ),
    ((f"{CORRECTION}bypass_mode=True",), {"algorithm.old_logprobs": "rollout"}),
    (
        ("algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc"),
        {
            "algorithm.filter_groups.enable": True,
            "algorithm.filter_groups.metric": "by_source",
            "algorithm.filter_groups.max_rounds": 1000,
        },
    ),
]


@pytest.mark.parametrize(
    ("overrides", "expected"), CHANGES, ids=lambda each: each[0].rpartition(".")[2] if isinstance(each, tuple) else ""
)
def test_a_changed_value_has_verls_meaning(overrides: tuple[str, ...], expected: dict[str, Any], tmp_path: Path):
    result = imported(*overrides)
    assert result.refused() == []
    config = config_of(result, tmp_path)
    assert {key: value(config, key) for key in expected} == expected


@pytest.mark.parametrize("mode", ["geo_mean", "dppo_kl"])
def test_a_lower_clip_above_1_of_what_is_no_ratio_is_refused(mode: str):
    [entry] = imported(f"{ACTOR}policy_loss.loss_mode={mode}", f"{ACTOR}clip_ratio_low=1.5").refused()
    assert (entry.key, entry.note) == (
        f"{ACTOR}clip_ratio_low",
        f"the lower clip of {mode} is at most 1 here; nearest: 1, or less",
    )


def test_a_reward_function_and_the_overlong_penalty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("score.py").write_text(
        "def mine(data_source, solution_str, ground_truth, extra_info=None, factor=1): return 1.0\n"
    )
    overlong = "reward_model.reward_kwargs.overlong_buffer_cfg."
    penalty = (f"{overlong}enable=True", f"{overlong}len=256", f"{overlong}penalty_factor=0.5")
    own = ("custom_reward_function.path=score.py", "custom_reward_function.name=mine")
    arguments = "custom_reward_function.reward_kwargs.factor=2"
    result = imported(*own, arguments, *penalty, "reward_model.reward_manager=dapo")
    first, second = config_of(result, tmp_path).reward.functions
    assert (first.name, first.kwargs) == ("score.py:mine", {"factor": 2})
    assert (second.name, second.kwargs) == ("length", {"buffer": 256, "factor": 0.5, "floor": False})
    # the penalty belongs to the manager dapo
    assert len(config_of(imported(*own, *penalty), tmp_path).reward.functions) == 1
    assert [each.name for each in config_of(imported(), tmp_path).reward.functions] == ["by_source"]


def test_rewards_of_an_import_see_no_special_tokens_as_in_verl(tmp_path):
    assert config_of(imported(), tmp_path).rollout.skip_special_tokens


def test_batch_sizes_that_verl_refuses_are_refused():
    with pytest.raises(ConfigError, match=r"data.train_batch_size=128 must be a multiple of .*ppo_mini_batch_size=256"):
        imported("data.train_batch_size=128")


def test_batches_that_the_devices_cannot_share_are_noted():
    sizes = ("data.train_batch_size=12", f"{ACTOR}ppo_mini_batch_size=4", "trainer.n_gpus_per_node=3")
    [notice] = [each for each in imported(*sizes).notices if "divided" in each]
    assert f"{ACTOR}ppo_mini_batch_size=4 prompts cannot be divided among 3 devices" in notice


def test_interpolations_see_other_keys_and_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("USER", "me")
    name = "trainer.experiment_name='${algorithm.adv_estimator}-${data.train_batch_size}-${oc.env:USER}'"
    config = config_of(imported(name), tmp_path)
    assert config.trainer.output_dir == "checkpoints/verl_examples/grpo-1024-me"
