"""Every key of OpenRLHF, ROLL and NeMo-RL that is given appears in the table, and no other value is lost."""

import json

import pytest

from hwgrpo.config.document import entries
from hwgrpo.errors import ConfigError
from hwgrpo.imports.core_imports import import_core
from hwgrpo.imports.import_table import table_text
from hwgrpo.imports.recipe_text import recipe_text
from hwgrpo.peer_tables.nemo_rl_mapped import NEMO_RL
from hwgrpo.peer_tables.openrlhf_mapped import OPENRLHF
from hwgrpo.peer_tables.peer_names import PeerNames
from hwgrpo.peer_tables.peer_row import UNSET, PeerRow
from hwgrpo.peer_tables.roll_mapped import ROLL
from tests.imports.core_runs import BASES, entry, imported

NAMES = {"openrlhf": OPENRLHF, "roll": ROLL, "nemo-rl": NEMO_RL}
ROWS = [(system, row) for system, names in NAMES.items() for row in names.rows.values() if row.key != "*"]

_EXAMPLES = {"actor_infer.device_mapping": "[8, 9]", "policy.generation.stop_strings": "[stop]"}
_EXAMPLES["actor_infer.generating_args.stop_strings"] = "[stop]"


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_rows_name_settings_that_exist(names: PeerNames):
    known = {each.key for each in entries()}
    assert {here for row in names.rows.values() for here in row.here.split(", ") if here} <= known
    assert all(row.note or row.here for row in names.rows.values())
    assert set(names.older.values()) <= {*names.rows, *(old for old in names.older.values() if names.row_of(old))}
    assert all((row := names.row_of(new)) is not None and row.kind != "unread" for new in names.older.values())
    assert not {*names.older} & {*names.rows}


def example(row: PeerRow) -> str:
    """Return a legal value of a row, as text."""
    if row.key in _EXAMPLES:
        return _EXAMPLES[row.key]
    if row.values:
        return str(row.default) if row.default is not UNSET and row.values.get(str(row.default)) else _legal(row)
    if row.kind == "refused":
        return json.dumps(row.neutral[0])
    default = None if row.default is UNSET else row.default
    if default is not None:
        return json.dumps(default) if isinstance(default, list | bool) else str(default)
    return {"bool": "true", "int": "1536", "number": "2", "list": "[1, 2]"}.get(row.type.split("|")[0], "7")


def _legal(row: PeerRow) -> str:
    return next(value for value, here in row.values.items() if here)


@pytest.mark.parametrize(("system", "row"), ROWS, ids=[f"{system}:{row.key}" for system, row in ROWS])
def test_a_key_appears_once_and_says_what_becomes_of_it(system: str, row: PeerRow):
    key = row.key.replace(".*", ".x")
    base = tuple(each for each in BASES[system] if not each.startswith(f"{key}="))
    given = next((each for each in BASES[system] if each.startswith(f"{key}=")), f"{key}={example(row)}")
    flags = ["--" + key, *example(row).strip("[]").split(", ")] if example(row).startswith("[") else [given]
    result = import_core(system, None, [*base, *(flags if system == "openrlhf" else [given])], {})[0]
    found = entry(result, key)
    assert found.becomes or found.note
    assert found.group != "unread"


@pytest.mark.parametrize("system", NAMES)
def test_other_keys_are_listed_with_their_value(system: str):
    result = imported(system, "some.other.key=0.37")
    found = entry(result, "some.other.key")
    assert (found.group, found.value) == ("unread", 0.37)
    table = table_text(result, 200)
    assert "Not read: they set nothing here (1)" in table
    assert "0.37" in table
    assert not any("some.other" in comment for comment in result.origins.values())


def test_a_misspelt_key_is_named():
    result = imported("openrlhf", "rollout.batch_sise=64", "actor.adam.eta=1")
    assert "did you mean rollout.batch_size?" in entry(result, "rollout.batch_sise").note
    assert "did you mean" not in entry(result, "actor.adam.eta").note


def test_a_secret_is_in_no_table_and_no_recipe():
    for key in ("logger.wandb.key", "use_wandb"):
        result = imported("openrlhf", f"{key}=abc123secret")
        assert "abc123secret" not in table_text(result, 200) + recipe_text(result, "a test")
        assert result.settings["observe.loggers"] == ["jsonl", "wandb"]


@pytest.mark.parametrize(
    ("system", "setting", "message"),
    [
        ("openrlhf", "rollout.n_samples_per_prompt=1", "rollout.n_samples_per_prompt=1: a group needs at least 2"),
        ("openrlhf", "train.batch_size=100", "train.batch_size=100 counts responses.*use train.batch_size=96"),
        ("openrlhf", "rollout.batch_size=96", "must be a multiple of train.batch_size=8192 responses, 1024 prompts"),
        ("openrlhf", "algo.advantage.estimator=grpo", "algo.advantage.estimator='grpo' is not known"),
        ("roll", "actor_train.device_mapping=all", "actor_train.device_mapping='all' must be a list of devices"),
        ("roll", "rollout_batch_size=100", "an update has 1024 responses.*divide the 800 of a step"),
        ("roll", "sequence_length=512", "sequence_length=512 must be more than prompt_length=1024"),
        ("nemo-rl", "policy.train_global_batch_size=100", "policy.train_global_batch_size=100 counts responses"),
        (
            "nemo-rl",
            "loss_fn.sequence_level_importance_ratios=true",
            "loss_fn.token_level_loss must be false beside loss_fn.sequence_level_importance_ratios=true",
        ),
        ("nemo-rl", "policy.precision=int4", "policy.precision='int4' is not known"),
        ("nemo-rl", "grpo.seed=${grpo.sead}", r"grpo.seed=\$\{grpo.sead\}: grpo.sead is not set"),
    ],
)
def test_values_without_a_meaning_are_errors(system: str, setting: str, message: str):
    key = setting.partition("=")[0]
    base = tuple(each for each in BASES[system] if not each.startswith(f"{key}="))
    with pytest.raises(ConfigError, match=message):
        imported(system, setting, base=base)
