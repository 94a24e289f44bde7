"""Run scripts that a stranger wrote to harm whoever reads them: name -> text; a few forms times what they wrap."""

from __future__ import annotations

from collections.abc import Iterator

COMMAND = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=a "
MANY, LONG = 5_000, 60_000
PAIRS = {
    "(": ")",
    "{": "}",
    "[": "]",
    "$(": ")",
    "${a:-": "}",
    "$((": "))",
    "$[": "]",
    '"$(': ')"',
    "`": "`",
    "<(": ")",
}
"""What opens and closes."""
DOUBLED = {
    "a text": ("A=x", "A=$A$A"),
    "quoted": ("A='x y'", 'A="$A $A"'),
    "by +=": ("A=x", "A+=$A"),
    "an array": ("A=(x y)", 'A=("${A[@]}" "${A[@]}")'),
    "an array by +=": ("A=(x y)", "A+=(${A[@]})"),
    "a default": ("A=x", "A=${B:-$A$A}"),
    "replaced": ("A=xx", "A=${A//x/xxxx}"),
    "arguments": ("set -- x y", 'set -- "$@" "$@"'),
    "exported": ("export A=x", "export A=$A$A"),
    "by printf": ("A=x", "A=$(dirname $A$A/$A$A)"),
    "of the environment": ("A=$BIG", "A=$A$A"),
    "a setting": ("A=a.b=", "A=$A$A"),
}
"""First line, line that is repeated."""
BRACES = ("{a,b}", "{1..99}", "{a,{b,c}}", "{a..z}", "{1..999999999}", "{-9..9..-3}", "{,}", "{01..999999}")
NUMBERS = {
    "huge": "9" * 100_000,
    "hexadecimal": "0x" + "f" * 5000,
    "a long base": "9" * 5000 + "#1",
    "float": "1e999",
    "not a number": "nan",
    "infinite": "-inf",
    "other digits": "٣٤",
    "a square": "²",
    "a NUL": "\0",
    "empty": "",
}
USED = {
    "a count": "trainer.nnodes={}",
    "a batch": "data.train_batch_size={}",
    "an index": "a.b=${{A[{}]}}",
    "a slice": "trainer.nnodes=${{HOME:{}:{}}}",
    "an expression": "trainer.nnodes=$(({} * {}))",
    "a shift": "trainer.nnodes=$((1 << {}))",
    "an argument": "trainer.nnodes=${{{}}}",
    "a range": "data.train_files={{{}..{}}}",
    "a name": "trainer.experiment_name={}",
}
MARKS = ("\ue0000\ue001", "\ue000" + "9" * 5000 + "\ue001", "$'\\ud8000\\ud801'", "$'\\ud8020\\ud803'", "\ufdd0")
"""What may be taken for marks that the reader makes itself."""
STEERS = ("\x1b[2J\x1b[31m", "\x9b2J", "\r", "\u202e", "\u2028", "\x1b]0;title\x07", "\x85")
"""What moves a terminal's cursor, hides text or ends a line."""
PLACES = {
    "a value": COMMAND + "trainer.experiment_name='{}'",
    "a key": COMMAND + "'a{}.b'=1",
    "a number": COMMAND + "trainer.nnodes='{}'",
    "a choice": COMMAND + "algorithm.adv_estimator='{}'",
    "a list": COMMAND + "data.val_files=\"['a{}','b']\"",
    "a command": "'x{}' a\n" + COMMAND,
    "a variable": "A='{}'\nexport $A\n" + COMMAND + "trainer.project_name=$A",
    "a mapping": COMMAND + "+custom_reward_function.reward_kwargs.a=\"{{k{}: 'v{}'}}\"",
    "an option": COMMAND + "'--x{}'",
}
RUNS = {
    "a file": "touch {}",
    "a substitution": "A=$(touch {})",
    "a backquote": "A=`touch {}`",
    "eval": "eval 'touch {}'",
    "a trap": "trap 'touch {}' EXIT",
    "a process": "cat <(touch {})",
    "a redirection": "echo x > {}",
    "an index": "A[$(touch {})]=1",
    "an expression": "echo $((A[$(touch {})]))",
    "a default": ": ${{A:=$(touch {})}}",
    "source": "source <(echo touch {})",
    "a here text": "cat <<E\n$(touch {})\nE",
    "a prompt": "A='$(touch {})'\necho ${{A@P}}",
    "exec": "exec touch {}",
}
"""Ways to run a command."""
SCANS = {
    "lines": "a=1\n" * 12_000,
    "short lines": ":\n" * 28_000,
    "comments": "#\n" * 28_000,
    "blank lines": "\n" * LONG,
    "continued": "\\\n" * 24_000,
    "continued with comments": "\\\n#\n" * 12_000,
    "semicolons": "a;" * 24_000,
    "a long word": "x" * LONG,
    "a long quote": "'" + "x" * LONG + "'",
    "a long double quote": '"' + "x" * LONG + '"',
    "many words": "x " * 24_000,
    "many quotes": "''" * 24_000,
    "words in brackets": "[[ " + "x " * 20_000 + "]]",
    "many tests": "[[ a = b ]]\n" * 4_000,
    "operators": "a && " * 10_000 + "a",
    "ors": "false || " * 6_000 + "a",
    "redirections": "a >b " * 10_000,
    "here texts": "a <<E\nE\n" * 6_000,
    "a long here text": "a <<E\n" + "x\n" * 20_000 + "E",
    "no end of a here text": "a <<E\n" + "x\n" * 20_000,
    "exports": "export a=1\n" * 5_000,
    "exports of many": "".join(f"export a{i}=1\n" for i in range(4_000)),
    "declares": "declare " + " ".join(f"a{i}=1" for i in range(4_000)),
    "elements": "".join(f"A[{i}]=x\n" for i in range(4_000)),
    "elements that are read": "A=(" + "x " * 4_000 + ")\n" + "B=${A[19999]}\n" * 2_000,
    "functions": "".join(f"f{i}() {{ A{i}=1; }}\n" for i in range(2_000)),
    "calls": "".join(f"f() {{ A{i}=1; }}\n" for i in range(5_000)) + "f\n" * 2_000,
    "subshells": "(a=1)\n" * 8_000,
    "open subshells": "(" * MANY,
    "loops": "for i in a; do\n" * MANY,
    "conditions": "if true; then\n" * MANY,
    "closed conditions": "if true; then :; fi\n" * 2_000,
    "groups": "{ " * MANY,
    "cases": "case a in\n" * MANY,
    "closed": ") } fi done esac\n" * 2_000,
    "trimmed": "A=" + "a" * 10_000 + "\nB=${A%%*b}",
    "trimmed by many": "A=" + "a" * 1000 + "\nB=${A##" + "*a" * 500 + "b}",
    "compared": "A=" + "a" * 1000 + "\n[[ $A == " + "*a" * 500 + "b ]]",
    "dollars": "$" * 20_000,
    "backslashes": "\\" * 20_000,
    "at the end": COMMAND + "\\",
    "open": "'",
    "open brackets": "{" * 20_000,
    "open lists": "A={" + ",{" * 10_000,
    "arrays": "A=(" * MANY,
    "escapes": "A=$'" + "\\x41" * 10_000 + "'",
    "an expression": "A=$((" + "1+" * 16_000 + "1))",
    "expressions that name each other": "".join(
        f"A{i}='{'+'.join([f'A{i + 1}'] * 20)}'\n" for i in range(15)
    ) + "B=$((A0))",
    "signs": "A=$((" + "-" * 10_000 + "1))",
    "choices": "A=$((" + "1?" * 4_000 + "1" + ":1" * 4_000 + "))",
    "tildes": "A=" + "~/:" * 10_000,
    "folders": "cd a\n" * 4_000,
    "names": "A=$(dirname " + "a/" * 10_000 + ")",
    "too long": "#" * 1_000_000,
}  # fmt: skip


def hostile_scripts(file: str) -> Iterator[tuple[str, str]]:
    """Yield names and scripts; those that run something would make `file`."""
    for opens, closes in PAIRS.items():
        for depth in (40, MANY):
            yield f"{depth} of {opens}", f"A={opens * depth}{closes * depth}\n{COMMAND}a.b=$A"
        yield f"open {opens}", f"{COMMAND}a.b={opens * MANY}"
        yield f"one of {opens} left", f"{COMMAND}a.b={opens}x"
    for name, (first, again) in DOUBLED.items():
        yield f"doubled, {name}", "\n".join([first, *[again] * 60, f"{COMMAND}a.b=$A"])
        yield f"doubled in few lines, {name}", "\n".join([first, ";".join([again] * 2000), f'{COMMAND}a.b=$A "$@"'])
    for braces in BRACES:
        for count in (3, 12, 5000):
            yield f"{count} of {braces}", f"{COMMAND}data.val_files={braces * count}"
        yield f"exported {braces}", f"export A{braces * 10}=x\n{COMMAND}"
    for number, text in NUMBERS.items():
        for use, form in USED.items():
            yield f"{number} as {use}", COMMAND + form.format(text, text)
    for text in (*MARKS, *STEERS):
        for place, form in PLACES.items():
            yield f"{text[:9]!r} in {place}", form.format(text, text)
    for how, form in RUNS.items():
        yield f"runs by {how}", f"{form.format(file)}\n{COMMAND}a.b=$A"
        yield f"runs by {how} in a condition", f"if {form.format(file)}; then A=1; fi\n{COMMAND}a.b=$A"
    for name, text in SCANS.items():
        yield f"scan, {name}", f"{text}\n{COMMAND}trainer.nnodes=2"
