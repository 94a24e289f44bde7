"""A setting that nothing uses is refused, by what the schema declares beside it."""

import dataclasses
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from hwgrpo.config import Config, load_config
from hwgrpo.config.document import entries
from hwgrpo.config.fields import AnyOf
from hwgrpo.config.load import to_yaml
from hwgrpo.config.uses import check_used
from hwgrpo.errors import ConfigError

BASE = ("model.path=builtin://tiny", "data.train=task://sort?digits=2", "reward.functions=[exact_match]")
SERVER = ("rollout.engine=vllm_server",)
DEEPSPEED = ("trainer.strategy=deepspeed", "trainer.deepspeed.stage=3")
CASES = [
    # (a setting, where it has no effect, what that message names, where it has one)
    ("algorithm.loss.dual_clip=4", ["algorithm.loss.name=gspo"], "set algorithm.loss.name=ppo_clip,", []),
    ("algorithm.loss.clip_high=0.3", ["algorithm.loss.name=gpg"], "set algorithm.loss.name=cispo or clip_cov", []),
    ("algorithm.loss.clip_low=0.1", ["algorithm.loss.name=sapo"], "algorithm.loss.name='sapo'", []),
    (
        "algorithm.advantage.std=none",
        ["algorithm.advantage.name=rloo"],
        "set algorithm.advantage.name=gdpo or gigpo or grpo or",
        [],
    ),
    (
        "algorithm.advantage.singleton=raw",
        ["algorithm.advantage.name=online_rft"],
        "gdpo or gigpo or gpg",
        [],
    ),
    ("algorithm.advantage.eps=1e-4", ["algorithm.advantage.std=none"], "advantage.std=group or batch", []),
    ("algorithm.advantage.std_correction=0", ["algorithm.advantage.name=opo"], "advantage.name='opo'", []),
    ("algorithm.correction.high=3", [], "algorithm.correction.name='none'", ["algorithm.correction.name=token_mask"]),
    (
        "algorithm.loss.log_ratio_clamp=5",
        ["algorithm.loss.name=gspo"],
        "set algorithm.loss.name=cispo or dppo_kl or",
        [],
    ),
    ("algorithm.loss.delta=2", ["algorithm.loss.name=sapo"], "set algorithm.loss.name=gspo or ppo_clip", []),
    ("algorithm.loss.kwargs={beta: 1}", [], "dro", ["algorithm.loss.name=dro"]),
    ("algorithm.loss.tau_pos=2", [], "set algorithm.loss.name=sapo", ["algorithm.loss.name=sapo"]),
    ("algorithm.loss.tau_neg=2", [], "set algorithm.loss.name=sapo", ["algorithm.loss.name=sapo"]),
    (
        "algorithm.kl.output_clamp=null",
        ["algorithm.kl.coef=0.1", "algorithm.kl.estimator=k2"],
        "set algorithm.kl.estimator=k3 or k3+",
        ["algorithm.kl.coef=0.1"],
    ),
    ("algorithm.kl.input_clamp=5", [], "set algorithm.kl.coef above 0", ["algorithm.kl.coef=0.1"]),
    ("algorithm.kl.times_ratio=true", [], "set algorithm.kl.coef above 0", ["algorithm.kl.coef=0.1"]),
    ("algorithm.kl.estimator=k1", [], "set algorithm.kl.coef above 0", ["algorithm.kl.coef=0.1"]),
    (
        "algorithm.aggregation.norm_length=9",
        [],
        "set algorithm.aggregation.name=seq-mean-token-sum-norm",
        ["algorithm.aggregation.name=seq-mean-token-sum-norm"],
    ),
    ("optim.min_lr_ratio=0.1", [], "set optim.schedule=linear or cosine", ["optim.schedule=cosine"]),
    ("trainer.fsdp2.offload=true", [], "set trainer.strategy=fsdp2", ["trainer.strategy=fsdp2"]),
    (
        "trainer.deepspeed.offload_parameters=true",
        ["trainer.strategy=deepspeed"],
        "set trainer.deepspeed.stage=3",
        DEEPSPEED,
    ),
    ("trainer.epochs=3", ["trainer.max_steps=5"], "set trainer.max_steps=0", []),
    ("trainer.save_async=false", [], "trainer.save_every of 1 or more", ["trainer.save_every=5"]),
    ("trainer.validate_every=3", ["data.train=openai/gsm8k"], "set data.validation or data.train=task://", []),
    (
        "data.validation_max_rows=3",
        ["data.train=openai/gsm8k"],
        "data.validation=null",
        ["data.validation=task://copy"],
    ),
    ("data.split=x", [], "set data.train to a folder or a hub dataset", ["data.train=openai/gsm8k"]),
    ("model.revision=main", [], "model.path='builtin://tiny'", ["model.path=Qwen/Qwen3-0.6B"]),
    ("model.lora.dropout=0.1", [], "set model.lora.rank above 0", ["model.lora.rank=4"]),
    ("rollout.graphs=true", ["trainer.deterministic=true"], "set trainer.deterministic=false", []),
    ("rollout.graphs=true", SERVER, "set rollout.engine=auto or local", []),
    (
        "rollout.partial=true",
        [],
        "set rollout.max_staleness of 1 or more",
        ["rollout.max_staleness=1", "algorithm.correction.name=token_mask"],
    ),
    (
        "rollout.kv_cache_gb=1",
        ["rollout.engine=sglang_server"],
        "set rollout.engine=auto or vllm or vllm_server,",
        SERVER,
    ),
    ("rollout.max_model_len=999999", [], "rollout.engine=auto or sglang_server or vllm or vllm_server", SERVER),
    ("rollout.server.port=80", [], "set rollout.engine=auto or vllm_server or sglang_server", SERVER),
    ("rollout.server.port=80", [*SERVER, "rollout.server.url=http://x"], "set rollout.server.url=null", SERVER),
    ("rollout.server.weights_dir=w", [*SERVER, "rollout.server.transfer=group"], "transfer=auto or folder", SERVER),
    (
        "reward.functions.0.failure_value=1",
        [],
        "reward.functions.0.on_nan=value or",
        ["reward.functions.0.on_nan=value"],
    ),
    ("reward.functions.0.on_timeout=value", [], "set reward.functions.0.timeout,", ["reward.functions.0.timeout=9"]),
    ("observe.project=x", [], "observe.loggers with wandb or trackio or swanlab", ["observe.loggers=[wandb]"]),
    ("observe.log_every=5", ["observe.progress=none"], "set observe.progress=auto or plain", []),
]


def load(*overrides: str):
    return load_config(None, [*BASE, *overrides], data_may_be_missing=True)


@pytest.mark.parametrize(("override", "without", "named", "within"), CASES, ids=[f"{c[0]} {c[1]}" for c in CASES])
def test_a_setting_without_effect_is_refused_with_what_would_use_it(
    override: str, without: list[str], named: str, within: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("hwgrpo.config.validate.check_logger_installed", lambda name: None)
    with pytest.raises(ConfigError) as error:
        load(*without, override)
    key, _, _ = override.partition("=")
    assert f"{key}=" in str(error.value)
    assert " has no effect with " in str(error.value)
    assert named in str(error.value)
    assert f", or leave {key} at its default " in str(error.value)
    load(*within, override)


def test_defaults_never_count_written_out_or_not(tmp_path):
    (tmp_path / "all.yaml").write_text(to_yaml(load("algorithm.loss.name=gpg")))
    load_config(tmp_path / "all.yaml")
    load("trainer.deepspeed.stage=2", "algorithm.correction.high=2.0")


@pytest.mark.parametrize("words", [["trainer.deterministic=true"], SERVER], ids=["deterministic", "server"])
def test_graphs_may_be_off_where_there_are_none(words: list[str]):
    assert load(*words, "rollout.graphs=false").rollout.graphs is False


def test_imported_settings_get_a_note_and_others_an_error(capsys):
    words = [*BASE, "optim.min_lr_ratio=0.1", "rollout.server.port=80"]
    config = load_config(None, words, imported=["optim.min_lr_ratio", "rollout.server"])
    notes = capsys.readouterr().err.splitlines()
    assert [note.partition(" has no effect")[0] for note in notes] == [
        "hwgrpo: note: rollout.server.port=80",
        "hwgrpo: note: optim.min_lr_ratio=0.1",
    ]
    assert len(check_used(config, ["optim", "rollout"])) == 2
    with pytest.raises(ConfigError, match=r"optim\.min_lr_ratio"):
        check_used(config, ["rollout", "optim.min_lr"])


def conditions(section: type, prefix: str) -> Iterator[tuple[str, AnyOf]]:
    hints = typing.get_type_hints(section)
    for field in dataclasses.fields(section):
        for condition in field.metadata.get("used_by", ()):
            yield prefix, condition
        inner = [*typing.get_args(hints[field.name]), hints[field.name]][0]
        if dataclasses.is_dataclass(inner):
            yield from conditions(
                typing.cast(type, inner), f"{prefix}{field.name}{'' if inner is hints[field.name] else '[]'}."
            )


def test_every_condition_names_a_setting_and_values_that_it_can_have():
    known = {entry.key: entry for entry in entries()}
    found = list(conditions(Config, ""))
    assert len(found) > 30
    for prefix, condition in found:
        for use in condition:
            key = prefix + use.key[1:] if use.key.startswith(".") else use.key
            assert key in known
            if use.values and use.test is None and known[key].allowed.startswith("one of: "):
                assert {*use.values} <= {*known[key].allowed.removeprefix("one of: ").split(", ")}, key


def test_the_table_of_settings_says_what_uses_one(capsys):
    used = {entry.key: entry.used_by for entry in entries()}
    assert used["optim.min_lr_ratio"] == "optim.schedule=linear or cosine"
    assert used["algorithm.loss.dual_clip"] == "algorithm.loss.name=ppo_clip"
    assert used["trainer.deepspeed.offload_parameters"] == "trainer.strategy=deepspeed and trainer.deepspeed.stage=3"
    assert used["reward.functions[].on_timeout"] == "reward.functions[].timeout"
    assert used["rollout.n"] == ""


RECIPE = """
model: {path: "builtin://tiny"}
data: {train: "task://sort?digits=2"}
reward: {functions: [exact_match]}
optim: {schedule: cosine, min_lr_ratio: 0.1}
"""


def test_a_setting_of_a_recipe_that_an_override_leaves_without_effect_is_noted(tmp_path: Path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    load_config(recipe, ["optim.schedule=constant", "optim.lr=1e-5"])
    assert (
        "hwgrpo: note: optim.min_lr_ratio=0.1 has no effect with optim.schedule='constant'" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("schedule", "overrides"),
    [
        ("cosine", ["optim.schedule=constant", "optim.min_lr_ratio=0.2"]),  # the override itself has no effect
        ("constant", ["optim.lr=1e-5"]),  # it had none before the override either
        ("constant", []),
    ],
)
def test_other_settings_without_effect_are_refused(tmp_path: Path, schedule: str, overrides: list[str]):
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("cosine", schedule))
    with pytest.raises(ConfigError, match=r"optim.min_lr_ratio=0\..* has no effect"):
        load_config(tmp_path / "recipe.yaml", overrides)
