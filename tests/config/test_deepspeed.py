"""Settings of the strategy deepspeed, and the JSON file that may come with them."""

import json
from pathlib import Path

import pytest

from hwgrpo.config import load_config
from hwgrpo.config.deepspeed_json import deepspeed_config, with_precision
from hwgrpo.errors import ConfigError

BASE = ("model.path=builtin://tiny", "data.train=task://sort", "reward.functions=[exact_match]")
ON = (*BASE, "trainer.strategy=deepspeed")


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(None, overrides)
    return str(error.value)


def written(folder: Path, values: object) -> str:
    file = folder / "ds.json"
    file.write_text(values if isinstance(values, str) else json.dumps(values))
    return f"trainer.deepspeed.config={file}"


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("trainer.deepspeed.stage=4", ["trainer.deepspeed.stage=4", "1 <= x <= 3"]),
        ("trainer.deepspeed.stage=0", ["trainer.deepspeed.stage=0", "1 <= x <= 3"]),
        (
            "trainer.deepspeed.offload_parameters=true",
            ["offload_parameters=true", "trainer.deepspeed.stage=2", "set trainer.deepspeed.stage=3"],
        ),
        ("trainer.deepspeed.config=nowhere.json", ["trainer.deepspeed.config='nowhere.json'", "no such file"]),
    ],
)
def test_settings_that_cannot_be_are_refused_with_the_remedy(word: str, parts: list[str]):
    for part in parts:
        assert part in refusal(*ON, word)


def test_settings_of_deepspeed_under_another_strategy_are_refused():
    said = refusal(*BASE, "trainer.strategy=ddp", "trainer.deepspeed.stage=3")
    assert "trainer.deepspeed.stage=3 has no effect with trainer.strategy='ddp'" in said
    assert "set trainer.strategy=deepspeed" in said


@pytest.mark.parametrize(
    ("values", "name", "remedy"),
    [
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}, "optimizer", "set optim.lr"),
        ({"scheduler": {"type": "WarmupLR"}}, "scheduler", "set optim.schedule"),
        ({"gradient_clipping": 0.5}, "gradient_clipping=0.5", "set optim.grad_clip"),
        ({"train_batch_size": 64}, "train_batch_size=64", "set trainer.prompts_per_update"),
        ({"train_micro_batch_size_per_gpu": 4}, "train_micro_batch_size_per_gpu", "set trainer.tokens_per_micro_batch"),
        ({"gradient_accumulation_steps": 8}, "gradient_accumulation_steps=8", "trainer.prompts_per_update"),
        ({"bf16": {"enabled": True}}, "bf16=", "set model.dtype"),
        ({"fp16": {"enabled": True}}, "fp16=", "set model.dtype"),
        ({"communication_data_type": "bf16"}, "communication_data_type", "summed in float32"),
        ({"zero_optimization": {"stage": 1}}, "zero_optimization.stage=1", "set trainer.deepspeed.stage"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            "zero_optimization.offload_optimizer=",
            "set trainer.deepspeed.offload_optimizer",
        ),
        (
            {"zero_optimization": {"offload_param": {"device": "nvme"}}},
            "zero_optimization.offload_param=",
            "set trainer.deepspeed.offload_parameters",
        ),
    ],
)
def test_a_file_that_contradicts_the_run_is_refused_by_name_with_what_to_set(tmp_path, values, name, remedy):
    said = refusal(*ON, written(tmp_path, values))
    assert "ds.json" in said
    assert f"sets {name}" in said
    assert remedy in said


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ("{", ["is not JSON"]),
        ([1], ["one JSON object"]),
        ({"zero_optimization": 3}, ["zero_optimization must be an object"]),
        ({"steps_per_prnt": 3}, ["'steps_per_prnt' is not known", "Did you mean 'steps_per_print'?"]),
        (
            {"zero_optimization": {"zero_hpz_partition_size": 2}},
            ["'zero_optimization.zero_hpz_partition_size' is not known", "zero_optimization.sub_group_size"],
        ),
    ],
)
def test_a_file_with_something_unknown_in_it_is_refused(tmp_path, values, parts):
    said = refusal(*ON, written(tmp_path, values))
    for part in parts:
        assert part in said


def test_a_file_that_agrees_or_leaves_it_open_adds_what_is_free(tmp_path):
    values = {
        "bf16": {"enabled": False},
        "fp16": "auto",
        "gradient_clipping": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "wall_clock_breakdown": True,
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "none"},
            "overlap_comm": "auto",
            "reduce_bucket_size": 1000,
            "sub_group_size": 2000,
        },
    }
    config = load_config(None, [*ON, "trainer.deepspeed.stage=3", written(tmp_path, values)])
    merged = deepspeed_config(config)
    assert merged["wall_clock_breakdown"] is True
    assert merged["gradient_clipping"] == 0.0
    assert merged["zero_optimization"] == {"stage": 3, "reduce_bucket_size": 1000, "sub_group_size": 2000}
    assert "fp16" not in merged
    whole = with_precision(merged, half=True, elements=101)
    assert whole["bf16"] == {"enabled": True}
    assert whole["data_types"] == {"grad_accum_dtype": "fp32"}
    assert whole["zero_optimization"]["reduce_bucket_size"] == 1000
    assert whole["zero_optimization"]["allgather_bucket_size"] == 102
    assert "reduce_scatter" not in whole["zero_optimization"]


def test_where_gradients_are_all_reduced_no_bucket_is_copied_unless_a_file_says_so(tmp_path):
    for words, copied in (((), False), ((written(tmp_path, {"zero_optimization": {"reduce_scatter": True}}),), True)):
        merged = deepspeed_config(load_config(None, [*ON, *words]))
        assert with_precision(merged, half=False, elements=100)["zero_optimization"]["reduce_scatter"] is copied


def test_what_is_kept_on_the_host_follows_the_settings():
    words = [f"trainer.deepspeed.{word}" for word in ("stage=3", "offload_optimizer=true", "offload_parameters=true")]
    zero = deepspeed_config(load_config(None, [*ON, *words]))["zero_optimization"]
    assert zero["offload_optimizer"]["device"] == zero["offload_param"]["device"] == "cpu"
