"""Values of environment variables are in nothing that imports print or write: interpolations are."""

from pathlib import Path

import pytest
import yaml

from hwgrpo.cli.main import main
from hwgrpo.config import load_config
from hwgrpo.migrate.imports.shell_script import read_script
from hwgrpo.migrate.imports.variable_text import VariableText, joined, known

VALUES = {
    "LEAK_MODEL": "hidden-org/model-x",
    "LEAK_DATA": "/hidden/folder",
    "LEAK_WORD": "hiddenword",
    "LEAK_KEY": "hidden, key 'x'",
    "LEAK_TOKEN": "hf_hiddenhidden",
    "LEAK_N": "64",
}
VERL = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=train.parquet "


@pytest.fixture(autouse=True)
def _variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    for name, value in VALUES.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "score.py").write_text("def score(completions, **_):\n    return [0.0 for _ in completions]\n")


def nothing_leaks(text: str) -> bool:
    return "hidden" not in text.lower()


PATH, FUNCTION = "actor_rollout_ref.model.path", "custom_reward_function."
IMPORTS = {
    "verl, a script's variables": (
        "verl",
        "run.sh",
        f'D=$LEAK_DATA/sets\nif [ -z "$LEAK_TOKEN" ]; then exit 1; fi\nexport T=$LEAK_TOKEN\n'
        f"{VERL} data.val_files=\"['$D/a','b']\" {PATH}=$LEAK_MODEL trainer.project_name=\"p-$LEAK_WORD\" "
        f"data.train_batch_size=$LEAK_N actor_rollout_ref.actor.ppo_mini_batch_size=$((LEAK_N / 2)) "
        f'{FUNCTION}path=score.py {FUNCTION}name=score +{FUNCTION}reward_kwargs.key="$LEAK_KEY" '
        f"+{FUNCTION}reward_kwargs.token=$T trainer.experiment_name=${{LEAK_WORD:-x}}\n",
    ),
    "verl, interpolations": (
        "verl",
        "run.sh",
        f"{VERL} {PATH}='${{oc.env:LEAK_MODEL}}' trainer.experiment_name='x-${{.project_name}}' "
        "trainer.project_name='${oc.env:LEAK_WORD,none}' data.train_batch_size='${oc.env:LEAK_N}' "
        "actor_rollout_ref.actor.ppo_mini_batch_size=32\n",
    ),
    "verl, a YAML file": (
        "verl",
        "run.yaml",
        "actor_rollout_ref: {model: {path: '${oc.env:LEAK_MODEL}'}}\n"
        "algorithm: {adv_estimator: grpo}\n"
        "actor_rollout_ref.actor.ppo_mini_batch_size: 32\n"
        "trainer: {project_name: '${oc.env:LEAK_WORD}', default_local_dir: '${oc.env:LEAK_DATA}/runs'}\n"
        "data: {train_files: ['${oc.env:LEAK_DATA}/a', b], train_batch_size: '${oc.env:LEAK_N}'}\n"
        "ray_kwargs: {a: '${oc.env:LEAK_TOKEN}', b: '${actor_rollout_ref.model.path}-x'}\n",
    ),
}


@pytest.mark.parametrize("case", IMPORTS)
def test_an_import_shows_no_value_of_a_variable(case, tmp_path, capsys):
    system, name, text = IMPORTS[case]
    (tmp_path / name).write_text(text)
    main(["import", system, name, "--drop-refused", "--output", "recipe.yaml"])
    out, err = capsys.readouterr()
    recipe = (tmp_path / "recipe.yaml").read_text() if (tmp_path / "recipe.yaml").exists() else ""
    assert nothing_leaks(out + err + recipe), out + err + recipe
    assert "${oc.env:LEAK_" in err
    assert 'path: "${oc.env:LEAK_MODEL}"' in recipe, err


def test_the_recipe_of_an_import_has_the_values_once_it_is_loaded(tmp_path):
    (tmp_path / "run.sh").write_text(IMPORTS["verl, a script's variables"][2])
    assert main(["import", "verl", "run.sh", "--output", "recipe.yaml"]) == 0
    config = load_config("recipe.yaml", data_may_be_missing=True)
    assert config.model.path == VALUES["LEAK_MODEL"]
    assert config.data.validation == ["/hidden/folder/sets/a", "b"]
    assert config.reward.functions[0].kwargs == {"key": VALUES["LEAK_KEY"], "token": VALUES["LEAK_TOKEN"]}
    assert (config.trainer.prompts_per_step, config.trainer.prompts_per_update) == (64, 32)
    assert config.trainer.output_dir == "checkpoints/p-hiddenword/hiddenword"


@pytest.mark.parametrize(
    "setting",
    [
        "data.train_batch_size=$LEAK_WORD",
        "algorithm.adv_estimator=$LEAK_WORD",
        "algorithm.rollout_correction.rollout_is_threshold=$LEAK_WORD",
        "trainer.nnodes=$((LEAK_WORD))",
        "trainer.experiment_name=${LEAK_TOKEN#hf} trainer.nnodes=${LEAK_TOKEN:3}",
        "trainer.nnodes=${#LEAK_KEY}",
        "$LEAK_TOKEN=1",
        "a.$LEAK_WORD=1",
        "--config-name=$LEAK_WORD --config-path=$LEAK_DATA",
        "$LEAK_WORD",
        "data.train_batch_size='${oc.env:LEAK_WORD}' trainer.nnodes='${${oc.env:LEAK_WORD}}'",
        "trainer.nnodes='${trainer.${oc.env:LEAK_WORD}}'",
        "trainer.nnodes='${x:${oc.env:LEAK_WORD}}'",
    ],
)
def test_an_error_shows_no_value_of_a_variable(setting, tmp_path, capsys):
    (tmp_path / "run.sh").write_text(f"{VERL} {setting}\n")
    main(["import", "verl", "run.sh"])
    out, err = capsys.readouterr()
    assert nothing_leaks(out + err), out + err
    assert "LEAK_" in err or "${" in err or "trainer.n_gpus_per_node" in err


def test_a_condition_reads_variables_but_tries_no_pattern_on_what_may_be_a_secret():
    lines = {
        '[ -n "$LEAK_TOKEN" ] && a=1': "1",
        '[ "$LEAK_WORD" = hiddenword ] && a=1': "1",
        "[[ $LEAK_TOKEN == hf_h* ]] && a=1": None,
        "[[ $LEAK_DATA == /hid* ]] && a=1": "1",
        "a=$(basename $LEAK_DATA)": "folder",
        "a=${LEAK_WORD:0:3}": None,
        "a=${LEAK_DATA##*/}": "folder",
    }
    for line, expected in lines.items():
        command = read_script(f"a=2\n{line}\n{VERL} a.b=$a", "run.sh", [], VALUES)
        passed = command.marked[-1]
        assert (None if command.reasons(passed) else passed.removeprefix("a.b=")) == expected, line


def test_a_text_with_variables_keeps_what_it_is_in_pieces():
    text = VariableText("${oc.env:A,x,y}/b,c", "1/b,c")
    assert known(joined("a/", text, ":", 3)) == "a/1/b,c:3"
    assert VariableText("${oc.env:F}", "f.py:g").rpartition(":") == ("", "", "${oc.env:F}")
    assert VariableText("${oc.env:F}/f.py:g", "d/f.py:g").rpartition(":") == ("${oc.env:F}/f.py", ":", "g")


def test_words_of_a_variable_are_arguments_unless_it_may_be_a_secret():
    script = f"{VERL} a.b=$X"
    passed = read_script(script, "run.sh", [], {"X": "/a/b c/d"})
    assert passed.arguments[-2:] == ["a.b=/a/b", "c/d"]
    hidden = read_script(script, "run.sh", [], {"X": "two words"})
    assert hidden.reasons(hidden.marked[-1]) == ["run.sh, line 1: it is made of the variable X, which may be a secret"]


def imported(monkeypatch, capsys, line: str, **variables: str) -> tuple[dict, str]:
    """Return the recipe of a script whose command has further arguments, and what its import prints."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    Path("run.sh").write_text(f"{VERL} {line}\n")
    Path("recipe.yaml").unlink(missing_ok=True)
    main(["import", "verl", "run.sh", "--drop-refused", "--output", "recipe.yaml"])
    printed = "".join(capsys.readouterr())
    written = Path("recipe.yaml").read_text() if Path("recipe.yaml").exists() else ""
    assert not any("\ud800" <= character <= "\udfff" for character in printed), ascii(printed)
    assert "\\ud80" not in printed
    return yaml.safe_load(written) or {}, printed + written


KWARGS = f"+{FUNCTION}reward_kwargs"
SCORE = f"{FUNCTION}path=score.py {FUNCTION}name=score"


@pytest.mark.parametrize(
    ("line", "value", "name"),
    [
        (f"{SCORE} {KWARGS}=$KW", "{url:http://h/v1,api_key:abcHIDDEN}", "KW"),
        (f"{SCORE} {KWARGS}.a=[$KW]", "{url:http://h/v1,b:{'api_key':'abc/HIDDEN'}}", "KW"),
        (f"{SCORE} {KWARGS}.a=$KW", '{"x-api-key":"hidden/1"}', "KW"),
        (f"{SCORE} {KWARGS}.a=$KW", "[http://h/v1,abchidden0123456789]", "KW"),
        (f"{SCORE} {KWARGS}.a=$KW", "'abc/hidden text'", "KW"),
        (f"{SCORE} $KW", f"{KWARGS}.auth=wJalr/hidden {KWARGS}.url=http://h/v1", "KW"),
        (f"{SCORE} $KW", f"{KWARGS}.auth=wJalr/hidden", "KW"),
    ],
)
def test_a_structure_with_a_secret_is_refused_by_the_name_of_its_variable(line, value, name, monkeypatch, capsys):
    recipe, text = imported(monkeypatch, capsys, line, **{name: value})
    assert not recipe
    assert nothing_leaks(text), text
    assert f"${name}" in text or f"the variable {name}" in text


def test_settings_and_lists_without_a_secret_are_read(monkeypatch, capsys):
    extra = (
        "trainer.save_freq=5 trainer.test_freq=7 data.val_files=v.parquet "
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=9000"
    )
    recipe, text = imported(monkeypatch, capsys, "$EXTRA data.prompt_key=$K", EXTRA=extra, K="messages")
    assert recipe["trainer"]["save_every"] == 5, text
    assert recipe["trainer"]["validate_every"] == 7
    line = "actor_rollout_ref.model.lora_rank=8 actor_rollout_ref.model.target_modules=$M data.train_files=$FILES"
    variables = {"M": "[q_proj,v_proj]", "FILES": "['/a/x.parquet','b.parquet']"}
    recipe, text = imported(monkeypatch, capsys, line, **variables)
    assert recipe["model"]["lora"]["target_modules"] == ["q_proj", "v_proj"], text
    assert recipe["data"]["train"] == ["/a/x.parquet", "b.parquet"]


def test_a_message_shows_no_mark_of_what_is_unknown(monkeypatch, capsys):
    for line in ("trainer.nnodes=[$(date)", "-x$(date)", "data.train_batch_size={a:$(date)"):
        _, text = imported(monkeypatch, capsys, line)
        assert "date" in text or "..." in text


@pytest.mark.parametrize(
    ("value", "expected"),
    [("False", False), ("true", True), ("3", 3), ("0.5", 0.5), ("null", None), ("a/b", "${oc.env:T}")],
)
def test_truth_values_and_numbers_of_variables_stay_such_in_free_mappings(value, expected, monkeypatch, capsys):
    line = (
        f"{SCORE} {KWARGS}.a=$T {KWARGS}.listed=[x,$T] {KWARGS}.api_key=$MY_TOKEN "
        "+data.apply_chat_template_kwargs.enable_thinking=$T "
        "+actor_rollout_ref.rollout.engine_kwargs.vllm.seed=$T actor_rollout_ref.rollout.name=vllm"
    )
    recipe, text = imported(monkeypatch, capsys, line, T=value, MY_TOKEN="12345678")
    kwargs = {"a": expected, "listed": ["x", expected], "api_key": "${oc.env:MY_TOKEN}"}
    assert recipe["reward"]["functions"][0]["kwargs"] == kwargs, text
    assert recipe["data"]["chat_template_kwargs"] == {"enable_thinking": expected}
    assert recipe["rollout"]["engine_kwargs"] == {"seed": expected}


FILTER = "actor_rollout_ref.rollout.n=2 algorithm.filter_groups.enable=True algorithm.filter_groups.metric=$V"
LORA = "actor_rollout_ref.model.lora_rank=8 actor_rollout_ref.model.target_modules="


@pytest.mark.parametrize(
    ("line", "value", "key", "expected"),
    [
        (f"{LORA}$V", "all-linear", "model.lora.target_modules", None),
        (f"{LORA}$V", ".*(q|v)_proj", "model.lora.target_modules", ["re:${oc.env:V}"]),
        (f"{LORA}[$V]", "linear_proj", "model.lora.target_modules", ["o_proj"]),
        ("trainer.logger=$V", "wandb", "observe.loggers", ["jsonl", "wandb"]),
        ("trainer.logger=[console,$V]", "wandb", "observe.loggers", ["jsonl", "wandb"]),
        ("trainer.logger=$V", "[console,wandb]", "observe.loggers", ["jsonl", "wandb"]),
        (FILTER, "seq_final_reward", "algorithm.filter_groups.metric", None),
        (f"{SCORE} {FILTER}", "acc", "algorithm.filter_groups.metric", "${oc.env:V}"),
        (f"{FUNCTION}path=$V", "null", "reward.functions", [{"name": "by_source"}]),
    ],
)
def test_a_word_of_a_variable_that_is_a_choice_is_read_as_that_choice(line, value, key, expected, monkeypatch, capsys):
    recipe, text = imported(monkeypatch, capsys, line, V=value)
    for name in key.split("."):
        recipe = recipe.get(name) if isinstance(recipe, dict) else None
    assert recipe == expected, text
    assert "refused" not in text


def test_an_error_about_the_recipe_shows_no_value_of_a_variable(monkeypatch, capsys):
    monkeypatch.setenv("V", "~hidden-and-no-user/run")
    assert main(["import", "verl", "algorithm.adv_estimator=grpo", "trainer.default_local_dir=${oc.env:V}"]) == 2
    found = capsys.readouterr()
    assert "verl's settings make a recipe that a run refuses: trainer.output_dir='${oc.env:V}'" in found.err
    assert nothing_leaks(found.err + found.out)


def test_a_condition_tries_a_pattern_on_what_has_no_name_of_a_secret():
    line = '[[ "$MP" == Qwen3* ]] && a=1'
    command = read_script(f"a=2\n{line}\n{VERL} a.b=$a", "run.sh", [], {"MP": "Qwen3-8B-Base"})
    assert command.marked[-1] == "a.b=1"
