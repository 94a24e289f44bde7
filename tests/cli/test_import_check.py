"""What `hwgrpo import` checks before it says that a recipe can be used, and its options for run scripts."""

import os
from pathlib import Path

import pytest

from hwgrpo.cli.main import main
from hwgrpo.config import load_config
from hwgrpo.config.validate import missing_loggers
from hwgrpo.errors import ConfigError

SCRIPT = "D=$(hostname)\npython3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=$D/a.parquet"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    before = dict(os.environ)
    yield
    os.environ.clear()  # launch --dry-run plans as torchrun's processes would
    os.environ.update(before)


def test_a_recipe_that_a_run_refuses_is_not_written(capsys):
    settings = ["algorithm.adv_estimator=grpo", "algorithm.filter_groups.enable=True", "actor_rollout_ref.rollout.n=1"]
    assert main(["import", "verl", *settings, "--output", "recipe.yaml"]) == 2
    assert (
        "verl's settings make a recipe that a run refuses: algorithm.filter_groups.enable=true"
        in capsys.readouterr().err
    )
    assert not Path("recipe.yaml").exists()


def test_files_and_packages_that_are_not_here_do_not_end_an_import(capsys):
    settings = [
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.model.path=/not/here",
        "actor_rollout_ref.rollout.n=8",
    ]
    settings += ["data.train_files=/not/a.parquet", "trainer.logger=[console,swanlab]"]
    settings += ["reward.custom_reward_function.path=/not/score.py", "reward.custom_reward_function.name=score"]
    assert main(["import", "verl", *settings, "--output", "recipe.yaml"]) == 0, capsys.readouterr().err
    with pytest.raises(ConfigError, match="there is no such folder"):
        load_config("recipe.yaml")


def test_a_variable_of_a_script_is_what_set_says(capsys):
    Path("run.sh").write_text(SCRIPT)
    assert main(["import", "verl", "run.sh"]) == 2
    assert "or the variables of the script as --set NAME=VALUE" in capsys.readouterr().err
    assert main(["import", "verl", "run.sh", "--set", "D=/data"]) == 0
    assert "train: /data/a.parquet" in capsys.readouterr().out.replace('"', "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verl", "a.b=1", "--set", "D"], "--set 'D': write NAME=VALUE"),
        (["verl", "a.b=1", "--set", "a.b=1"], "--set 'a.b=1': write NAME=VALUE"),
        (
            ["verl", "a.b=1", "--set", "optim.lr=1"],
            "settings of hwgrpo follow the recipe: hwgrpo launch RECIPE key=value",
        ),
        (["trl", "a=1", "--set", "D=1"], "is for the variables of a run script, which trl has none of"),
        (["verl", "a.b=1", "--set", "D=1"], "is for the variables of a run script, and none is named"),
        (["verl", "~trainer.total_epochs", "data.seed=1"], "~trainer.total_epochs deletes a setting of verl"),
        (["verl", "~/run.sh"], "/run.sh."),
    ],
)
def test_arguments_that_cannot_be_read_are_an_error(arguments: list[str], message: str, capsys):
    assert main(["import", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_another_entry_point_is_read_as_main_ppo_if_one_asks_for_it(capsys):
    Path("run.sh").write_text("python3 -m recipe.spin.main_spin algorithm.adv_estimator=grpo trainer.total_epochs=3")
    assert main(["import", "verl", "run.sh"]) == 2
    assert "with --entry main_ppo they are read as its settings" in capsys.readouterr().err
    assert main(["import", "verl", "run.sh", "--entry", "main_ppo"]) == 0
    assert "epochs: 3" in capsys.readouterr().out


DOORS = [["import", "verl"], ["train", "--print-config", "--from", "verl"], ["launch", "--print", "--from", "verl"]]


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door[0])
def test_every_command_reads_a_script_with_the_same_options(door: list[str], capsys):
    Path("run.sh").write_text(
        "N=$(nproc)\npython3 -m recipe.spin.main_spin algorithm.adv_estimator=grpo data.train_files=task://sort "
        "actor_rollout_ref.model.path='builtin://tiny?task=sort' actor_rollout_ref.rollout.n=$N "
        "trainer.n_gpus_per_node=1 data.train_batch_size=4 actor_rollout_ref.actor.ppo_mini_batch_size=4"
    )
    own = [] if door[0] == "import" else ["--set", "reward.functions=[exact_match]"]
    assert main([*door, "run.sh", *own]) == 2
    assert "with --entry main_ppo they are read as its settings" in capsys.readouterr().err
    assert main([*door, "run.sh", *own, "--entry", "main_ppo"]) == 2
    assert "or the variables of the script as --set NAME=VALUE" in capsys.readouterr().err
    options = ["--set", "N=4", *own, "--entry", "main_ppo"]
    assert main([*door, "run.sh", *options]) == 0
    shown = capsys.readouterr()
    assert "rollout.n=4" in shown.err
    assert door[0] != "launch" or "--set N=4 --set 'reward.functions=[exact_match]' --entry main_ppo" in shown.out


def test_a_logger_that_is_not_installed_stops_a_run_and_no_dry_run(capsys, monkeypatch):
    monkeypatch.setattr("hwgrpo.config.validate.SERVICES", ("swanlab",))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    chosen = ["observe.loggers=[jsonl,swanlab]", "model.path=builtin://tiny?task=sort", "data.train=task://sort"]
    chosen.append("reward.functions=[exact_match]")
    config = load_config(None, chosen, data_may_be_missing=True)
    assert len(missing_loggers(config)) == 1
    with pytest.raises(ConfigError, match="'swanlab', but its package is not installed"):
        load_config(None, chosen)


VERL = """python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=task://sort \\
    actor_rollout_ref.model.path='builtin://tiny?task=sort' data.train_batch_size=32 trainer.n_gpus_per_node=4 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=16 actor_rollout_ref.rollout.n=4 trainer.device=cpu "$@"
"""


def test_launch_from_starts_what_the_script_would(capsys):
    Path("run.sh").write_text(VERL.replace('"$@"', "trainer.nnodes=2"))
    own = ["--set", "reward.functions=[exact_match]", "--set", "trainer.max_steps=2"]
    assert main(["launch", "--from", "verl", "run.sh", *own, "--rendezvous", "host"]) == 0
    command = capsys.readouterr().out.splitlines()[-1]
    assert "--nproc-per-node=4" in command or "--nproc-per-node 4" in command, command
    assert "--nnodes=2" in command or "--nnodes 2" in command, command
    own = "--set 'reward.functions=[exact_match]' --set trainer.max_steps=2"
    assert command.endswith(f"train run.sh --from verl {own}"), command


def test_launch_from_takes_another_number_of_processes(capsys):
    Path("run.sh").write_text(VERL)
    own = ["--set", "reward.functions=[exact_match]"]
    assert main(["launch", "--from", "verl", "run.sh", *own, "--devices", "2", "--dry-run"]) == 0
    assert "2 processes" in capsys.readouterr().out
    assert main(["launch", "sft", "run.sh", "--from", "verl"]) == 2
    assert "--from is an option of `hwgrpo launch train`, not of sft" in capsys.readouterr().err
    assert main(["launch", "tiny_sort", "--set", "optim.lr=1"]) == 2
    assert "--set is for --from" in capsys.readouterr().err


def test_train_from_says_that_it_starts_one_process_of_several(capsys):
    Path("run.sh").write_text(VERL)
    own = ["--set", "reward.functions=[exact_match]"]
    assert main(["train", "--from", "verl", "run.sh", *own, "--dry-run"]) == 0
    assert (
        "the settings are those of 4 processes, and this is one; `hwgrpo launch run.sh --from verl --set "
        "'reward.functions=[exact_match]'` starts them"
    ) in capsys.readouterr().err
    assert main(["train", "--from", "verl", "run.sh", "trainer.n_gpus_per_node=1", *own, "--dry-run"]) == 0
    assert "this is one" not in capsys.readouterr().err


def test_a_number_of_devices_that_is_not_known_is_not_verls_default(capsys):
    Path("run.sh").write_text(VERL.replace("n_gpus_per_node=4", "n_gpus_per_node=$(nvidia-smi -L | wc -l)"))
    own = ["--set", "reward.functions=[exact_match]"]
    assert main(["launch", "--from", "verl", "run.sh", *own, "--print"]) == 0
    assert "nproc-per-node" not in capsys.readouterr().out  # all of this host: one CPU
    assert main(["train", "--from", "verl", "run.sh", *own, "--dry-run"]) == 0
    assert "processes, and this is one" not in capsys.readouterr().err
    assert main(["import", "verl", "run.sh", "--output", "recipe.yaml"]) == 0
    assert "wrote recipe.yaml: hwgrpo launch recipe.yaml\n" in capsys.readouterr().err
    assert "--devices" not in Path("recipe.yaml").read_text()
    assert main(["launch", "--from", "verl", "run.sh", "trainer.nnodes=2", *own, "--rendezvous", "host"]) == 0
    assert "--nnodes 2" in capsys.readouterr().out


def test_set_says_which_variable_the_script_does_not_have(capsys):
    Path("run.sh").write_text(SCRIPT)
    assert main(["import", "verl", "run.sh", "--set", "D=/data", "--set", "DATA=/data"]) == 0
    shown = capsys.readouterr().err
    assert "left out: --set DATA, since the script has no such variable" in shown
    assert "--set D," not in shown


def test_launch_starts_no_script_of_standard_input(capsys):
    assert main(["launch", "--from", "verl", "-"]) == 2
    assert "write it to a file, and name it" in capsys.readouterr().err
