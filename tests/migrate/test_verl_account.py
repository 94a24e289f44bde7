"""Every key of verl has a row, and every key of an import is accounted for."""

from pathlib import Path

import pytest

from hwgrpo.config.document import entries
from hwgrpo.errors import ConfigError
from hwgrpo.migrate.imports.hydra_values import read_resolved
from hwgrpo.migrate.imports.import_table import table_text
from hwgrpo.migrate.imports.recipe_text import recipe_text
from hwgrpo.migrate.imports.shell_script import MODULES
from hwgrpo.migrate.imports.verl_import import import_verl
from hwgrpo.migrate.imports.verl_reader import read_verl
from hwgrpo.migrate.tables.peer_row import UNSET, PeerRow
from hwgrpo.migrate.tables.verl_names import OLDER, ROWS, TUTORIALS, current_name, row_of
from tests.migrate.verl_runs import BASE, config_of, imported

KEYS = (Path(__file__).parent / "verl_keys.txt").read_text().split()
"""Keys of verl's GRPO example scripts and of its trainer's config, January and August 2026."""
ACTOR = "actor_rollout_ref.actor."


def test_every_key_of_verl_has_a_row():
    assert len(KEYS) > 600
    assert [key for key in KEYS if row_of(current_name(key)[0]) is None] == []


def test_rows_name_settings_that_exist():
    known = {entry.key for entry in entries()}
    named = {here for row in ROWS.values() for here in row.here.split(", ") if here}
    assert named <= known
    assert all(row.note or row.here for row in ROWS.values())
    assert all(row_of(current_name(key)[0]) for key in (*OLDER, *TUTORIALS) if not key.endswith(".*"))


def example(row: PeerRow) -> str:
    """Return a legal value of a row, as text, other than the default where there is another one."""
    if row.values:
        return next(value for value, here in row.values.items() if here)
    if row.kind == "refused":
        return "null" if row.neutral[0] is None else str(row.neutral[0])
    if row.kind == "ignored":
        return "1"
    default = None if row.default is UNSET else row.default
    kind = row.type.split("|")[0]
    if default is not None and kind != "list":
        return str(default)
    return {"bool": "True", "int": "4096", "number": "2", "text": "x", "list": "[0.9,0.99]", "mapping": "{}"}.get(
        kind, "1"
    )


def test_a_key_appears_once_and_its_row_says_where():
    for row in ROWS.values():
        key = row.key.replace(".*", ".x")
        base = tuple(each for each in BASE if not each.startswith(f"{key}="))
        result = imported(f"{key}={example(row)}", base=base)
        listed = [each for each in result.entries if each.key == key and each.group != "default"]
        assert len(listed) == 1, key
        [entry] = listed
        assert entry.becomes or entry.note, key
        if row.kind in ("ignored", "refused"):
            assert entry.group == "ignored", key
        if entry.group == "mapped":
            assert any(here in entry.becomes for here in row.here.split(", ")), key


def test_a_key_without_counterpart_is_refused_by_name():
    for row in (row for row in ROWS.values() if row.kind == "refused"):
        key = row.key.replace(".*", ".x")
        refused = imported(f"{key}=7").refused()
        assert [(each.key, each.group) for each in refused] == [(key, "refused")]
        assert row.note in refused[0].note, key
        assert row.instead in refused[0].note, key


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("algorithm.adv_estimator=gae", "needs a critic"),
        ("data.truncation=middle", "not cut in the middle"),
        (f"{ACTOR}policy_loss.loss_mode=bypass_mode", "bypass_mode"),
        ("actor_rollout_ref.rollout.name=trtllm", "TensorRT-LLM"),
        ("reward.reward_manager.name=remote", "manager"),
        ("trainer.logger=[console,mlflow]", "no logger mlflow"),
        ("actor_rollout_ref.rollout.max_model_len=100", "1024 tokens"),
        (f"{ACTOR}lora.enable=True", "rank"),
        ("data.gen_batch_size=2048", "data.train_batch_size"),
    ],
)
def test_a_value_without_counterpart_is_refused_by_name(override: str, why: str):
    key = override.partition("=")[0]
    base = tuple(each for each in BASE if not each.startswith(f"{key}="))
    [refused] = imported(override, base=base).refused()
    assert refused.key == key
    assert why in refused.note


BYPASS = "algorithm.rollout_correction.bypass_mode=True"


@pytest.mark.parametrize(
    ("overrides", "key", "why"),
    [
        (
            ("trainer.use_v1=False", f"{ACTOR}policy_loss.loss_mode=gspo"),
            f"{ACTOR}policy_loss.loss_mode",
            "older trainer computes PPO clip in its place, or REINFORCE by loss_type",
        ),
        (
            ("algorithm.rollout_correction.loss_type=reinforce",),
            "algorithm.rollout_correction.loss_type",
            "v1 trainer keeps policy_loss.loss_mode, and its older one (trainer.use_v1=False) weighs log-probs",
        ),
        (
            ("algorithm.rollout_correction.rollout_rs=token_k1", "algorithm.rollout_correction.rollout_rs_threshold=2"),
            "algorithm.rollout_correction.rollout_rs",
            "v1 trainer rejects nothing, and its older one (trainer.use_v1=False) by the current policy's ratio",
        ),
    ],
)
def test_what_verls_two_trainers_read_differently_beside_bypass_mode_is_refused(
    overrides: tuple[str, ...], key: str, why: str
):
    [refused] = imported(BYPASS, *overrides).refused()
    assert refused.key == key
    assert why in refused.note


def test_tokens_rejected_from_the_ratio_of_a_sequence_are_refused():
    mode, rejects = f"{ACTOR}policy_loss.loss_mode=geo_mean", "algorithm.rollout_correction.rollout_rs"
    bounds = f"{rejects}_threshold=2.0"
    [refused] = imported(mode, f"{rejects}='seq_mean_k1,token_k1'", bounds).refused()
    assert refused.key == rejects
    assert "token_k1 rejects out of the ratio of geo_mean" in refused.note
    assert imported(mode, f"{rejects}=seq_mean_k1", bounds).refused() == []


SGLANG, FILTERED = "actor_rollout_ref.rollout.name=sglang", "over all tokens"
DRAWN = "verl draws them by"


@pytest.mark.parametrize(
    ("overrides", "key", "said"),
    [
        (("actor_rollout_ref.rollout.top_p=0.9",), "actor_rollout_ref.rollout.top_p", FILTERED),
        (("actor_rollout_ref.rollout.top_k=50",), "actor_rollout_ref.rollout.top_k", FILTERED),
        (("data.train_max_samples=100",), "data.train_max_samples", f"{DRAWN} chance, others in each run"),
        (("data.train_max_samples=100", "data.seed=1"), "data.train_max_samples", f"{DRAWN} data.seed"),
        (("data.val_max_samples=100",), "data.val_max_samples", DRAWN),
        (
            (BYPASS, f"{ACTOR}policy_loss.loss_mode=gspo"),
            f"{ACTOR}policy_loss.loss_mode",
            "v1 trainer with bypass_mode",
        ),
        (
            (BYPASS, "algorithm.rollout_correction.rollout_is=token"),
            "algorithm.rollout_correction.rollout_is",
            "weigh no",
        ),
    ],
)
def test_what_differs_is_said(overrides: tuple[str, ...], key: str, said: str):
    [entry] = [each for each in imported(*overrides).entries if each.key == key]
    assert entry.group in ("mapped", "ignored")
    assert said in entry.note


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ((SGLANG, "actor_rollout_ref.rollout.top_p=0.9"), "actor_rollout_ref.rollout.top_p"),
        (("actor_rollout_ref.rollout.top_p=1.0",), "actor_rollout_ref.rollout.top_p"),
        (("data.train_max_samples=100", "data.shuffle=False"), "data.train_max_samples"),
        (("data.train_max_samples=-1",), "data.train_max_samples"),
    ],
)
def test_what_does_not_differ_has_no_note_of_it(overrides: tuple[str, ...], key: str):
    [entry] = [each for each in imported(*overrides).entries if each.key == key]
    assert FILTERED not in entry.note
    assert DRAWN not in entry.note


def test_modules_of_megatron_that_have_no_name_here_are_refused():
    targets = "actor_rollout_ref.model.lora.target_modules"
    [refused] = imported("actor_rollout_ref.model.lora.rank=8", f"{targets}=[linear_q_down_proj]").refused()
    assert refused.key == targets
    assert "linear_qkv" in refused.note


def test_greedy_validation_with_do_sample_has_a_note():
    sampled = "actor_rollout_ref.rollout.val_kwargs.do_sample"
    [entry] = [each for each in imported(f"{sampled}=True").entries if each.key == sampled]
    assert entry.group == "ignored"
    assert "greedy, because the temperature is 0" in entry.note


def test_all_refused_keys_are_shown_at_once_and_left_out_as_comments(tmp_path: Path):
    result = imported(f"{ACTOR}megatron.pipeline_model_parallel_size=2", "data.video_key=videos")
    assert len(result.refused()) == 2
    text = recipe_text(result, "x")
    assert text.count("# Left out, refused: ") == 2
    assert config_of(result, tmp_path).rollout.n == 4
    assert "Refused (2)" in table_text(result, 120)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.train_batchsize=3", "unknown key of verl 'data.train_batchsize': did you mean data.train_batch_size?"),
        ("rollout.tensor_model_parallel_size=3", "did you mean actor_rollout_ref.rollout.tensor_model_parallel_size?"),
        ("data.train_batch_size=many", "data.train_batch_size='many' must be a whole number"),
        ("data.train_batch_size=2.5", "data.train_batch_size=2.5 must be a whole number"),
        ("data.shuffle=1", "data.shuffle=1 must be true or false"),
        (f"{ACTOR}loss_agg_mode=mean", "token-mean"),
        (f"{ACTOR}kl_loss_type=k4", "low_var_kl"),
        ("custom_reward_function.path=a.py reward.custom_reward_function.path=b.py", "are one setting"),
        ("~data.train_batch_size", "deletes a setting"),
        ("trainer.experiment_name='${no.key}'", "no.key is not set"),
    ],
)
def test_an_unknown_key_or_an_illegal_value_is_an_error(override: str, message: str):
    with pytest.raises(ConfigError) as error:
        imported(*override.split(" "))
    assert message in str(error.value)


@pytest.mark.parametrize(
    "key",
    [
        "data.train_batch_size",
        "algorithm.adv_estimator",
        "trainer.resume_mode",
        f"{ACTOR}ppo_epochs",
        f"{ACTOR}policy_loss.loss_mode",
        f"{ACTOR}optim.lr_warmup_steps_ratio",
        "actor_rollout_ref.model.path",
    ],
)
def test_null_is_an_error_that_names_the_default(key: str):
    with pytest.raises(ConfigError) as error:
        imported(f"{key}=null")
    default = ROWS[key].default
    assert f"{key}=null: verl needs a value; leave the key out for the default {default!r}" in str(error.value)


def test_all_unknown_keys_are_named_at_once():
    with pytest.raises(ConfigError) as error:
        imported("data.one=1", "trainer.two=2")
    assert "data.one" in str(error.value)
    assert "trainer.two" in str(error.value)


def test_a_config_that_a_script_names_is_read_where_it_is(tmp_path: Path):
    script = tmp_path / "run.sh"
    script.write_text("python3 -m verl.trainer.main_ppo --config-path=. --config-name=mine data.seed=3\n")
    with pytest.raises(ConfigError, match=r"there is no mine.yaml here"):
        read_verl(str(script), [], {})
    (tmp_path / "mine.yaml").write_text("data:\n  seed: 1\n  max_prompt_length: 100\n")
    assert read_verl(str(script), [], {})[0].given == {"data.seed": 3, "data.max_prompt_length": 100}
    script.write_text("python3 -m verl.trainer.main_ppo --config-name=$NAME\n")
    with pytest.raises(ConfigError, match=r"line 1: the variable NAME is not set"):
        read_verl(str(script), [], {})
    script.write_text("python3 -m verl.trainer.main_ppo --config-name ppo_megatron_trainer data.seed=3\n")
    assert read_verl(str(script), [], {})[0].given["model_engine"] == "megatron"


def test_an_unknown_piece_of_a_name_is_left_out_and_of_a_setting_an_error(tmp_path: Path):
    script = tmp_path / "run.sh"
    command = "python3 -m verl.trainer.main_ppo trainer.experiment_name=qwen-$(date +%F) data.seed=$(date +%s)\n"
    script.write_text(command)
    with pytest.raises(
        ConfigError, match=r"data.seed='\?' is not known: run.sh, line 1: \$\(date \+%s\) is the output"
    ):
        read_verl(str(script), [], {})
    settings, notices = read_verl(str(script), ["data.seed=3"], {})
    assert settings.given == {"trainer.experiment_name": "qwen", "data.seed": 3}
    assert any("trainer.experiment_name: run.sh, line 1" in notice for notice in notices)


@pytest.mark.parametrize(
    "setting",
    [
        'data.train_batch_size="[[$DATA]]"',
        'reward.custom_reward_function.reward_kwargs="{a: {b: $DATA}}"',
        'reward.custom_reward_function.reward_kwargs="{$DATA: 1}"',
    ],
)
def test_an_unknown_piece_within_a_list_or_a_mapping_is_an_error(setting: str, tmp_path: Path):
    script = tmp_path / "run.sh"
    script.write_text(f"python3 -m verl.trainer.main_ppo {setting}\n")
    with pytest.raises(ConfigError, match=r"is not known: run.sh, line 1: the variable DATA is not set"):
        read_verl(str(script), [], {})


def test_a_path_with_a_variable_that_is_not_set_is_read_when_the_recipe_runs(tmp_path: Path):
    script = tmp_path / "run.sh"
    script.write_text(
        "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=$ROOT/model "
        "data.train_files=\"['$ROOT/a.parquet','/b.parquet']\"\n"
    )
    settings, notices = read_verl(str(script), [], {})
    assert settings.given == {
        "actor_rollout_ref.model.path": "${oc.env:ROOT}/model",
        "data.train_files": ["${oc.env:ROOT}/a.parquet", "/b.parquet"],
    }
    assert notices == [
        f"{key}: run.sh, line 1: the variable ROOT is not set here; the recipe reads it when it runs, unless "
        "--set NAME=VALUE says it"
        for key in settings.given
    ]
    assert read_verl(str(script), [], {}, {"ROOT": "/r"})[0].given["actor_rollout_ref.model.path"] == "/r/model"


def test_a_number_of_devices_that_a_program_prints_is_left_out(tmp_path: Path):
    script = tmp_path / "run.sh"
    arguments = ["actor_rollout_ref.actor.ppo_micro_batch_size=32", "actor_rollout_ref.actor.strategy=fsdp"]
    script.write_text(
        "python3 -m verl.trainer.main_ppo trainer.n_gpus_per_node=$(nvidia-smi -L | wc -l) trainer.nnodes=2 "
        f"data.seed=3 {' '.join(arguments)}\n"
    )
    settings, notices = read_verl(str(script), [], {})
    assert settings.given.keys() == {"data.seed", "trainer.nnodes", *(each.partition("=")[0] for each in arguments)}
    assert "trainer.n_gpus_per_node: run.sh, line 1: $(nvidia-smi -L | wc -l) is the output of a program" in notices[0]
    imported = import_verl(settings)
    assert imported.launch is not None
    assert (imported.launch.processes, imported.launch.command()) == (None, "hwgrpo launch RECIPE --nodes 2")
    assert not {"trainer.tokens_per_micro_batch", "trainer.strategy"} & imported.settings.keys()
    notes = {each.key: each.note for each in imported.entries}
    assert all(
        "whose number is not known" in notes[key] or "number of devices is not known" in notes[key]
        for key in (each.partition("=")[0] for each in arguments)
    )


def test_keys_that_are_added_are_listed_and_others_refused(tmp_path: Path):
    imported = import_verl(read_verl(None, ["+my.own={a: 1}", "+data.shufle=true", "data.seed=3"], {})[0])
    lines = {each.key: (each.group, each.note) for each in imported.entries}
    assert lines["+my.own.a"] == ("unread", "verl's config has no such key")
    assert lines["+data.shufle"] == ("unread", "verl's config has no such key; did you mean data.shuffle?")
    assert lines["data.seed"][0] != "unread"
    with pytest.raises(ConfigError, match=r"unknown key of verl 'data.shufle': did you mean data.shuffle\?"):
        read_verl(None, ["data.shufle=true"], {})


@pytest.mark.parametrize(
    ("override", "given", "notice"),
    [
        ("actor@actor_rollout_ref.actor=mlite_actor", {"model_engine": "mlite"}, ""),
        ("ref@actor_rollout_ref.ref=mlite_ref", {}, "the reference has the engine of the actor"),
        ("+critic@critic=dp_critic", {}, "there is no critic here"),
        ("~critic@critic", {}, "left out: ~critic@critic, there is no critic here"),
    ],
)
def test_a_group_of_hydra_is_read_by_what_it_decides(override: str, given: dict, notice: str):
    settings, notices = read_verl(None, [override], {})
    assert settings.given == given
    assert notice in "".join(notices)
    with pytest.raises(ConfigError, match=r"data@data='other' chooses a part of verl's config"):
        read_verl(None, ["data@data=other"], {})
    with pytest.raises(ConfigError, match=r"actor='foo_actor' chooses .* \(verl's are dp_actor, megatron_actor, "):
        read_verl(None, ["actor@actor_rollout_ref.actor=foo_actor"], {})
    with pytest.raises(ConfigError, match=r"~actor@actor_rollout_ref.actor deletes a part of verl's config"):
        read_verl(None, ["~actor@actor_rollout_ref.actor"], {})
    with pytest.raises(ConfigError, match="model_engine='foo' is not known; choose one of: dp, "):
        read_verl(None, ["model_engine=foo"], {})


@pytest.mark.parametrize("entry", [*MODULES, "recipe/entropy/main_entropy.py"])
def test_entry_points_whose_settings_are_those_of_main_ppo_are_read(entry: str, tmp_path: Path):
    script = tmp_path / "run.sh"
    script.write_text(f"python3 {'' if entry.endswith('.py') else '-m '}{entry} data.seed=3\n")
    assert read_verl(str(script), [], {})[0].given == {"data.seed": 3}


def test_another_entry_point_is_read_if_one_asks_for_it(tmp_path: Path):
    script = tmp_path / "run.sh"
    script.write_text("python3 -m recipe.spin.main_spin data.seed=3\n")
    with pytest.raises(ConfigError, match=r"recipe.spin.main_spin is no entry point .*--entry main_ppo"):
        read_verl(str(script), [], {})
    assert read_verl(str(script), [], {}, any_entry=True)[0].given == {"data.seed": 3}


def test_a_rate_of_dropout_that_is_0_is_a_note_and_another_is_refused():
    key = "actor_rollout_ref.model.override_config.attention_dropout"
    for value, kind in ((0.0, "ignored"), (0, "ignored"), (0.1, "refused")):
        (entry,) = [
            each for each in import_verl(read_verl(None, [f"+{key}={value}"], {})[0]).entries if each.key == key
        ]
        assert entry.group == kind


def test_a_mapping_that_is_none_is_an_error_that_says_so():
    with pytest.raises(ConfigError, match=r"data.apply_chat_template_kwargs='other' must be a mapping"):
        read_verl(None, ["data.apply_chat_template_kwargs=other"], {})


def test_a_resolved_file_of_hydra_is_read(tmp_path: Path):
    file = tmp_path / "config.yaml"
    file.write_text(
        "data:\n  train_files: a.parquet\n  video_key: videos\n  train_batch_size: 256\n"
        "actor_rollout_ref:\n  model: {path: Qwen/Qwen2-7B}\n  rollout: {n: 4, name: '???', val_kwargs: {n: 1}}\n"
        "  actor:\n    ppo_mini_batch_size: ${data.train_batch_size}\n"
        "    rollout_n: ${oc.select:actor_rollout_ref.rollout.n,1}\n"
        "    profiler: {tool: '${oc.select:global_profiler.tool,null}'}\n"
        "algorithm:\n  adv_estimator: grpo\nreward_model: {reward_manager: naive}\nreward_manager: {name: naive}\n"
    )
    given = read_resolved(file.read_text(), "x")
    settings, _ = read_verl(str(file), ["actor_rollout_ref.rollout.n=8"], {})
    result = import_verl(settings)
    assert result.refused() == []
    assert config_of(result, tmp_path).rollout.n == 8
    listed = [each.key for each in result.entries if each.group != "default"]
    assert len(listed) == len(set(listed))
    assert {*given} - {*listed} == {"data.video_key", "actor_rollout_ref.rollout.name"}


SCRIPT = "ENGINE=${1:-vllm}\npython3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\\n"
SCRIPT += '  actor_rollout_ref.rollout.name=$ENGINE actor_rollout_ref.rollout.n=4 "$@"\n'


def test_an_argument_of_a_script_that_is_no_setting_is_left_out_of_its_command(tmp_path: Path):
    file = tmp_path / "run.sh"
    file.write_text(SCRIPT)
    settings, notices = read_verl(str(file), ["sglang", "trainer.save_freq=5"], {})
    assert (settings["actor_rollout_ref.rollout.name"], settings["trainer.save_freq"]) == ("sglang", 5)
    assert "left out: sglang, which is no setting; Hydra would refuse it" in notices


def test_a_setting_that_a_script_takes_for_its_first_argument_is_refused(tmp_path: Path):
    file = tmp_path / "run.sh"
    file.write_text(SCRIPT)
    with pytest.raises(ConfigError, match=r"rollout.name=trainer.save_freq=5: the script has its first arguments as"):
        read_verl(str(file), ["trainer.save_freq=5"], {})


def test_a_setting_is_not_the_value_of_a_script_s_first_argument(tmp_path: Path):
    script = tmp_path / "run.sh"
    script.write_text("python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=$1")
    path = "builtin://tiny?task=sort"
    assert read_verl(str(script), [path], {})[0].given == {"actor_rollout_ref.model.path": path}
    with pytest.raises(ConfigError, match=r"give these before trainer\.save_freq=1"):
        read_verl(str(script), ["trainer.save_freq=1"], {})
