"""Each further key of verl that has a counterpart changes the run as it does there, not by its name alone."""

from pathlib import Path
from typing import Any

import pytest

from hwgrpo.config.schema import EnvironmentConfig
from hwgrpo.migrate.tables.verl_names import ROWS, current_name
from tests.migrate.test_verl_meaning import ACTOR, CHANGES, CORRECTION, MODEL, ROLLOUT, value
from tests.migrate.verl_runs import BASE, config_of, imported

ADAPTER = str(Path(__file__).parent)
LORA = f"{MODEL}lora_rank=8"
KL_IN_REWARD = "algorithm.use_kl_in_reward=True"
SAMPLED = f"{ROLLOUT}val_kwargs.temperature=1.0"

TURNS = f"{ROLLOUT}multi_turn."
TOOLS = (f"{ROLLOUT}agent.default_agent_loop=tool_agent", f"{TURNS}tool_config_path=t.yaml")


def verl_tools(**changed: Any) -> EnvironmentConfig:
    """Return the environment of verl's tool files, with verl's defaults."""
    kwargs = {
        "tool_config": "t.yaml",
        "function_tools": "f.py",
        "max_parallel_calls": 1,
        "max_tool_response_length": 256,
        "tool_response_truncate_side": "middle",
    }
    return EnvironmentConfig("verl_tools", {name: each for name, each in (kwargs | changed).items() if each})


FURTHER: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (("data.train_files=[a.parquet,b.parquet]",), {"data.train": ["a.parquet", "b.parquet"]}),
    (("data.train_files=[a.parquet]",), {"data.train": "a.parquet"}),
    (("data.val_files=v.parquet",), {"data.validation": "v.parquet"}),
    # with dynamic sampling verl draws these prompts at a time; a step trains train_batch_size of them
    (
        ("algorithm.filter_groups.enable=True", "data.gen_batch_size=3072"),
        {"trainer.prompts_per_step": 1024, "algorithm.filter_groups.enable": True},
    ),
    (("data.max_prompt_length=2048",), {"data.max_prompt_tokens": 2048, "rollout.max_response_tokens": 512}),
    (("data.prompt_key=question",), {"data.prompt_key": "question"}),
    (("data.reward_fn_key=source",), {"data.source_key": "source"}),
    (("data.image_key=figures",), {"data.images.key": "figures"}),
    ((f"{ROLLOUT}limit_images=3",), {"data.images.max_per_prompt": 3}),
    ((f"{MODEL}path=a/b-VL", f"{ACTOR}freeze_vision_tower=True"), {"model.train_vision": "none"}),
    ((f"{MODEL}path=a/b-VL",), {"model.train_vision": "all"}),
    ((LORA, f"{MODEL}path=a/b-VL", f"{MODEL}exclude_modules=.*visual.*"), {"model.lora.vision": "none"}),
    ((LORA, f"{MODEL}path=a/b-VL"), {"model.lora.vision": "all"}),
    (("data.train_max_samples=100",), {"data.max_rows": 100, "data.validation_max_rows": 0}),
    (("data.val_max_samples=50",), {"data.max_rows": 0, "data.validation_max_rows": 50}),
    (("data.apply_chat_template_kwargs={thinking: true}",), {"data.chat_template_kwargs": {"thinking": True}}),
    (("data.shuffle=False",), {"data.shuffle": False}),
    (("data.seed=7",), {"trainer.seed": 7}),
    ((f"{MODEL}path=Qwen/Qwen3-4B",), {"model.path": "Qwen/Qwen3-4B", "model.tokenizer": None}),
    ((f"{MODEL}tokenizer_path=Qwen/Qwen3-4B",), {"model.tokenizer": "Qwen/Qwen3-4B"}),
    ((f"{MODEL}trust_remote_code=True",), {"model.trust_remote_code": True}),
    ((f"{MODEL}enable_gradient_checkpointing=False",), {"model.gradient_checkpointing": False}),
    ((f"{MODEL}lora_adapter_path={ADAPTER}",), {"model.lora.adapter": ADAPTER}),
    # Megatron's adapters have an alpha of their own, 32
    ((f"{MODEL}lora.rank=8",), {"model.lora.rank": 8, "model.lora.alpha": 32.0}),
    ((f"{MODEL}lora.rank=8", f"{MODEL}lora.alpha=64"), {"model.lora.alpha": 64.0}),
    ((LORA, f"{MODEL}lora.dropout=0.1"), {"model.lora.dropout": 0.1}),
    ((LORA, f"{MODEL}lora.target_modules=[q_proj]"), {"model.lora.target_modules": ["q_proj"]}),
    ((LORA, f"{ACTOR}lora.enable=False"), {"model.lora.rank": 0}),
    ((f"{MODEL}override_config.attn_implementation=eager",), {"model.attention": "eager"}),
    # over the 8 devices of the default
    ((f"{ACTOR}ppo_micro_batch_size=32",), {"trainer.tokens_per_micro_batch": 4 * 1024}),
    # two ranks have half of a sequence each
    (
        (f"{ACTOR}ppo_micro_batch_size=32", f"{ACTOR}ulysses_sequence_parallel_size=2"),
        {"trainer.tokens_per_micro_batch": 8 * 512},
    ),
    (
        (f"{ACTOR}policy_loss.loss_mode=sapo", f"{ACTOR}tau_pos=0.9", f"{ACTOR}tau_neg=1.2"),
        {"algorithm.loss.name": "sapo", "algorithm.loss.tau_pos": 0.9, "algorithm.loss.tau_neg": 1.2},
    ),
    (
        (
            f"{ACTOR}policy_loss.loss_mode=clip_cov",
            f"{ACTOR}policy_loss.clip_cov_ratio=0.01",
            f"{ACTOR}policy_loss.clip_cov_lb=2",
        ),
        {"algorithm.loss.kwargs": {"share": 0.01, "low": 2.0, "high": 5.0}},
    ),
    (
        (
            f"{ACTOR}policy_loss.loss_mode=kl_cov",
            f"{ACTOR}policy_loss.kl_cov_ratio=0.01",
            f"{ACTOR}policy_loss.ppo_kl_coef=1",
        ),
        {"algorithm.loss.name": "kl_cov", "algorithm.loss.kwargs": {"share": 0.01, "coef": 1.0}},
    ),
    (
        (f"{ACTOR}policy_loss.loss_mode=dro", f"{ACTOR}policy_loss.dro_beta=0.3"),
        {"algorithm.loss.name": "dro", "algorithm.loss.kwargs": {"beta": 0.3}},
    ),
    ((f"{ACTOR}grad_clip=0.2",), {"optim.grad_clip": 0.2}),
    ((f"{ACTOR}optim.optimizer=AdamW8bit",), {"optim.name": "adamw_8bit"}),
    ((f"{ACTOR}optim.lr=5e-7",), {"optim.lr": 5e-7}),
    ((f"{ACTOR}optim.betas=[0.9,0.99]",), {"optim.betas": [0.9, 0.99]}),
    ((f"{ACTOR}optim.weight_decay=0.1",), {"optim.weight_decay": 0.1}),
    (
        (f"{ACTOR}optim.lr_scheduler_type=cosine", f"{ACTOR}optim.min_lr_ratio=0.1"),
        {"optim.schedule": "cosine", "optim.min_lr_ratio": 0.1},
    ),
    ((f"{ACTOR}optim.override_optimizer_config.optimizer_cpu_offload=True",), {"trainer.offload": "optimizer"}),
    # weights that verl moves between the stages stay where they are, and the numbers too
    *(((f"{ACTOR}{each}.param_offload=True",), {"trainer.fsdp2.offload": False, "trainer.offload": "none"})
      for each in ("fsdp_config", "megatron", "engine", "veomni")),
    *(((f"{ACTOR}{each}.optimizer_offload=True",), {"trainer.offload": "optimizer"})
      for each in ("megatron", "engine", "veomni")),
    (
        (f"{ACTOR}strategy=fsdp2", f"{ACTOR}fsdp_config.reshard_after_forward=False"),
        {"trainer.fsdp2.reshard_after_forward": False},
    ),
    *(((f"{ACTOR}{each}=4",), {"trainer.sequence_parallel_size": 4, "trainer.tensor_parallel_size": 1})
      for each in ("fsdp_config.ulysses_sequence_parallel_size", "megatron.context_parallel_size", "engine.cp",
                   "veomni.ulysses_parallel_size")),
    ((f"{ACTOR}engine.tp=4",), {"trainer.sequence_parallel_size": 1, "trainer.tensor_parallel_size": 4}),
    ((f"{ACTOR}fsdp_config.full_determinism=True",), {"trainer.deterministic": True}),
    ((f"{ACTOR}fsdp_config.dtype=float32",), {"model.dtype": "float32", "rollout.dtype": "auto"}),
    ((f"{ROLLOUT}temperature=0.7",), {"rollout.temperature": 0.7}),
    ((f"{ROLLOUT}top_p=0.9",), {"rollout.top_p": 0.9}),
    ((f"{ROLLOUT}response_length=64", "data.max_response_length=512"), {"rollout.max_response_tokens": 64}),
    ((f"{ROLLOUT}prompt_length=2048",), {"data.max_prompt_tokens": 512}),
    ((f"{ROLLOUT}dtype=bfloat16",), {"rollout.dtype": "bfloat16", "model.dtype": "auto"}),
    ((f"{ROLLOUT}gpu_memory_utilization=0.4",), {"rollout.gpu_memory_utilization": 0.4}),
    ((f"{ROLLOUT}tensor_model_parallel_size=4",), {"rollout.tensor_parallel_size": 4,
                                                   "trainer.tensor_parallel_size": 1}),
    ((f"{ROLLOUT}max_model_len=8192",), {"rollout.max_model_len": 8192}),
    ((f"{ROLLOUT}max_num_seqs=256",), {"rollout.max_sequences": 256}),
    ((f"{ROLLOUT}enforce_eager=False",), {"rollout.enforce_eager": False}),
    (
        (f"{ROLLOUT}name=vllm", f"{ROLLOUT}max_num_batched_tokens=8192", f"{ROLLOUT}enable_prefix_caching=True"),
        {"rollout.engine_kwargs": {"max_num_batched_tokens": 8192, "enable_prefix_caching": True}},
    ),
    (
        (f"{ROLLOUT}name=vllm", f"{ROLLOUT}engine_kwargs.vllm={{swap_space: 4}}"),
        {"rollout.engine_kwargs": {"swap_space": 4}},
    ),
    (
        (f"{ROLLOUT}name=sglang", f"{ROLLOUT}engine_kwargs.sglang={{attention_backend: fa3}}"),
        {"rollout.engine": "sglang_server", "rollout.engine_kwargs": {"attention_backend": "fa3"}},
    ),
    ((f"{ROLLOUT}name=sglang", f"{ROLLOUT}engine_kwargs.vllm.swap_space=4"), {"rollout.engine_kwargs": {}}),
    (
        (f"{TURNS}enable=True", f"{TURNS}tool_config_path=t.yaml", f"{TURNS}function_tool_path=f.py"),
        {"rollout.workflow": "environment", "rollout.agent.environments": [verl_tools()]},
    ),
    (
        (*TOOLS, f"{TURNS}max_parallel_calls=4", f"{TURNS}max_tool_response_length=512"),
        {
            "rollout.agent.environments": [
                verl_tools(function_tools=None, max_parallel_calls=4, max_tool_response_length=512)
            ]
        },
    ),
    (
        (*TOOLS, f"{TURNS}tool_response_truncate_side=left"),
        {"rollout.agent.environments": [verl_tools(function_tools=None, tool_response_truncate_side="left")]},
    ),
    ((*TOOLS, f"{TURNS}max_assistant_turns=5"), {"rollout.agent.max_turns": 5}),
    ((*TOOLS, f"{TURNS}max_assistant_turns=5", f"{TURNS}max_user_turns=3"), {"rollout.agent.max_turns": 4}),
    ((*TOOLS, f"{TURNS}format=glm"), {"rollout.agent.call_format": "glm"}),
    ((SAMPLED, f"{ROLLOUT}val_kwargs.top_k=20"), {"trainer.validation_sampling.top_k": 20}),
    ((KL_IN_REWARD, "algorithm.kl_penalty=mse"), {"algorithm.kl.estimator": "k2"}),
    (
        (KL_IN_REWARD, "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.target_kl=0.02"),
        {"algorithm.kl.target": 0.02, "algorithm.kl.horizon": 10000},
    ),
    # a target without the adaptive controller does nothing
    ((KL_IN_REWARD, "algorithm.kl_ctrl.target_kl=0.02"), {"algorithm.kl.target": None}),
    (
        (f"{CORRECTION}rollout_is=token", f"{CORRECTION}rollout_is_batch_normalize=True"),
        {"algorithm.correction.normalize": True},
    ),
    (
        ("algorithm.filter_groups.enable=True", "algorithm.filter_groups.max_num_gen_batches=10"),
        {"algorithm.filter_groups.max_rounds": 10},
    ),
    (("trainer.total_epochs=3",), {"trainer.epochs": 3, "trainer.max_steps": 0}),
    (("trainer.val_before_train=False",), {"trainer.validate_at_start": False}),
    (("trainer.max_actor_ckpt_to_keep=5",), {"trainer.keep_checkpoints": 5}),
    # DAPO's own script: 10 rounds of 1536 prompts for steps of 512
    (
        (
            "algorithm.filter_groups.enable=True",
            "algorithm.filter_groups.max_num_gen_batches=10",
            "data.gen_batch_size=1536",
            "data.train_batch_size=512",
        ),
        {"algorithm.filter_groups.max_rounds": 30},
    ),
    (
        (
            "algorithm.filter_groups.enable=True",
            "algorithm.filter_groups.max_num_gen_batches=3",
            "data.gen_batch_size=768",
            "data.train_batch_size=512",
        ),
        {"algorithm.filter_groups.max_rounds": 5},
    ),
    # without bypass_mode the loss is that of loss_mode
    (
        (f"{ACTOR}policy_loss.loss_mode=gspo", f"{CORRECTION}loss_type=reinforce"),
        {"algorithm.loss.name": "gspo", "algorithm.old_logprobs": "trainer"},
    ),
    # verl computes no weights beside it, and v1 keeps the loss
    (
        (f"{CORRECTION}bypass_mode=True", f"{CORRECTION}rollout_is=token", f"{ACTOR}policy_loss.loss_mode=gspo"),
        {"algorithm.loss.name": "gspo", "algorithm.old_logprobs": "rollout", "algorithm.correction.name": "none"},
    ),
    (
        (f"{CORRECTION}bypass_mode=True", "trainer.use_v1=False"),
        {"algorithm.loss.name": "ppo_clip", "algorithm.old_logprobs": "rollout"},
    ),
    (("trainer.default_local_dir=here",), {"trainer.output_dir": "here"}),
    (("trainer.resume_mode=resume_path", "trainer.resume_from_path=there"), {"trainer.resume": "there"}),
    (("trainer.resume_from_path=there",), {"trainer.resume": "auto"}),
]  # fmt: skip
ELSEWHERE = ("reward.", "trainer.n_gpus_per_node", "trainer.nnodes")
"""Keys whose meaning other tests have: reward functions, and the command that starts a run."""


@pytest.mark.parametrize(
    ("overrides", "expected"),
    FURTHER,
    ids=lambda each: each[-1].removeprefix("actor_rollout_ref.") if isinstance(each, tuple) else "",
)
def test_a_changed_value_changes_what_verls_changes(
    overrides: tuple[str, ...], expected: dict[str, Any], tmp_path: Path
):
    named = {each.partition("=")[0] for each in overrides}
    result = imported(*overrides, base=tuple(each for each in BASE if each.partition("=")[0] not in named))
    assert result.refused() == []
    config = config_of(result, tmp_path)
    assert {key: value(config, key) for key in expected} == expected


def test_every_key_with_a_counterpart_is_changed_by_a_test():
    changed = {current_name(each.partition("=")[0])[0] for overrides, _ in (*CHANGES, *FURTHER) for each in overrides}
    mapped = {row.key for row in ROWS.values() if row.kind in ("same", "joint") and not row.key.endswith(".*")}
    assert len(mapped) > 140
    assert {key for key in mapped - changed if not key.startswith(ELSEWHERE)} == set()


def test_the_number_of_devices_is_in_the_command_that_starts_it():
    for nodes, command in ((1, "hwgrpo launch RECIPE --devices 4"), (2, "hwgrpo launch RECIPE --devices 4 --nodes 2")):
        launch = imported("trainer.n_gpus_per_node=4", f"trainer.nnodes={nodes}").launch
        assert launch is not None
        assert (launch.devices, launch.nodes, launch.processes, launch.command()) == (4, nodes, 4 * nodes, command)
