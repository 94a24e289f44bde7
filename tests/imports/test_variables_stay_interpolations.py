"""Values of environment variables are in nothing that imports and exports print or write: interpolations are."""

from pathlib import Path

import pytest
import yaml

from hwgrpo.cli.main import main
from hwgrpo.config import load_config
from hwgrpo.imports.shell_script import read_script
from hwgrpo.imports.variable_text import VariableText, joined, known

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
    "roll": (
        "roll",
        "run.yaml",
        "response_length: 64\nexp_name: ${oc.env:LEAK_WORD}\n"
        "logging_dir: ${oc.env:LEAK_DATA}/logs\n"
        "some_other_key: ${oc.env:LEAK_TOKEN}\n"
        "pretrain: ${oc.env:LEAK_MODEL}\n",
    ),
    "nemo-rl": (
        "nemo-rl",
        "run.yaml",
        "policy: {model_name: '${oc.env:LEAK_MODEL}'}\n"
        "logger: {log_dir: '${oc.env:LEAK_DATA}', a: '${oc.env:LEAK_KEY}'}\n"
        "grpo: {num_prompts_per_step: '${oc.env:LEAK_N}', other: ['${oc.env:LEAK_TOKEN}', '${policy.model_name}-x']}\n",
    ),
    "openrlhf": (
        "openrlhf",
        "run.sh",
        "python3 -m openrlhf.cli.train_ppo_ray --data.prompt_dataset $LEAK_DATA/a,$LEAK_DATA/b "
        "--actor.model_name_or_path $LEAK_MODEL --logger.wandb.run_name $LEAK_WORD --x.y $LEAK_TOKEN "
        "--rollout.n_samples_per_prompt 8\n",
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


RECIPE = {
    "model": {"path": "${oc.env:LEAK_MODEL}", "revision": "${oc.env:LEAK_WORD}"},
    "data": {"train": "${oc.env:LEAK_DATA}/train.parquet", "system_prompt": "be ${oc.env:LEAK_WORD}"},
    "reward": {
        "functions": [
            {"name": "score.py:score", "kwargs": {"token": "${oc.env:LEAK_KEY}", "rest": "${oc.env:LEAK_UNSET}"}},
            {"name": "http", "kwargs": {"url": "http://here/x", "key": "${reward.functions.0.kwargs.token}-x"}},
        ]
    },
    "trainer": {"output_dir": "runs/${model.revision}", "prompts_per_step": "${oc.env:LEAK_N}"},
    "rollout": {"stop": ["${oc.env:LEAK_WORD}", "b"]},
}


@pytest.mark.parametrize("project", ["verl", "trl"])
def test_an_export_shows_no_value_of_a_variable(project, tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    assert main(["export", "--to", project, "recipe.yaml"]) == 0
    assert main(["export", "--to", project, "recipe.yaml", "--output", "file"]) == 0
    out, err = capsys.readouterr()
    written = (tmp_path / "file").read_text()
    assert nothing_leaks(out + written + err), out + err
    assert "${oc.env:LEAK_MODEL}" in written
    assert "64" in written


def test_an_exported_script_has_the_values_where_it_is_read_again(tmp_path):
    recipe = dict(RECIPE, reward={"functions": RECIPE["reward"]["functions"][:1]})
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert main(["export", "--to", "verl", "recipe.yaml", "--output", "run.sh"]) == 0
    text = (tmp_path / "run.sh").read_text()
    assert 'reward_kwargs.token="${oc.env:LEAK_KEY}"' in text
    assert main(["import", "verl", "run.sh", "--drop-refused", "--output", "again.yaml"]) == 2  # LEAK_UNSET
    (tmp_path / "run.sh").write_text("".join(line for line in text.splitlines(True) if "LEAK_UNSET" not in line))
    assert main(["import", "verl", "run.sh", "--drop-refused", "--output", "again.yaml"]) == 0
    config = load_config("again.yaml", data_may_be_missing=True)
    assert config.model.path == VALUES["LEAK_MODEL"]
    assert config.data.train == "/hidden/folder/train.parquet"
    assert config.trainer.output_dir == "runs/hiddenword"
    assert config.reward.functions[0].kwargs["token"] == VALUES["LEAK_KEY"]


def test_a_text_with_variables_keeps_what_it_is_in_pieces():
    text = VariableText("${oc.env:A,x,y}/b,c", "1/b,c")
    assert [known(each) for each in VariableText("${oc.env:A}/b,c", "1/b,c").split(",")] == ["1/b", "c"]
    assert text.split(",") == [text]
    assert known(joined("a/", text, ":", 3)) == "a/1/b,c:3"
    assert VariableText("${oc.env:F}", "f.py:g").rpartition(":") == ("", "", "${oc.env:F}")
    assert VariableText("${oc.env:F}/f.py:g", "d/f.py:g").rpartition(":") == ("${oc.env:F}/f.py", ":", "g")


def test_words_of_a_variable_are_arguments_unless_it_may_be_a_secret():
    script = f"{VERL} a.b=$X"
    passed = read_script(script, "run.sh", [], {"X": "/a/b c/d"})
    assert passed.arguments[-2:] == ["a.b=/a/b", "c/d"]
    hidden = read_script(script, "run.sh", [], {"X": "two words"})
    assert hidden.reasons(hidden.marked[-1]) == ["run.sh, line 1: it is made of the variable X, which may be a secret"]


def exported(project: str, capsys, **sections) -> str:
    """Return what an export of a recipe writes."""
    base = {
        "model": {"path": "org/model"},
        "data": {"train": "train.parquet"},
        "reward": {"functions": ["score.py:score"]},
    }
    Path("recipe.yaml").write_text(yaml.safe_dump({**base, **sections}))
    assert main(["export", "--to", project, "recipe.yaml"]) == 0
    return "".join(capsys.readouterr())


@pytest.mark.parametrize("project", ["verl", "trl"])
def test_an_export_shows_no_value_of_a_mapping_or_list_that_refers_to_another(project, capsys):
    first = {"headers": {"a": "${oc.env:LEAK_TOKEN}", "b": "plain"}, "words": ["${oc.env:LEAK_WORD}", 1]}
    second = {
        "url": "http://here/x",
        "headers": "${reward.functions.0.kwargs.headers}",
        "words": "${reward.functions.0.kwargs.words}",
        "inner": "${reward.functions.1.kwargs.headers.a}",
    }
    functions = [{"name": "score.py:score", "kwargs": first}, {"name": "http", "kwargs": second}]
    text = exported(project, capsys, reward={"functions": functions})
    assert nothing_leaks(text), text
    assert "headers: {a: ${oc.env:LEAK_TOKEN}, b: plain}, inner: ${" in text
    assert "words: [${oc.env:LEAK_WORD}, 1]}}]" in text
    server = {"engine": "vllm_server", "server": {"env": {"HF_TOKEN": "${oc.env:LEAK_TOKEN}"}}}
    functions = [{"name": "score.py:score", "kwargs": "${rollout.server.env}"}]
    text = exported(project, capsys, rollout=server, reward={"functions": functions})
    assert nothing_leaks(text), text
    if project == "verl":
        assert 'reward_kwargs.HF_TOKEN="${oc.env:LEAK_TOKEN}"' in text


def test_a_word_of_a_variable_that_is_a_choice_is_exported_as_that_choice(monkeypatch, capsys):
    for name, value in {"RESUME": "never", "METRIC": "reward", "LOGGER": "jsonl", "REWARD": "by_source"}.items():
        monkeypatch.setenv(name, value)
    recipe = {
        "trainer": {"resume": "${oc.env:RESUME}"},
        "algorithm": {"filter_groups": {"enable": True, "metric": "${oc.env:METRIC}"}},
        "observe": {"loggers": ["${oc.env:LOGGER}"]},
        "reward": {"functions": ["${oc.env:REWARD}"]},
        "model": {"path": "org/model", "lora": {"rank": 8, "target_modules": ["${oc.env:TARGETS,all-linear}"]}},
    }
    text = exported("verl", capsys, **recipe)
    assert "trainer.resume_mode=disable" in text
    assert "filter_groups.metric=seq_reward" in text
    assert "trainer.logger=[console]" in text
    assert "target_modules" not in text
    assert "oc.env" not in text
    assert "resume_from_checkpoint" not in exported("trl", capsys, **recipe)
    monkeypatch.setenv("RESUME", "/some/folder")
    assert 'trainer.resume_from_path="${oc.env:RESUME}"' in exported("verl", capsys, **recipe)


def test_an_export_lists_each_lost_setting_once(monkeypatch, capsys):
    monkeypatch.setenv("COLUMN", "prompt")
    data = {"train": "train.parquet", "prompt_key": "${oc.env:COLUMN}", "system_prompt": "${oc.env:LEAK_WORD}"}
    text = exported("trl", capsys, data=data)
    lines = [line for line in text.splitlines() if "oc.env" in line]
    assert [line.partition(": ")[2].partition("}")[0] for line in lines] == [
        "data.system_prompt=${oc.env:LEAK_WORD",
        "data.prompt_key=${oc.env:COLUMN",
    ]
