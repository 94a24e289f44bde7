"""The verl command of a run script is found by reading it; nothing is run; what is unknown is named with its line."""

from pathlib import Path

import pytest

from hwgrpo.errors import ConfigError
from hwgrpo.imports.shell_script import VerlCommand, read_script

COMMAND = "python3 -m verl.trainer.main_ppo"


def read(text: str, *arguments: str, **environment: str) -> VerlCommand:
    return read_script(text, "run.sh", arguments, {"HOME": "/home/me", **environment})


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (f"{COMMAND} a.b=1 a.c=x", ["a.b=1", "a.c=x"]),
        (f"{COMMAND} \\\n  a.b=1 \\\n  a.c=2\necho a.d=3", ["a.b=1", "a.c=2"]),
        (f"{COMMAND} \\\n  # why\n  a.b=1 \\\n\n  a.c=2", ["a.b=1", "a.c=2"]),
        (f"{COMMAND} \\\n  # a.x=9 \\\n  a.b=1", ["a.b=1"]),
        (f"{COMMAND} a.b=1 \\  # why\n a.c=2", ["a.b=1", "a.c=2"]),
        (f"{COMMAND} a.b=1 \\ \n a.c=2", ["a.b=1", "a.c=2"]),
        (f"{COMMAND} a.b=1 \\\n\necho done", ["a.b=1"]),
        (f"X=3\n{COMMAND} a.b=$X a.c=${{X}}x a.d='$X' a.e=\"$X $X\"", ["a.b=3", "a.c=3x", "a.d=$X", "a.e=3 3"]),
        (f"{COMMAND} a.b=${{X:-5}} a.c=${{HOME}}/d a.e=$HOME", ["a.b=5", "a.c=/home/me/d", "a.e=/home/me"]),
        (f"{COMMAND} a.b=${{X:=5}} a.c=$X", ["a.b=5", "a.c=5"]),
        (f"X=\n{COMMAND} a.b=${{X:-5}} a.c=${{X-5}} a.d=${{X:+6}}", ["a.b=5", "a.c=", "a.d="]),
        (f'X=${{Y:-"$HOME/m"}}\n{COMMAND} a.b=$X', ["a.b=/home/me/m"]),
        (f"P=16 R=$((1024 * 2))\n{COMMAND} a.b=$((P + R * 2 - (1))) a.c=$((R / 3))", ["a.b=4111", "a.c=682"]),
        (f"A=(a.b=1 # one\n  'a.c=[1, 2]'\n)\nA+=(a.d=3)\n{COMMAND} \"${{A[@]}}\"", ["a.b=1", "a.c=[1, 2]", "a.d=3"]),
        (f"export X=3; {COMMAND} a.b=$X", ["a.b=3"]),
        (f"F=m/Qwen.tar\n{COMMAND} a.b=${{F##*/}} a.c=${{F%.tar}}", ["a.b=Qwen.tar", "a.c=m/Qwen"]),
        (f"F=\"['$HOME/a', '$HOME/b']\"\n{COMMAND} a.b=\"$F\"", ["a.b=['/home/me/a', '/home/me/b']"]),
        (f"{COMMAND} a.b='[\"x\",\"y\"]' a.c=['x','y']", ['a.b=["x","y"]', "a.c=[x,y]"]),
        (f"{COMMAND} a.b=1 2>&1 | tee log.txt", ["a.b=1"]),
        (f"nohup {COMMAND} a.b=1 > log 2>&1 &", ["a.b=1"]),
        (f"HYDRA_FULL_ERROR=1 {COMMAND} a.b=1", ["a.b=1"]),
        ("ray job submit --no-wait -- python3 -m verl.trainer.main_ppo a.b=1", ["a.b=1"]),
        ("torchrun --nnodes=1 -m verl.trainer.main_ppo a.b=1", ["a.b=1"]),
        (f"cd verl && {COMMAND} a.b=1", ["a.b=1"]),
        (f"cat <<EOF > x\n{COMMAND} a.x=1\nEOF\n{COMMAND} a.b=1", ["a.b=1"]),
        (f'if [ -z "$X" ]; then\n  echo no\nfi\n{COMMAND} a.b=1', ["a.b=1"]),
        (f"f() {{\n  date\n}}\nfunction g {{\n  date\n}}\n{COMMAND} a.b=1", ["a.b=1"]),
        (f"for i in 1 2; do echo $i; done\n{COMMAND} a.b=1", ["a.b=1"]),
    ],
)
def test_the_arguments_are_those_that_bash_would_pass(script: str, expected: list[str]):
    assert read(script).arguments == expected


def test_arguments_of_the_script_are_passed_where_it_says():
    assert read(f'{COMMAND} a.b=1 "$@" a.c=2', "a.d=3").arguments == ["a.b=1", "a.d=3", "a.c=2"]
    assert read(f"E=${{1:-vllm}}\n{COMMAND} a.b=$E $@", "a.d=3").arguments == ["a.b=vllm", "a.d=3"]
    assert read(f"E=${{1:-vllm}}\n{COMMAND} a.b=$E $@", "sglang", "a.d=3").arguments == ["a.b=sglang", "a.d=3"]
    command = read(f"{COMMAND} a.b=1", "a.d=3")
    assert command.arguments == ["a.b=1", "a.d=3"]
    assert any('no "$@"' in notice for notice in command.notices)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (f"{COMMAND} a.b=$NOPE", "run.sh, line 1: the variable NOPE is not set"),
        (f"\nX=$(nproc)\n{COMMAND} a.b=$X", "run.sh, line 2: $(nproc) is the output of a program"),
        (f"if true; then\n  X=1\nfi\n{COMMAND} a.b=$X", "run.sh, line 2: X is set under the `if` in line 1"),
        (f'[ -z "$Y" ] && X=1\n{COMMAND} a.b=$X', "X is set under the condition in line 1"),
        (f"for i in 1 2; do echo; done\n{COMMAND} a.b=$i", "i is set by the loop in line 1"),
    ],
)
def test_what_is_not_known_carries_its_reason(script: str, reason: str):
    command = read(script)
    assert reason in command.reasons(command.arguments[-1])[0]


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo hello", "run.sh has no command `python3 -m verl.trainer.main_ppo`"),
        (f"{COMMAND} a.b=1\n{COMMAND} a.b=2", "2 verl commands, in lines 1 and 2"),
        (f"if true; then\n  {COMMAND} a.b=1\nfi", "line 2: the verl command depends on the `if` in line 1"),
        (f"{COMMAND} a.b=1\n  a.c=2", "line 2: 'a.c=2' is outside the verl command"),
        (f"{COMMAND} a.b='1", "line 1: a ' is not closed"),
        ("python3 -m verl.trainer.main_eval a.b=1", "verl.trainer.main_eval is not supported"),
    ],
)
def test_a_script_without_one_clear_command_is_refused(script: str, message: str):
    with pytest.raises(ConfigError) as error:
        read(script)
    assert message in str(error.value)


def test_nothing_is_run(tmp_path: Path):
    file = tmp_path / "made"
    read(f"touch {file}\nX=$(touch {file})\nY=`touch {file}`\neval 'touch {file}'\n{COMMAND} a.b=1")
    assert not file.exists()


def test_what_is_left_out_is_listed():
    notices = read(
        f"set -x\npip install x\nexport HCCL_BUFFSIZE=1\nsource env.sh\n{COMMAND} --config-name=ppo_trainer a.b=1"
    )
    assert "left out: set -x, pip install, source" in notices.notices
    assert "environment variables of the script are not part of a recipe: HCCL_BUFFSIZE" in notices.notices
    assert notices.config_name == "ppo_trainer"
