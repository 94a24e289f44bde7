"""Every field of TRL 1.16 has a row, and every key of an import is accounted for."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hwgrpo.config.document import entries
from hwgrpo.errors import ConfigError
from hwgrpo.migrate.imports.import_table import table_text
from hwgrpo.migrate.imports.recipe_text import recipe_text
from hwgrpo.migrate.imports.trl_reader import read_trl
from hwgrpo.migrate.tables.peer_row import UNSET, PeerRow
from hwgrpo.migrate.tables.trl_names import OLDER, ROWS, TRL, TUTORIALS
from tests.support.processes.launch import ROOT
from tests.support.processes.wheels import fetched
from tests.trl.trl_runs import BASE, config_of, imported
from tests.trl.write_fields import FILE

LINES = [line.split(" ", 2) for line in FILE.read_text().splitlines()]
"""Class, field and default of TRL 1.16.0 with transformers 5.19."""


def row_of(name: str) -> PeerRow | None:
    return TRL.row_of(TRL.current_name(name)[0])


def test_every_field_of_trl_has_a_row():
    assert len(LINES) > 210
    assert [name for _, name, _ in LINES if row_of(name) is None] == []


@pytest.mark.slow
def test_the_list_of_fields_is_that_of_trl():
    folder = fetched("trl", ("trl",))
    code = "from tests.trl.write_fields import fields; print(chr(10).join(fields()))"
    paths = os.pathsep.join([str(ROOT), str(folder)])
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == FILE.read_text()


def test_the_defaults_of_rows_are_trls():
    kept = {"output_dir", "datasets"}  # null becomes trainer_output; an empty list is none
    for _, name, text in LINES:
        row = row_of(name)
        assert row is not None
        default = json.loads(text)
        if row.kind in ("same", "joint") and row.default is not UNSET and row.key == name and name not in kept:
            assert row.default == default, name
        if row.kind == "refused":
            assert default in row.neutral, name


def test_every_field_of_our_config_has_trls_name_and_default():
    from hwgrpo.trl.grpo_config import FIELDS, _Arguments

    own = {field.name: field.default for field in dataclasses.fields(_Arguments)}
    trls = {name: json.loads(text) for kind, name, text in LINES if kind == "GRPOConfig"}
    assert trls.keys() - {*FIELDS} == set()
    assert {*FIELDS} - trls.keys() <= {"max_prompt_length"}
    for name, default in trls.items():
        if own[name] is not dataclasses.MISSING:
            assert own[name] == default, name


def test_rows_name_settings_that_exist():
    known = {entry.key for entry in entries()}
    named = {here for row in ROWS.values() for here in row.here.split(", ") if here}
    assert named <= known
    assert all(row.note or row.here for row in ROWS.values())
    assert all(row_of(key) for key in (*OLDER, *TUTORIALS))


def example(row: PeerRow) -> str:
    """Return a legal value of a row, as text."""
    special = {"num_generations_eval": "4", "generation_batch_size": "8", "vllm_importance_sampling_clip_min": "0.5"}
    special |= {"model_init_kwargs": "{}", "generation_kwargs": "{}", "lr_scheduler_kwargs": "{}", "fsdp_config": "{}"}
    special |= {"deepspeed": "{}", "attn_implementation": "sdpa", "datasets": "[{path: a.jsonl}]", "delta": "2.0"}
    special |= {"reward_funcs": "a.b", "report_to": "tensorboard", "reward_weights": "[1.0]", "top_k": "5"}
    if row.key in special:
        return special[row.key]
    if row.values:
        return next(value for value, here in row.values.items() if here)
    if row.kind == "refused":
        return "null" if not row.neutral or row.neutral[0] is None else str(row.neutral[0]) or '""'
    if row.kind == "ignored":
        return "1"
    default = None if row.default is UNSET else row.default
    kind = row.type.split("|")[0]
    if default is not None:
        return str(default)
    return {"bool": "True", "int": "4096", "number": "0.5", "text": "x", "mapping": "{}", "list": "[a]"}[kind]


def test_a_key_appears_once_and_its_row_says_where():
    for row in (row for row in ROWS.values() if row.neutral or row.kind != "refused"):
        base = tuple(each for each in BASE if not each.startswith(f"{row.key}="))
        result = imported(f"{row.key}={example(row)}", base=base)
        listed = [each for each in result.entries if each.key == row.key and each.group != "default"]
        assert len(listed) == 1, row.key
        [entry] = listed
        assert entry.becomes or entry.note, row.key
        if row.kind in ("ignored", "refused"):
            assert entry.group == "ignored", row.key
        if entry.group == "mapped" and row.here:
            assert any(here.rpartition(".")[0] in entry.becomes for here in row.here.split(", ")), row.key


def test_a_key_without_counterpart_is_refused_by_name():
    for row in (row for row in ROWS.values() if row.kind == "refused"):
        refused = imported(f"{row.key}=7").refused()
        assert [each.key for each in refused] == [row.key]
        assert row.note in refused[0].note, row.key
        assert row.instead in refused[0].note, row.key


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ("lr_scheduler_type=polynomial", "cosine_with_min_lr"),
        ("lr_scheduler_kwargs={num_cycles: 2}", "num_cycles is not supported"),
        ("num_train_epochs=1.5", "the number of rows is not known"),
        ("max_steps=3 num_iterations=2", "max_steps=2 or max_steps=4"),
        ("generation_kwargs={num_beams: 4}", "num_beams has no setting here"),
        ("generation_kwargs={do_sample: false}", "a group of greedy responses has no signal"),
        ("model_init_kwargs={rope_scaling: 2}", "rope_scaling has no setting here"),
        ("attn_implementation=ring", "one of "),
        ("importance_sampling_level=sequence loss_type=cispo", "cispo has its own ratio"),
        ("load_in_4bit=true", "use_peft=True"),
        ("loss_type=vespo use_vllm=true", "vllm_importance_sampling_correction=false, or another loss_type"),
        ("load_in_4bit=true load_in_8bit=true use_peft=true", "one of both"),
        ("report_to=mlflow", "there is no logger mlflow"),
        ("eval_strategy=epoch", "eval_steps as a number of updates"),
        ("save_strategy=best", "steps"),
        ("datasets=[{path: a, fraction: 0.5}]", "fraction is not supported"),
        ("datasets=[{path: a, split: x}, {path: b}]", "several splits"),
        ("datasets=[{path: a}] eval_strategy=steps", "no test split"),
        ("reward_funcs=nothing", "module.function"),
        ("reward_funcs=[accuracy,format,tag_count]", "format, tag_count is the script's own; nearest: the rewards "),
        ("reward_funcs=[a.b] reward_weights=[1,2]", "there are 1 functions"),
        ("fsdp=full_shard deepspeed={zero_optimization: {stage: 2}}", "one of both"),
        ("use_vllm=true vllm_importance_sampling_clip_min=4", "less than 3"),
        (
            "use_vllm=true vllm_importance_sampling_mode=token_truncate vllm_importance_sampling_clip_max=null",
            "needs a bound",
        ),
    ],
)
def test_a_value_without_counterpart_is_refused_by_name(settings: str, why: str):
    import re

    given = re.findall(r"\w+=(?:[\[{].*?[\]}]+|\S+)(?=\s\w+=|$)", settings)
    refused = imported(*given).refused()
    assert len(refused) == 1, refused
    assert why in refused[0].note


def test_refused_keys_are_shown_at_once_and_left_out_as_comments(tmp_path: Path):
    result = imported("fp16=true", "repetition_penalty=1.1", "num_generations=4")
    assert len(result.refused()) == 2
    assert recipe_text(result, "x").count("# Left out, refused: ") == 2
    assert config_of(result, tmp_path).rollout.n == 4
    text = table_text(result, 120)
    assert "Refused (2)" in text
    assert "Defaults of TRL that differ from those here, applied (" in text
    assert "TRL key" in text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("num_generaton=3", "unknown key of TRL 'num_generaton': did you mean num_generations?"),
        ("num_generations=many", "num_generations='many' must be a whole number, as in TRL"),
        ("gradient_checkpointing=5", "must be true or false"),
        ("loss_type=ppo", "dapo"),
        ("kl_coef=0.1 beta=0.2", "are one setting"),
        ("model_init_kwargs=none", "must be a mapping"),
        ("deepspeed=missing.json", "missing.json"),
    ],
)
def test_an_unknown_key_or_an_illegal_value_is_an_error(settings: str, message: str):
    with pytest.raises(ConfigError) as error:
        imported(*settings.split(" "))
    assert message in str(error.value)


def test_a_yaml_file_of_trl_grpo_is_read(tmp_path: Path):
    file = tmp_path / "grpo.yaml"
    file.write_text(
        "model_name_or_path: m\nlearning_rate: 1e-5\nnum_generations: '4'\nbf16: 'true'\nenv: {A: b}\n"
        "datasets:\n  - path: a.jsonl\n"
    )
    settings, notices = read_trl(str(file), ["beta=0.1", "--seed=7"], {})
    expected = {"learning_rate": 1e-5, "num_generations": 4, "bf16": True, "beta": 0.1, "seed": 7}
    assert {key: settings.given[key] for key in expected} == expected
    assert len(notices) == 1
    with pytest.raises(ConfigError, match=r"cannot be read"):
        read_trl(str(tmp_path / "none.yaml"), [], {})
    file.write_text("- a\n")
    with pytest.raises(ConfigError, match=r"must be a YAML mapping"):
        read_trl(str(file), [], {})
