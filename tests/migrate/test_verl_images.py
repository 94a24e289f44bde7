"""verl's runs with images: published commands are accepted, and the tower is trained where verl trains it."""

import json
from pathlib import Path

import pytest

from hwgrpo.cli.main import main
from hwgrpo.migrate.imports.verl_import import import_verl
from hwgrpo.migrate.imports.verl_reader import read_verl
from tests.migrate.verl_runs import BASE, config_of, imported

ACTOR, MODEL, ROLLOUT = (f"actor_rollout_ref.{each}." for each in ("actor", "model", "rollout"))
FSDP, REF = f"{ACTOR}fsdp_config.", "actor_rollout_ref.ref."
VL = f"{MODEL}path=Qwen/Qwen2.5-VL-7B-Instruct"
OF_BOTH = (
    *("algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=False"),
    *("data.train_files=/home/me/data/geo3k/train.parquet", "data.val_files=/home/me/data/geo3k/test.parquet"),
    *("data.train_batch_size=512", "data.max_prompt_length=1024", "data.max_response_length=2048"),
    *("data.filter_overlong_prompts=True", "data.truncation='error'", "data.image_key=images"),
    *(VL, f"{MODEL}use_remove_padding=True", f"{MODEL}enable_gradient_checkpointing=True"),
    *(f"{ACTOR}optim.lr=1e-6", f"{ACTOR}ppo_mini_batch_size=128", f"{ACTOR}use_kl_loss=True"),
    *(f"{ACTOR}kl_loss_coef=0.01", f"{ACTOR}kl_loss_type=low_var_kl", f"{ACTOR}entropy_coeff=0"),
    *(f"{FSDP}param_offload=False", f"{FSDP}optimizer_offload=False", f"{MODEL}use_fused_kernels=True"),
    *(f"{ROLLOUT}name=vllm", f"{ROLLOUT}tensor_model_parallel_size=2", f"{ROLLOUT}gpu_memory_utilization=0.6"),
    *(f"{ROLLOUT}n=5", f"{ROLLOUT}enable_chunked_prefill=False", f"{ROLLOUT}enforce_eager=False"),
    *(f"{ROLLOUT}free_cache_engine=True", f"{REF}fsdp_config.param_offload=True"),
    *("trainer.n_gpus_per_node=8", "trainer.nnodes=1", "trainer.save_freq=20", "trainer.test_freq=5"),
    *("trainer.total_epochs=15", 'trainer.logger=["console","wandb"]', "trainer.project_name=geo3k"),
)
JANUARY = (
    *(f"{ACTOR}ppo_micro_batch_size_per_gpu=10", f"{ROLLOUT}log_prob_micro_batch_size_per_gpu=20"),
    *(f"+{ROLLOUT}engine_kwargs.vllm.disable_mm_preprocessor_cache=True", "trainer.critic_warmup=0"),
    *(f"{REF}log_prob_micro_batch_size_per_gpu=20", "trainer.experiment_name=january"),
)
AUGUST = (
    *(f"{ACTOR}use_dynamic_bsz=True", f"{ACTOR}ppo_max_token_len_per_gpu=24576", f"{ACTOR}strategy=fsdp2"),
    *(f"{ROLLOUT}log_prob_use_dynamic_bsz=True", f"{ROLLOUT}log_prob_max_token_len_per_gpu=24576"),
    *(f"{REF}log_prob_use_dynamic_bsz=True", f"{REF}log_prob_max_token_len_per_gpu=24576"),
    *("trainer.balance_batch=True", f"{ROLLOUT}multi_stage_wake_up=True", "trainer.experiment_name=august"),
    "ray_kwargs.ray_init.runtime_env.py_executable=null",
)
NPU = (*(f"+{ROLLOUT}engine_kwargs.vllm.mm_processor_cache_gb=0", f"{ROLLOUT}log_prob_micro_batch_size_per_gpu=4"),)
COMMANDS = {"January": (*OF_BOTH, *JANUARY), "August": (*OF_BOTH, *AUGUST), "NPU": (*OF_BOTH, *AUGUST, *NPU)}
"""Arguments of verl's scripts for Qwen2.5-VL-7B on Geometry3K, of January and August 2026."""
LORA = (VL, f"{MODEL}lora_rank=64", f"{MODEL}lora_alpha=32", f"{MODEL}target_modules=all-linear")


def of(*overrides: str):
    """Import overrides, of which one may name the model."""
    given = {each.partition("=")[0] for each in overrides}
    return imported(*overrides, base=tuple(each for each in BASE if each.partition("=")[0] not in given))


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_a_published_command_is_accepted_and_trains_what_verl_trains(arguments: tuple[str, ...], tmp_path: Path):
    result = imported(*arguments, base=())
    assert result.refused() == []
    config = config_of(result, tmp_path, "observe.loggers=[jsonl]")
    assert (config.model.path, config.model.train_vision) == ("Qwen/Qwen2.5-VL-7B-Instruct", "all")
    assert (config.data.train, config.data.images.key) == ("/home/me/data/geo3k/train.parquet", None)
    assert (config.data.max_prompt_tokens, config.rollout.max_response_tokens, config.rollout.n) == (1024, 2048, 5)
    assert (config.trainer.prompts_per_step, config.trainer.prompts_per_update) == (512, 128)
    assert (config.algorithm.kl.coef, config.algorithm.kl.estimator, config.optim.lr) == (0.01, "k3", 1e-6)
    assert [each.name for each in config.reward.functions] == ["by_source"]  # of hiyouga/geometry3k: geo3k
    kwargs = {"enable_chunked_prefill": False}
    caches = {} if arguments == COMMANDS["August"] else {"mm_processor_cache_gb": 0}
    assert dict(config.rollout.engine_kwargs) == kwargs | caches


def test_a_published_command_is_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    arguments = [each for each in COMMANDS["August"] if "logger" not in each]
    assert main(["train", "--from", "verl", *arguments, "--dry-run", "--set", f"trainer.output_dir={tmp_path}"]) == 1
    shown = capsys.readouterr()
    assert "8,292,166,656 parameters, 8,292,166,656 trainable" in shown.out
    assert "geo3k/train.parquet" in shown.err.split("not ready here", 1)[1]
    assert "Refused" not in shown.err


@pytest.mark.parametrize(
    ("overrides", "train", "adapted"),
    [
        ((VL,), "all", "none"),
        ((VL, f"{ACTOR}freeze_vision_tower=True"), "none", "none"),
        ((VL, f"{ACTOR}freeze_vision_tower=False"), "all", "none"),
        ((), "none", "none"),
        ((f"{ACTOR}freeze_vision_tower=False", "data.image_key=images"), "none", "none"),
        ((f"{MODEL}path=Qwen/Qwen3.5-2B",), "none", "none"),
        ((f"{MODEL}path=Qwen/Qwen3.5-2B", "data.image_key=images"), "all", "none"),
        ((f"{MODEL}path=zai-org/GLM-4.1V-9B-Thinking",), "all", "none"),
        ((f"{MODEL}path=mistralai/Mistral-Nemo-Instruct-2407",), "none", "none"),
        (LORA, "none", "all"),
        ((*LORA, f"{ACTOR}freeze_vision_tower=True"), "none", "all"),
        ((*LORA, f"{MODEL}exclude_modules='.*visual.*'"), "none", "none"),
        ((*LORA, f"{MODEL}exclude_modules='.*visual.blocks.*'"), "none", "projector"),
        ((*LORA, f"{MODEL}exclude_modules=[attn.qkv,mlp.0,0]"), "none", "none"),
        ((VL, f"{MODEL}exclude_modules='.*visual.*'"), "all", "none"),
        ((f"{MODEL}lora_rank=8", f"{MODEL}exclude_modules='.*visual.*'"), "none", "none"),
    ],
)
def test_what_is_trained_of_the_tower(overrides: tuple[str, ...], train: str, adapted: str, tmp_path: Path):
    result = of(*overrides)
    assert result.refused() == []
    model = config_of(result, tmp_path).model
    assert (model.train_vision, model.lora.vision) == (train, adapted)


@pytest.mark.parametrize("excluded", [".*q_proj", "[q_proj]", "'('", ".*mlp.*"])
@pytest.mark.parametrize("base", [LORA, (f"{MODEL}lora_rank=8",)], ids=["images", "text"])
def test_layers_of_text_that_are_left_out_are_refused(excluded: str, base: tuple[str, ...]):
    [refused] = of(*base, f"{MODEL}exclude_modules={excluded}").refused()
    assert refused.key == f"{MODEL}exclude_modules"
    assert "model.lora.target_modules" in refused.note


def test_a_local_folder_is_known_by_its_configuration(tmp_path: Path):
    for name, settings, train in (("plain-vl", {}, "none"), ("plain", {"vision_config": {}}, "all")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(settings))
        assert config_of(of(f"{MODEL}path={folder}"), tmp_path).model.train_vision == train


def test_another_column_and_a_limit_of_images_are_those_of_the_run(tmp_path: Path):
    images = config_of(of(VL, "data.image_key=figures", f"{ROLLOUT}limit_images=3"), tmp_path).data.images
    assert (images.key, images.max_per_prompt) == ("figures", 3)


@pytest.mark.parametrize("override", ["data.video_key=videos", "data.audio_key=audios"])
def test_videos_and_sound_are_refused_by_name(override: str):
    [refused] = of(VL, override).refused()
    assert refused.key == override.partition("=")[0]
    assert "docs/vision.md" in refused.note


@pytest.mark.parametrize("path", ["openbmb/MiniCPM-o-2_6", "Qwen/Qwen2.5-Omni-7B"])
def test_models_that_read_sound_are_refused_by_name(path: str):
    [refused] = of(f"{MODEL}path={path}").refused()
    assert (refused.key, refused.value) == (f"{MODEL}path", path)


def test_the_column_of_a_resolved_file_is_no_other_run(tmp_path: Path):
    file = tmp_path / "config.yaml"
    file.write_text(
        "data: {train_files: a.parquet, image_key: images, video_key: videos, audio_key: audios}\n"
        "actor_rollout_ref:\n  model: {path: Qwen/Qwen2-7B}\n  rollout: {n: 4, name: vllm}\n"
        "algorithm: {adv_estimator: grpo}\n"
    )
    result = import_verl(read_verl(str(file), [], {})[0])
    assert result.refused() == []
    assert "train_vision" not in str(result.settings)
