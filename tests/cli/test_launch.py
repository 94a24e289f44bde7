"""`hwgrpo launch`: the line that is printed is the one that runs, and counts that cannot be are refused."""

import os
import shlex
import subprocess
from pathlib import Path

import hwgrpo_backends
import pytest
from hwgrpo_backends import Decision, registry
from hwgrpo_backends.backend import Verdict
from hwgrpo_backends.facts import Facts
from hwgrpo_backends.selection import Choice

from hwgrpo.cli import launch
from hwgrpo.cli.main import main
from tests.support.runs import runs

TINY = [word for word in runs.SMALL if not word.startswith(("observe.", "reward.", "trainer.threads"))]


PATIENT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600"


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    monkeypatch.setattr(launch, "_tool", lambda name: name)
    for name in ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def printed(capsys, *words: str) -> list[str]:
    assert main(["launch", *words]) == 0
    return capsys.readouterr().out.splitlines()


def test_one_device_is_plain_training(capsys):
    assert printed(capsys, "tiny_sort", "optim.lr=1e-4") == ["hwgrpo train tiny_sort optim.lr=1e-4"]


def found(monkeypatch, devices: int, backend: str = "cuda") -> None:  # hw: any accelerator
    verdicts = {backend: Verdict(state="ok", reason="", devices=devices)}
    choice = Choice(registry.get(backend), Decision(requested="auto", selected=backend, verdicts=verdicts), Facts())
    monkeypatch.setattr(hwgrpo_backends, "choose", lambda name: choice)


def test_without_a_number_each_device_of_the_host_gets_a_process(capsys, monkeypatch):
    found(monkeypatch, 8)
    *_, line = printed(capsys, "tiny_sort")
    assert "--nproc-per-node 8 " in line
    assert printed(capsys, "tiny_sort", "--devices", "1") == ["hwgrpo train tiny_sort"]
    assert "--nproc-per-node 2 " in printed(capsys, "tiny_sort", "--visible", "0,1", "backend.name=cuda")[-1]
    assert "#SBATCH --gres=gpu:1" in printed(capsys, "tiny_sort", "--slurm", "backend.name=cuda"), "of another host"
    found(monkeypatch, 3)
    assert main(["launch", "tiny_sort"]) == 2
    told = capsys.readouterr().err
    assert "trainer.prompts_per_step=64 cannot be divided among 3 ranks" in told
    assert "hwgrpo launch --devices" in told


def test_devices_of_a_server_on_this_host_are_not_taken_without_being_asked(capsys, monkeypatch):
    found(monkeypatch, 8)
    server, variable = "rollout.engine=vllm_server", registry.get("cuda").visible_env  # hw: any accelerator
    own = f'rollout.server.env={{{variable}: "4,5,6,7"}}'
    for words in ((server, "rollout.sleep_mode=never"), (server, own)):
        assert main(["launch", "tiny_sort", *words]) == 2
        error = capsys.readouterr().err
        assert "starts a server on this host, and all 8 devices would train" in error
        assert f"e.g. --visible 0,1,2,3 '{own}'; with --devices 8 they are shared" in error
    for words in (
        ("--visible", "0,1,2,3", own, "backend.name=cuda"),
        ("--devices", "4"),
        (),  # a server on each device sleeps while the policy is trained
        ("rollout.server.url=http://a",),
    ):
        assert "torchrun" in printed(capsys, "tiny_sort", server, *words)[-1]
    monkeypatch.setenv(variable, "0,1,2,3")
    found(monkeypatch, 4)
    assert "--nproc-per-node 4" in printed(capsys, "tiny_sort", server, own)[-1]
    monkeypatch.delenv(variable)
    found(monkeypatch, 1)
    assert printed(capsys, "tiny_sort", server)[-1].startswith("hwgrpo train"), "one device is shared"


def test_a_command_is_printed_where_its_device_is_not_and_run_only_where_it_is(capsys):
    assert printed(capsys, "tiny_sort", "backend.name=npu") == ["hwgrpo train tiny_sort backend.name=npu"]
    assert main(["launch", "tiny_sort", "backend.name=npu", "--run"]) == 1
    assert "npu" in capsys.readouterr().err


def test_the_selected_backend_is_handed_on_to_the_processes(monkeypatch):
    found(monkeypatch, 2)
    started = []
    monkeypatch.setattr(os, "execv", lambda path, words: started.append(words))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    main(["launch", "tiny_sort", "--run", "--allow-finished"])
    assert started[0][-3:] == ["train", "tiny_sort", "--allow-finished"]
    assert os.environ["HWGRPO_BACKEND_SELECTED"] == "cuda"


@pytest.mark.parametrize("words", [("--devices", "2"), ("--devices", "2", "--run", "trainer.strategy=fsdp2")])
def test_a_plan_is_of_all_processes_and_starts_none(capsys, monkeypatch, words, tmp_path):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert main(["launch", "tiny_sort", *TINY, f"trainer.output_dir={tmp_path}/out", *words, "--dry-run"]) == 0
    shown = capsys.readouterr()
    strategy = "fsdp2" if "--run" in words else "ddp"
    assert shown.out.startswith(f"backend    cpu, 2 processes\nstrategy   {strategy}\n")
    assert "not ready here" not in shown.err


def test_several_devices_of_a_host_are_torchruns(capsys):
    profile, line = printed(capsys, "tiny_sort", "--devices", "4", "trainer.max_steps=3", "backend.name=cpu")
    assert profile == 'eval "$(hwgrpo env --backend cpu --shell)"'
    assert shlex.split(line) == [
        PATIENT,
        *("torchrun", "--nproc-per-node", "4", "--max-restarts", "3", "--standalone"),
        *("-m", "hwgrpo", "train", "tiny_sort", "trainer.max_steps=3", "backend.name=cpu"),
    ]


@pytest.mark.parametrize(("given", "endpoint"), [("node1", None), ("node1:4000", "node1:4000")])
def test_several_nodes_meet_where_they_are_told(capsys, given, endpoint):
    where, why, _, line = printed(capsys, "tiny_sort", "--nodes", "2", "--devices", "8", "--rendezvous", given)
    assert where == "# on each of the 2 nodes"
    assert "its own store" in why
    words = shlex.split(line)
    assert words[:3] == ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", PATIENT, "torchrun"]
    assert words[words.index("--nnodes") + 1] == "2"
    assert words[words.index("--nproc-per-node") + 1] == "8"
    found = words[words.index("--rdzv-endpoint") + 1]
    assert found == endpoint or (endpoint is None and int(found.removeprefix("node1:")) in launch.PORTS)
    assert "--standalone" not in words


@pytest.mark.parametrize(("name", "first"), [("npu", "HCCL"), ("rocm", "NCCL"), ("cuda", "NCCL")])  # hw: under test
def test_several_nodes_are_told_which_variables_name_their_network_interface(capsys, name, first):
    note = f"set {first}_SOCKET_IFNAME and GLOO_SOCKET_IFNAME to the one between them"
    words = ("tiny_sort", "--devices", "8", f"backend.name={name}")
    several = ("--nodes", "2")
    for options in ((*several, "--rendezvous", "node1"), (*several, "--slurm")):
        assert [line for line in printed(capsys, *words, *options) if line.startswith("#") and note in line]
    assert note not in "\n".join(printed(capsys, *words))


def meeting(capsys, *words: str) -> tuple[str, str]:
    """Return the endpoint and the id by which a job of two nodes meets."""
    *_, line = printed(capsys, *words, "--nodes", "2", "--rendezvous", "node1")
    found = shlex.split(line)
    return found[found.index("--rdzv-endpoint") + 1], found[found.index("--rdzv-id") + 1]


def test_jobs_that_differ_do_not_meet_and_the_nodes_of_one_do(capsys, monkeypatch):
    jobs = [
        meeting(capsys, "tiny_sort"),
        meeting(capsys, "tiny_sort", "optim.lr=1e-4"),
        meeting(capsys, "tiny_sort", "--rendezvous-id", "mine"),
        meeting(capsys, "tiny_sort", "--rendezvous-id", "other"),
    ]
    monkeypatch.setenv("LOGNAME", "somebody-else")
    jobs.append(meeting(capsys, "tiny_sort"))
    assert len({job for _, job in jobs}) == len({endpoint for endpoint, _ in jobs}) == 5
    assert meeting(capsys, "tiny_sort") == jobs[-1], "the same on every node"


def test_devices_are_chosen_by_the_backends_own_variable(capsys):
    for backend, name in (("cuda", "CUDA_VISIBLE_DEVICES"), ("npu", "ASCEND_RT_VISIBLE_DEVICES")):
        *_, line = printed(capsys, "tiny_sort", "--visible", "4,6", f"backend.name={backend}")
        assert line.startswith(f"{name}=4,6 {PATIENT} torchrun --nproc-per-node 2 ")


def test_slurm_gets_one_task_per_node_that_starts_torchrun(capsys, tmp_path):
    words = ("qwen3_32b_math", "--nodes", "4", "--devices", "8", "--slurm", "--sbatch=--time=8:00:00")
    lines = printed(capsys, *words, "backend.name=cuda")
    for line in ("--nodes=4", "--ntasks-per-node=1", "--gres=gpu:8", "--requeue", "--time=8:00:00"):
        assert f"#SBATCH {line}" in lines
    assert lines[0] == "#!/usr/bin/env bash"
    run = lines[-1]
    start = 'srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 torchrun --nproc-per-node 8 '
    assert run.startswith(start)
    assert '--rdzv-endpoint "$head:$port"' in run
    assert "#SBATCH --cpus-per-task=64" in lines
    assert "#SBATCH --signal=TERM@600" in lines
    assert f"export {PATIENT}" in lines
    assert "#SBATCH --cpus-per-task=96" in printed(capsys, *words, "--cpus", "96", "backend.name=cuda")
    assert "#SBATCH --gres=npu:8" in printed(capsys, *words, "backend.name=npu")


def test_the_script_for_slurm_is_a_shells_and_finds_the_first_node(capsys, tmp_path):
    script = "\n".join(printed(capsys, "tiny_sort", "--nodes", "2", "--slurm", "backend.name=cpu"))
    stubs = {
        "scontrol": "printf 'first\\nsecond\\n'",
        "hwgrpo": "echo 'export FROM_PROFILE=1'",
        "srun": 'echo "$FROM_PROFILE $TORCH_DISABLE_SHARE_RDZV_TCP_STORE $TORCH_ELASTIC_SHUTDOWN_TIMEOUT $*"',
    }
    for name, body in stubs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    for job, port in (("7", 10007), ("20000", 10000), ("4123456", 13456)):
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NODELIST": "x", "SLURM_JOB_ID": job}
        env["SLURM_CPUS_PER_TASK"] = "8"
        done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, check=True)
        assert done.stdout.startswith("1 1 600 --cpus-per-task=8 --kill-on-bad-exit=1 torchrun ")
        assert f"--rdzv-endpoint first:{port} --rdzv-id {job} " in done.stdout


def test_what_is_run_is_what_is_printed(capsys, monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(os, "execv", lambda path, words: started.append(words))
    monkeypatch.setattr(os, "environ", dict(os.environ))
    main(["launch", "tiny_sort", "--devices", "2", "--run", "backend.name=cpu"])
    capsys.readouterr()
    *_, line = printed(capsys, "tiny_sort", "--devices", "2", "backend.name=cpu")
    assert started[0][1:3] == ["-m", "torch.distributed.run"]
    assert started[0][3:] == shlex.split(line)[2:]
    assert os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "600"


@pytest.mark.slow
def test_two_processes_train_by_the_line_that_is_run(hwgrpo, tmp_path):
    done = hwgrpo("launch", "tiny_sort", *TINY, "--devices", "2", "--run", "trainer.output_dir=out")
    assert done.returncode == 0, done.stderr
    assert "completed: 6 of 6 steps" in done.stdout
    assert (Path(tmp_path) / "out" / "summary.json").is_file()


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("--devices", "0"), ("--devices 0", "1 or more")),
        (("--devices", "3"), ("trainer.prompts_per_step=64", "multiple of 3")),
        (("--nodes", "2"), ("--nodes 2", "--rendezvous HOST")),
        (("--rendezvous", "here"), ("--rendezvous here", "--nodes N")),
        (("--nodes", "2", "--rendezvous", "here:x"), ("is not a port",)),
        (("--visible", "0,0"), ("--visible '0,0'", "distinct")),
        (("--visible", "0,1", "--devices", "4"), ("names 2 devices", "not --devices 4")),
        (("--visible", "0,1"), ("needs backend.name",)),
        (("--visible", "0,1", "backend.name=cpu"), ("'cpu' has no variable",)),
        (("--slurm",), ("--slurm needs backend.name",)),
        (("--slurm", "--rendezvous", "here", "--nodes", "2"), ("omit --visible and --rendezvous",)),
        (("--sbatch=--time=1",), ("--sbatch is an option of --slurm",)),
        (("--max-restarts", "2", "trainer.resume=never"), ("trainer.resume=never",)),
        (("--max-restarts", "-1"), ("--max-restarts -1",)),
        (("--rendezvous-id", "x"), ("--rendezvous-id x", "several nodes")),
        (("--cpus", "8"), ("--cpus 8", "--slurm")),
        (("--cpus", "0", "--slurm", "backend.name=cpu"), ("--cpus 0", "1 or more")),
        (("--devices", "2", "trainer.strategy=single"), ("trainer.strategy",)),
    ],
)
def test_a_count_that_cannot_be_is_named_with_its_remedy(capsys, words, parts):
    assert main(["launch", "tiny_sort", *words]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    line = told.err.splitlines()[-1]
    for part in parts:
        assert part in line


def test_a_variable_that_leaves_too_few_devices_is_told(capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert main(["launch", "tiny_sort", "--devices", "4", "backend.name=cuda"]) == 2
    assert "CUDA_VISIBLE_DEVICES=0,1 leaves 2" in capsys.readouterr().err


def test_a_restart_that_would_begin_anew_is_told(capsys):
    assert main(["launch", "tiny_sort", "--devices", "2", "trainer.save_every=0"]) == 0
    assert "a restart begins at step 0" in capsys.readouterr().err


def test_other_commands_are_started_with_their_options(capsys, tmp_path):
    assert printed(capsys, "train", "tiny_sort", "optim.lr=1e-4") == ["hwgrpo train tiny_sort optim.lr=1e-4"]
    sft = ("sft", "tiny_sort", "data.train=elsewhere.jsonl", "--allow-finished")
    assert printed(capsys, *sft) == ["hwgrpo sft tiny_sort data.train=elsewhere.jsonl --allow-finished"]
    _, line = printed(capsys, *sft, "--devices", "4", "backend.name=cpu")
    assert shlex.split(line) == [
        PATIENT,
        *("torchrun", "--nproc-per-node", "4", "--max-restarts", "3", "--standalone", "-m", "hwgrpo"),
        *("sft", "tiny_sort", "data.train=elsewhere.jsonl", "backend.name=cpu", "--allow-finished"),
    ]
    runs.run(tmp_path / "run", "trainer.max_steps=1", "trainer.validate_every=0")
    own = ("--from-run", str(tmp_path / "run"), "--keep", "reward>=0.8")
    assert shlex.split(printed(capsys, "sft", *own, "trainer.max_steps=1")[0]) == [
        *("hwgrpo", "sft", "trainer.max_steps=1", *own)
    ]
    script = printed(capsys, "sft", *own, "--slurm", "backend.name=cpu")
    assert "#SBATCH --job-name=hwgrpo-run" in script


def test_a_script_for_slurm_names_the_recipe_of_the_command(capsys):
    assert "#SBATCH --job-name=hwgrpo-tiny_sort" in printed(capsys, "sft", "tiny_sort", "--slurm", "backend.name=cpu")


def test_supervised_training_is_planned_for_all_processes(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    words = ("sft", "tiny_sort", "--devices", "2", "--dry-run", f"trainer.output_dir={tmp_path}/out")
    assert main(["launch", *words]) == 0
    assert "strategy ddp" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train",), "name a recipe: hwgrpo launch train RECIPE"),
        (("sft",), "name a recipe (hwgrpo sft RECIPE), or a run with --from-run RUN"),
        (("tiny_sort", "--from-run", "runs/x"), "--from-run is an option of `hwgrpo launch sft RECIPE`, not of train"),
        (("sft", "tiny_sort", "--devices", "3"), "cannot be divided among 3 ranks"),
    ],
)
def test_commands_are_launched_with_their_own_arguments_alone(capsys, words, message):
    assert main(["launch", *words]) == 2
    assert message in capsys.readouterr().err
