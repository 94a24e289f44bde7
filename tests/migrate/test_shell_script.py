"""The verl command of a run script is found by reading it; nothing is run; what is unknown is named with its line."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from hwgrpo.errors import ConfigError
from hwgrpo.migrate.imports.script_command import MARK, VerlCommand
from hwgrpo.migrate.imports.shell_script import read_script

COMMAND = "python3 -m verl.trainer.main_ppo"
QUIET: dict = {"capture_output": True, "text": True, "check": False}


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
        (f"exec > >(tee log) 2>&1\n{COMMAND} a.b=1 > >(tee -a log) 2> >(tee err >&2)", ["a.b=1"]),
        (f"mapfile -t L < <(ls)\n{COMMAND} a.b=1", ["a.b=1"]),
        (f"{COMMAND} a.b=1 `# why` a.c=2", ["a.b=1", "a.c=2"]),
        (f"A=9\nexport A=1 B=$A\n{COMMAND} a.b=$B a.c=$A", ["a.b=9", "a.c=1"]),
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
        ("X=0\n[ 1 = 1 ] && { [ 1 = 2 ] || [ 2 = 2 ]; } && X=1", "1"),
        ("X=0\n[ 1 = 1 ] && { [ 1 = 2 ] || [ 2 = 3 ]; } && X=1", "0"),
        ("X=0\n! { [ 1 = 2 ] || false; } && X=1", "1"),
        ("X=0\n{ false; } || X=1", "1"),
        ("X=0\n( true; false ) || { false || { true && X=1; }; }", "1"),
        ("X=0\nif { [ 1 = 1 ]; } && { [ 1 = 2 ] || true; }; then X=1; fi", "1"),
        ("X=0\nif [ 1 = 2 ] || { true && false; }; then X=1; elif { true; }; then X=2; fi", "2"),
        ("X=0\nif [ 1 = 2 ] && { X=3; true; }; then X=1; fi", "0"),
        ("X=0; ! ( true ) && X=1", "0"),
        ("X=0; if true && ! ( [ a = b ] || true ); then X=1; fi", "0"),
        ("X=0; if false; Y=5; then X=1; fi", "1"),
        ("X=0; if [ a = b ] || Y=5; then X=1; fi", "1"),
        ("X=0; false && true | true || X=1", "1"),
        ("X=0; true || false | false && X=1", "1"),
        ('X=0; case "$UNSET" in "") X=1 ;; *) X=2 ;; esac', "1"),
    ],
)
def test_lists_of_commands_are_read_as_bash_runs_them(script: str, value: str):
    assert read(f"{script}\n{COMMAND} a.b=$X").arguments == [f"a.b={value}"]
    bash = subprocess.run(["bash"], input=f"{script}\necho $X", capture_output=True, text=True, check=True)
    assert bash.stdout == f"{value}\n"


BRANCHES = [
    "a) X=1 ;; b) X=2 ;; *) X=3 ;;",
    "b | c)\n  X=1\n  ;;\n a | d)\n X=2;;\n esac\ncase b in b) Y=1;;",
    "(b) X=1;;\n  # why\n  (a|c) X=2 ;;",
    "b) ;; *) X=4",
    '"a"*) X=1;; a?) X=2;; a*) X=3;;',
    "x) case $A in a) X=1;; esac;; *) case $A in b) X=5;; a) X=6;; esac; X=${X}7;;",
    "a) if true; then X=1; else X=2; fi;; *) exit 1;;",
    "b) exit 1;;",
    "a) (X=5);; *) X=3;;",
    "$A) X=1;; *) X=2;;",
    "a*b | *) X=1;;",
]


@pytest.mark.parametrize("value", ["a", "ab", "c d", ""])
@pytest.mark.parametrize("branches", BRANCHES)
def test_a_branch_of_case_is_read_as_bash_runs_it(branches: str, value: str):
    lines = f"X=0\nA='{value}'\ncase \"$A\" in {branches}\nesac"
    bash = subprocess.run(["bash"], input=f"{lines}\necho $X", capture_output=True, text=True, check=False)
    if bash.returncode:
        with pytest.raises(ConfigError, match="the script ends here"):
            read(f"{lines}\n{COMMAND} a.b=$X")
        return
    assert read(f"{lines}\n{COMMAND} a.b=$X").arguments == [f"a.b={bash.stdout.strip()}"]


@pytest.mark.parametrize(
    "branches",
    ["a) X=1;;", "b) X=1;;& *) X=3;;", "[ab]) X=1;;", "'a*') X=1;;", "@(a|b)) X=1;;", "b) X=1;& c) X=2;;", "*) X=1;;"],
)
def test_a_branch_that_may_be_run_leaves_what_it_sets_unknown(branches: str):
    unknown = "nproc" if branches in ("a) X=1;;", "*) X=1;;") else "echo b"
    command = read(f"X=0\ncase $({unknown}) in\n{branches}\nesac\n{COMMAND} a.b=$X")
    if branches == "*) X=1;;":  # matches whatever it is
        assert command.arguments == ["a.b=1"]
    else:
        assert "X is set under the `case` in line 2, which is not evaluated" in command.reasons(command.marked[0])[0]
    if branches == "a) X=1;;":
        assert "$(nproc) is the output of a program" in command.reasons(command.marked[0])[0]


def test_a_script_that_asks_whether_a_package_is_installed_gets_this_machines_answer():
    asks = "$(python3 -c 'import {}' 2>/dev/null && echo npu || echo gpu)"
    command = read(f"A={asks.format('json')} B=${{NO:-{asks.format('not_a_package')}}}\n{COMMAND} a.b=$A a.c=$B")
    assert command.arguments == ["a.b=npu", "a.c=gpu"]
    assert [each for each in command.notices if "installed here" in each] == [
        f"line 1: the package {package} installed here, which decides the script's test for it; the other way is "
        "--set NAME=VALUE"
        for package in ("json is", "not_a_package is not")
    ]
    for source in (
        "$(python3 -c 'print(1)')",
        "$(python3 -c 'import a.b' && echo x)",
        "$(echo a | wc)",
        "$(echo -n a)",
    ):
        assert MARK.search(read(f"{COMMAND} a.b={source}").marked[0]), source


def test_a_word_that_names_a_variable_or_a_product_is_no_pattern():
    command = read(f"N=3 A=(1 2)\nlet N*=2\nunset A[1]\n{COMMAND} a.b=$N a.c=${{A[0]}}")
    assert command.marked[0] == "a.b=6"
    assert "an element of A is unset" in command.reasons(command.marked[1])[0]


@pytest.mark.parametrize("word", ["data/*.parquet", "data/part-[0-9].parquet", "?"])
def test_a_word_that_names_of_files_replace_is_not_known(word: str):
    command = read(f'F=({word}) G={word}\n{COMMAND} a.b=$F a.c={word} a.d=$G a.e="$G" [*] {word}')
    assert "is replaced by the names of files that match it" in command.reasons(command.marked[0])[0]
    assert command.marked[1:4] == [f"a.c={word}", f"a.d={word}", f"a.e={word}"]
    assert all(MARK.fullmatch(each) for each in command.marked[4:])


def test_a_variable_that_is_fixed_is_never_set():
    lines = "D=1\nexport E=2 D=3\nfor D in a b; do :; done\nunset D\nD+=4\n((D = 5))\nif [ -f f ]; then D=6; fi"
    command = read_script(f"{lines}\n{COMMAND} a.b=$D a.c=$E", "run.sh", [], {"D": "0"}, fixed={"D": "npu"})
    assert command.arguments == ["a.b=npu", "a.c=2"]


SCRIPTS = [
    ("E=${1:-vllm}", "a.b=$E $@", [(), ("a.d=3",), ("sglang", "a.d=3"), ("a b", "c")]),
    ("", 'a.b=1 "$@" a.c=2', [(), ("a.d=3",), ("x y", "", "a.e=4")]),
    ("", 'a.b=$# a.c=${#@} a.d=${2:-x} a.e="$*"', [(), ("a.x=1",), ("1", "a.x=1", "a.y=2")]),
    ("if [ $# -lt 2 ]; then N=few; else N=$1; fi", "a.b=$N ${@:2}", [("a.x=1",), ("8", "a.x=1", "a.y=2")]),
    ("N=$1\nO=$2\nshift 2", 'a.b=$N a.c=$O a.n=$# "$@"', [("8", "out", "a.x=1", "a.y=2"), ("8", "out")]),
    ("X=ab", 'a.b=1 "${@:2}" "${@:1:1}" a.c=${X:5} a.d=${X: -5} ${@:9}', [(), ("a.x=1",), ("1", "a.x=1", "a.y=2")]),
    ("A=1 B=2 N=A\nunset $N \"B\"", "a.b=${A:-x}${B:-y}", [()]),
    ("shift", 'a.b=${1-none} "$@"', [(), ("a.x=1",), ("a.x=1", "a.y=2")]),
    ('set -- "$@" a.z=9', 'a.b=$# "$@"', [(), ("a.x=1",)]),
    ("set -- 9 8", "a.b=$1 a.c=${2}0 a.d=$#", [("a.x=1",)]),
    ('A=("$@")', '"${A[@]}" a.n=${#A[@]} a.last=${A[-1]:-x}', [("a.x=1", "a.y=2")]),
    ("", 'a.b=${10} a.c=$10 "${@: -2:1}" ${@:0:1}', [tuple("abcdefghijk")]),
    ("f() { shift; set -- 1 2 3; }\nfunction g {\n shift\n}", 'a.b=$# "$@"', [("a.x=1", "a.y=2")]),
    ('if [ "$1" = --debug ]; then D=1; shift; else D=0; fi', 'a.d=$D "$@"', [("--debug", "a.x=1"), ("a.x=1",)]),
    (
        "X={1,2} Y=a{b,c}",
        "a.b=$X a.c=$Y a.d={1,2} a.e={1..4} x{,y}{1..3..2} {01..03} {c..a} {a} '{1,2}' \"{1,2}\"",
        [()],
    ),
    ("export C=a{1,2} D=(x y)", "$C ${D[1]}", [()]),
    ("A=(a{1,2} b{,c}) X=5", "${A[@]} {x,{y,z}} ${A[1]}{,1} [{1,2},{3}] {\"a b\",c} {$X,1}", [()]),
    ("A=5 B=A+1 C=010", "$((16#F)) $((2#101 + 0x1F + C)) $((B * 2)) $((-7 / 2)) $((A > 3 ? 1 << 4 : 0))", [()]),
    (
        "A=5",
        "$((A++ + ++A)) $A $((A *= 2, A - 1)) $((!A || 2 ** 10 > 1000)) $((7 & 3 | 8 ^ 1)) $((~A)) $((8--2))",
        [()],
    ),
    (
        "A=5 L=(4 6)",
        "$((L[1] * ${L[0]} + ${#L[@]})) $((9223372036854775807 + 1)) $(( (1,2) )) $((A==5&&3)) $(())",
        [()],
    ),
    ("N=5\nlet N=N*2 'M = N + 1'\n((N++)); (( K += 3 ))", "a.b=$N a.c=$M a.d=$K", [()]),
    ("N=1\nif (( N > 1 )); then X=1; elif ((N)); then X=2; fi\n((N == 1)) && Y=3\nlet N-1 || Z=4", "$X $Y $Z", [()]),
    (
        "X=a.b-c F=d/e/f.tar.gz",
        "${#X} ${X/./_} ${F//\\//.} ${F/#d/x} ${F/%gz/xz} ${X^^} ${F^} ${X: -3:2} ${F:2:-3}",
        [()],
    ),
    ("A=(x 'y z' w)\nA[1]=q\nA[3]+=v\nI=2", '"${A[@]:1:2}" ${A[$I]} ${A[I+1]} "${A[*]}" ${#A[0]} ${A[9]:-n} $A', [()]),
    ("A=1\n(A=2; B=3)\n{ C=4; }\nf() { A=7; }", "$A ${B:-none} $C", [()]),
    (': ${X:=5} "${Y:=a b}"\necho ${Z:=6} > /dev/null', 'a.b=$X "$Y" $Z ${NONE+x} ${X+y}', [()]),
    ("cd /tmp\nA=$PWD\ncd ../usr/./lib", 'a.b=$A a.c=$PWD a.d="$(pwd)"', [()]),
    ("D=$(dirname $0)\nP=$(cd \"$D/..\" && pwd)", 'a.b=$D a.c=$P a.d=$0 a.e=$(dirname /a/b/)', [()]),
    ("M=/m/Qwen2.5-7B.tar/", "$(basename $M) $(basename $M .tar) `basename \"${M,,}\"` $(basename x x)", [()]),
    ("HOME=/h A=~/x:~/y B=a~/z", "$A $B ~/q a.b=~/r ab=~/t:~/u '~/s' ~", [()]),
    ("A=$'a\\tb\\'c\\x41\\n.' B=\"it's\"", '"$A" $"x $B" "a"$B', [()]),
    ("A=' x y ' E=", 'a.b=$A. a"$A"b $A$A $E "$E" "$E"$E ""$@ "$@" "$E$@"', [()]),
    ("A=(1 2)\nA=3\nB=4\nB+=(5)\nC=(6)\nC+=7", '"${A[@]}" "${B[@]}" ${C[@]}', [()]),
    ("for ((i = 0; i < 2; i++)); do :; done\nX=1", "a.b=$X", [()]),
    ("A='{x:{},'\\\n'y:1}'\nB=a\\\nb C=\\\n1", '"$A" $B $C', [()]),
    (
        "A=\"${U:-'a'}\" B=${U:-'$X'} X=1",
        "\"$A\" $B \"${U:-['$X/a','b']}\" \"${U:-${V:-'q'}}\" \"${U:-a\\'\\$\\n}\"",
        [()],
    ),
    ("A=$(echo a b && echo c) B=$(false || echo d)", '"$A" $(echo $# x)', [()]),
]  # fmt: skip
RUNS = [(lines, words, arguments) for lines, words, runs in SCRIPTS for arguments in runs]


@pytest.mark.parametrize(("lines", "words", "arguments"), RUNS)
def test_a_script_passes_what_it_passes_in_bash(lines: str, words: str, arguments: tuple[str, ...]):
    script = f"{lines}\nprintf '%s\\0' {words} END"
    bash = subprocess.run(["bash", "-c", script, "run.sh", *arguments], capture_output=True, text=True, check=True)
    command = read_script(
        f"{lines}\nverl.main {words} END", "run.sh", arguments, {"HOME": "/root", "PWD": os.getcwd()},
        module=re.compile("verl.main"), path="run.sh",
    )  # fmt: skip
    passed = command.arguments[: command.arguments.index("END")]
    in_bash = bash.stdout.split("\0")[:-1]
    left_out = [each for each in in_bash if each.startswith("-") or not each]  # no settings of Hydra
    assert [*passed, "END"] == [each for each in in_bash if each not in left_out]
    notices = [each for each in command.notices if each.startswith("left out: -") or each.endswith("an empty argument")]
    assert [each.removeprefix("left out: ") if "left out" in each else "" for each in notices] == left_out


def test_settings_that_the_script_does_not_pass_are_added():
    assert read(f'{COMMAND} a.b=1 "$@"').notices == []
    command = read(f"{COMMAND} a.b=1", "a.d=3")
    assert command.arguments == ["a.b=1", "a.d=3"]
    assert any('no "$@" that passes a.d=3' in notice for notice in command.notices)
    used = read(f"{COMMAND} a.b=$1", "a.d=3")
    assert (used.arguments, used.notices) == (["a.b=a.d=3"], [])


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
        (f"if (( $(nproc) > 1 )); then X=1; fi\n{COMMAND} a.b=$X", "X is set under the `if` in line 1"),
        (f'source env.sh\nif [ -z "$Y" ]; then X=1; fi\n{COMMAND} a.b=$X', "X is set under the `if` in line 2"),
        (f"if [ -f f ] && [ a = a ]; then X=1; fi\n{COMMAND} a.b=$X", "X is set under the `if` in line 1"),
        (f"if [ -f f ]; then :; elif [ a = a ]; then X=1; fi\n{COMMAND} a.b=$X", "X is set under the `if` in line 1"),
        (f"[ -f f ] && X=1\n{COMMAND} a.b=$X", "X is set under the condition in line 1"),
        (f"nothere && X=1 || X=2\n{COMMAND} a.b=$X", "X is set under the condition in line 1"),
        (f"nothere && echo yes || X=2\n{COMMAND} a.b=$X", "X is set under the condition in line 1"),
        (f"[ -f f ] && echo yes && X=1\n{COMMAND} a.b=$X", "X is set under the condition in line 1"),
        (f"Y=$(nvcc) || X=1\n{COMMAND} a.b=$X", "X is set under the condition in line 1"),
        (f"[ a = a ] && echo a | grep -q b && X=1\n{COMMAND} a.b=$X", "X is set under the condition in line 1"),
        (f"if ! true | true; then X=1; fi\n{COMMAND} a.b=$X", "X is set under the `if` in line 1"),
        (f"X=$(echo a > f)\n{COMMAND} a.b=$X", "$(echo a > f) is the output of a program"),
        (f"X=$(echo a >&2)\n{COMMAND} a.b=$X", "$(echo a >&2) is the output of a program"),
        (f"X=$(echo *)\n{COMMAND} a.b=$X", "$(echo *) is the output of a program"),
        (f"X=$(echo a & echo b)\n{COMMAND} a.b=$X", "$(echo a & echo b) is the output of a program"),
        (f"[[ {'! ' * 9999}a ]] && X=1\n{COMMAND} a.b=$X", "X is set under the condition in line 1"),
        (f"[ {'! ' * 9999}a ] && X=1\n{COMMAND} a.b=$X", "X is set under the condition in line 1"),
        (f"[[ {'( ' * 9999}a {') ' * 9999}]] && X=1\n{COMMAND} a.b=$X", "X is set under the condition in line 1"),
        (f"mkdir d || X=1\n{COMMAND} a.b=$X", "X is set under the condition in line 1"),
        (f"X=2\n((X = $(nproc)))\n{COMMAND} a.b=$X", "line 2: X is set by ((X = $(nproc)))"),
        (f"i=1\nfor ((i = 0; i < 2; i++)); do :; done\n{COMMAND} a.b=$i", "i is set by the loop in line 2"),
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
        (f"A=(a.b=1 & a.c=2)\n{COMMAND} a.b=1", "line 1: '&' in an array"),
        (f"X=\"{COMMAND} a.b='x'\"\neval $X", "line 2: eval reads the command again; write the command itself"),
        (
            "python3 -m verl.trainer.main_eval a.b=1",
            "verl.trainer.main_eval is no entry point whose settings are known",
        ),
    ],
)
def test_a_script_without_one_clear_command_is_refused(script: str, message: str):
    with pytest.raises(ConfigError) as error:
        read(script)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "lines",
    [
        "{ echo prep; exit 0; } | cat",
        "{ exit 0; X=2; } 2>&1 |& cat",
        "{\n  if true; then exit 1; fi\n  echo\n} &",
        "{ exit 0; } && echo &",
        "exit 0 && echo &",
        "if true; then exit 1; else echo; fi | cat",
        "case a in a) exit 1;; b | c) X=2;; esac | cat",
        "{ { exit 1; } && echo; X=2; } | cat",
        "set -e\nif true; then false; fi | cat",
        "set -- -e run\nfalse",
        "set - -e\nfalse",
        "set run -e\nfalse",
        "set -o pipefail -- -e\nfalse",
        "set -e | cat\nfalse",
        "{ set -e; } | cat\nfalse",
        "set -e &\nfalse",
        "set -e\nset +e | cat\nset +o errexit\nfalse",
    ],
)
def test_a_script_goes_on_where_bash_does(lines: str):
    text = f"X=1\n{lines}\n"
    shell = subprocess.run(["bash", "-c", f"{text}echo end $X"], **QUIET)
    assert "end 1" in shell.stdout.splitlines()
    assert read(f"{text}{COMMAND} a.b=$X").arguments == ["a.b=1"]


@pytest.mark.parametrize(
    ("lines", "line"),
    [
        ("{ echo prep; exit 0; }", 1),
        ("{ exit 0; echo & }", 1),
        ("{ exit 0; echo | cat; }", 1),
        ("if true; then\n  exit 0\nfi\necho &", 2),
        ("if true; then exit 0; fi && echo | cat", 1),
        ("{ exit 0; } || echo\necho &", 1),
        ("case a in a) exit 1;; b | c) X=2;; esac", 1),
        ("set -eo pipefail\nfalse", 2),
        ("set -o pipefail -o errexit -- -x\nfalse", 2),
        ("set -ueo pipefail run\nif true; then false; fi", 2),
        ("set -e\nset +e | cat\nfalse", 3),
    ],
)
def test_a_script_ends_where_bash_ends_it(lines: str, line: int):
    shell = subprocess.run(["bash", "-c", f"{lines}\necho end"], **QUIET)
    assert "end" not in shell.stdout.splitlines()
    with pytest.raises(ConfigError, match=f"line {line}: the script ends here"):
        read(f"{lines}\n{COMMAND} a.b=1")


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
        ("", ("4",), {"$(( $1 * 64 ))": "256", "$[ $1 * 2 ]": "8"}),
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
        ("N=3\nprintf -v N %d 7", "$N", "N is set by printf in line 2"),
        ("N=4\nmapfile -t N < f", "$N", "N is set by mapfile in line 2"),
        ("if [ -f f ]; then set -- 9; fi", "${1:-2}", "the arguments are changed under the `if` in line 1"),
        ("set -- 1 2\nif [ -f f ]; then shift; fi", "$#", "the arguments are changed under the `if` in line 2"),
        ("set -- 1 2\nwhile [ -n $1 ]; do shift; done", "$@", "the arguments are changed under the `while` in line 2"),
        ("declare -A M=([x]=1)", "${M[x]}", "M is an associative array, in line 1"),
        ("A=(1 2)\nA[$(nproc)]=3", "${A[1]}", "A[$(nproc)] is set by its index in line 2"),
        ("A=([3]=1)", "${A[0]:-2}", "elements of A are set by their index"),
        ("A=($(ls))", "${A[1]:-2}", "$(ls) is the output of a program"),
        ("A=($(ls) b)", "${#A[@]}", "${#A[@]} is not known"),
        ("X=$(date)", "${X:+3}", "$(date) is the output of a program"),
        ("X=$(date)/x", "${X%/*}", "$(date) is the output of a program"),
        ("X=x/$(date)", "${X%/*}", "${X%/*} is not known"),
        ("X=$(date)", "${X:0:4}", "${X:0:4} is not known"),
        ("X=abc", "${X/b*/d}", "${X/b*/d} is not read"),
        ("", "${RANDOM:-4}", "RANDOM is set by bash itself"),
        ("X=", "${X:?no}", "the variable X is not set"),
        ("cd $(dirname f g)", "$PWD", "the folder is changed by cd in line 1"),
        ("cd -", "$PWD", "the folder is changed by cd in line 1"),
        ("D=$(realpath x)", "$(cd $D && pwd)", "$(cd $D && pwd) is the output of a program"),
        ("", "$0", "the name of the script is not known"),
        ("", "$((1 / 0))", "bash refuses $((1 / 0)): division by 0"),
        ("", "$2", "the script has no argument $2"),
        ("X=Y Y=X", "$((X + 1))", "variables name each other"),
        ("N=4\nwhile false; do ((N++)); done", "$N", "N is set under the `while` in line 2"),
        ("if [ -f f ]; then echo ${N:=4}; fi", "${N:-5}", "N is set under the `if` in line 1"),
        ("declare -i N=3\nN+=2", "$N", "N is declared as a number in line 1"),
        ("declare -u N=x", "$N", "N is declared in upper case in line 1"),
        ("export $(cat .env)", "${N:-5}", "the variable N may be set by a file or command that is not read"),
        ('while read L; do export "$L"; done < .env', "${N:-5}", "N may be set by a file or command"),
        ("A=(1 2 3)\nunset 'A[0]'", "${A[0]}", "an element of A is unset"),
        ("f() { unset N; }\nN=4\nf", "${N:-5}", "N is set by f in line 3"),
        ("pushd /x", "$PWD", "PWD is set by pushd in line 1"),
        ("A=(1 2)\nIFS=,", '"[${A[*]}]"', "IFS is set, by which bash joins and splits values"),
        ("X=1,2\nIFS=,", "$X", "IFS is set, by which bash joins and splits values"),
        ("K=7B\ndeclare -A M=([7B]=1)", "${M[$K]}", "M is an associative array, in line 2"),
        ("", "<(echo 1)", "<(echo 1) is the output of a program"),
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
