"""The verl command of a run script is found by reading it; nothing is run; what is unknown is named with its line."""

import subprocess
from pathlib import Path

import pytest

from hwgrpo.errors import ConfigError
from hwgrpo.imports.script_command import VerlCommand
from hwgrpo.imports.shell_script import read_script

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


CASES = [
    ('[ "$A" = x ]', True), ('[ "$A" == y ]', False), ("[ $A != y ]", True), ("[ $N -gt 4 ]", True),
    ("[ $N -le 4 ]", False), ("test $N -eq 8", True), ('[ -z "$NONE" ]', True), ('[ -n "$NONE" ]', False),
    ('[ -n "$A" ]', True), ('[ ! -z "$A" ]', True), ('! [ -z "$A" ]', True), ("[ $A ]", True), ('[ "$NONE" ]', False),
    ("[[ $A == x ]]", True), ("[[ $PATHS == */model ]]", True), ("[[ $PATHS == m* ]]", False), ("[[ $NONE ]]", False),
    ("[[ -n $A && $N -ge 8 ]]", True), ("[[ -n $NONE || $N -lt 8 ]]", False), ("[[ ! ( $A == x ) ]]", False),
    ("[[ $NONE == x ]]", False), ('[[ "$A" != "x" ]]', False), ('[ "$A" = x ] && [ $N = 8 ]', True),
    ('[ "$A" = y ] || [ $N = 8 ]', True), ('[ "$A" = y ] && [ $N = 8 ]', False), ("true", True), ("false", False),
    ('[ "${NONE:-x}" = x ]', True), ('[ "$((N * 2))" -eq 16 ]', True), ("[ -f nowhere ] && [ $A = y ]", False),
]  # fmt: skip


@pytest.mark.parametrize(("condition", "holds"), CASES)
@pytest.mark.parametrize(
    "form",
    [
        "if {}; then\n  X=1\nelse\n  X=2\nfi",
        "if {}; then X=1; else X=2; fi",
        "if [ 1 = 2 ]; then\n  X=3\nelif {}\nthen\n  X=1\nelse X=2\nfi",
        "X=2\nif [ 1 = 1 ]; then\n  if {}; then X=1; fi\nelse\n  if {}; then X=4; else X=5; fi\nfi",
    ],
)
def test_a_branch_is_read_where_what_it_compares_is_known(form: str, condition: str, holds: bool):
    script = f"A=x N=8 PATHS=/a/model\n{form.replace('{}', condition)}\n{COMMAND} a.b=$X"
    assert read(script).arguments == [f"a.b={2 - holds}"]
    bash = subprocess.run(["bash"], input=script.replace(COMMAND, "echo"), capture_output=True, text=True, check=True)
    assert bash.stdout == f"a.b={2 - holds}\n"


@pytest.mark.parametrize(
    ("script", "value"),
    [
        ("[ 1 = 1 ] && X=1 || X=2", "1"),
        ("[ 1 = 2 ] && X=1 || X=2", "2"),
        ("X=0; [ 1 = 2 ] || X=1", "1"),
        ("X=0; [ 1 = 1 ] || X=1", "0"),
        ("X=0\n[ 1 = 2 ] && if true; then X=1; fi", "0"),
        ("X=0\nif [ 1 = 2 ]; then for X in 1 2; do :; done; fi", "0"),
        ("X=0\nif [ 1 = 2 ]; then exit 1; fi", "0"),
        ("X=0\n[[ 1 == 2 && 1 < 2 ]] && X=1", "0"),
        ("X=0\nif true; then X=1; elif true; then X=2; else X=3; fi", "1"),
        ("X=0\nif false; then X=1; elif true; then X=2; else X=3; fi", "2"),
        ("X=0\nif false; then X=1; fi\nif ! false; then X=5; fi", "5"),
        ("export Y=a && X=1", "1"),
        ("X=1; unset X; X=${X:-3}", "3"),
    ],
)
def test_lists_of_commands_are_read_as_bash_runs_them(script: str, value: str):
    assert read(f"{script}\n{COMMAND} a.b=$X").arguments == [f"a.b={value}"]
    bash = subprocess.run(["bash"], input=f"{script}\necho $X", capture_output=True, text=True, check=True)
    assert bash.stdout == f"{value}\n"


def test_arguments_of_the_script_are_passed_where_it_says():
    assert read(f'{COMMAND} a.b=1 "$@" a.c=2', "a.d=3").arguments == ["a.b=1", "a.d=3", "a.c=2"]
    without = read(f'{COMMAND} a.b=1 "$@"')
    assert (without.arguments, without.notices) == (["a.b=1"], [])
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
        (f"if test -e f; then\n  X=1\nfi\n{COMMAND} a.b=$X", "run.sh, line 2: X is set under the `if` in line 1"),
        (f"if [ -f f ]; then\n  X=1\nelse\n  X=2\nfi\n{COMMAND} a.b=$X", "X is set under the `if` in line 1"),
        (f"if grep -q x f; then X=1; fi\n{COMMAND} a.b=$X", "X is set under the `if` in line 1"),
        (f"if ls; then X=1; fi\n{COMMAND} a.b=$X", "X is set under the `if` in line 1"),
        (f'if [ "$(nproc)" -gt 4 ]; then X=1; fi\n{COMMAND} a.b=$X', "X is set under the `if` in line 1"),
        (f"if [[ $HOME =~ me ]]; then X=1; fi\n{COMMAND} a.b=$X", "X is set under the `if` in line 1"),
        (f"if [[ $HOME < me ]]; then X=1; fi\n{COMMAND} a.b=$X", "X is set under the `if` in line 1"),
        (f'if [[ $HOME == "/h*" ]]; then X=1; fi\n{COMMAND} a.b=$X', "X is set under the `if` in line 1"),
        (f"if [ $NONE = 1 ]; then X=1; fi\n{COMMAND} a.b=$X", "X is set under the `if` in line 1"),
        (f"if (( 2 > 1 )); then X=1; fi\n{COMMAND} a.b=$X", "X is set under the `if` in line 1"),
        (f'source env.sh\nif [ -z "$Y" ]; then X=1; fi\n{COMMAND} a.b=$X', "X is set under the `if` in line 2"),
        (f"if [ -f f ] && [ a = a ]; then X=1; fi\n{COMMAND} a.b=$X", "X is set under the `if` in line 1"),
        (f"if [ -f f ]; then :; elif [ a = a ]; then X=1; fi\n{COMMAND} a.b=$X", "X is set under the `if` in line 1"),
        (f"[ -f f ] && X=1\n{COMMAND} a.b=$X", "X is set under the condition in line 1"),
        (f"mkdir d || X=1\n{COMMAND} a.b=$X", "X is set under the condition in line 1"),
        (f"X=2\n((X++))\n{COMMAND} a.b=$X", "line 2: X is set by ((X++))"),
        (f"X=2\nunset X\n{COMMAND} a.b=$X", "the variable X is not set"),
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
        (f"if [ -f x ]; then\n  {COMMAND} a.b=1\nfi", "line 2: the verl command depends on the `if` in line 1"),
        (f"if [ -z '' ]; then\n  exit 1\nfi\n{COMMAND} a.b=1", "line 2: the script ends here, before the verl"),
        (f"if [ 1 = 2 ]; then\n  {COMMAND} a.b=1\nfi", "run.sh has no command"),
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


@pytest.mark.parametrize(
    ("lines", "arguments", "expected"),
    [
        ("", ("4",), {"$(( $1 * 64 ))": "256"}),
        ('A="1+2"', (), {"$((A*4))": "12", "$(($A*4))": "9"}),
        ("", (), {"$((7/-2+10))": "7", "$((7%-2))": "1", "$((-7%2))": "-1"}),
        ("T=qwen-3b-x", (), {"${T:0:4}": "qwen", "${T:5}": "3b-x"}),
    ],
)
def test_numbers_and_pieces_are_those_of_bash(lines, arguments, expected):
    for text, value in expected.items():
        assert read(f"{lines}\n{COMMAND} a.b={text}", *arguments).arguments == [f"a.b={value}"]
        script = ["bash", "-c", f"{lines}\necho {text}", "it", *arguments]
        assert subprocess.run(script, capture_output=True, text=True, check=True).stdout.strip() == value


@pytest.mark.parametrize(
    ("lines", "text", "why"),
    [
        ("f() {\n N=8\n}\nN=4\nf", "$N", "N is set by f in line 5"),
        ("N=4\nfunction f {\n N=8\n}\nN=4\nf", "$N", "N is set by f in line 6"),
        ("source e.sh", "$((256 + N))", "the variable N may be set by a file or command that is not read"),
        ("eval N=4", "${N:-5}", "the variable N may be set by a file or command that is not read"),
        ("N=5\nlet N=N*2", "$N", "N is set by let in line 2"),
        ("N=3\nprintf -v N %d 7", "$N", "N is set by printf in line 2"),
        ("N=4\nmapfile -t N < f", "$N", "N is set by mapfile in line 2"),
        ("N=2\nset -- 9", "${1:-$N}", "the arguments are changed by set in line 2"),
        ("declare -i N=3\nN+=2", "$N", "N is declared as a number in line 1"),
        ("", "$((16#F))", "$((16#F)) is not read"),
        ("", "{1,2}", "{1,2} is not expanded"),
    ],
)
def test_what_is_not_evaluated_is_unknown(lines, text, why):
    command = read(f"{lines}\n{COMMAND} a.b={text} a.c=1")
    assert command.arguments[-1] == "a.c=1"
    assert why in " ".join(command.reasons(command.arguments[0]))


@pytest.mark.parametrize(
    "line", ["source /usr/local/Ascend/set_env.sh", 'eval "$(conda shell.bash hook)"', ". v/bin/activate"]
)
def test_files_that_set_paths_alone_leave_defaults_as_they_are(line):
    assert read(f"{line}\n{COMMAND} a.b=${{N:-5}}").arguments == ["a.b=5"]
