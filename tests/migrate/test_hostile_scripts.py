"""Scripts and files that a stranger wrote to harm whoever imports them: read in bounded time, refused in words."""

import itertools
import time
from pathlib import Path

import pytest

from hwgrpo.cli.main import main
from hwgrpo.errors import ConfigError
from hwgrpo.migrate.imports.reading_budget import MOST_CHARACTERS
from hwgrpo.migrate.imports.shell_script import read_script
from tests.migrate.hostile_scripts import COMMAND, hostile_scripts

SCRIPTS = dict(hostile_scripts("made"))
GROUPS = 8
CPU_SECONDS = 20.0
"""Of one import: most take 0.03, and what is not bounded takes minutes."""


def check(system: str, file: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return what is wrong with how a file is imported."""
    start = time.process_time()
    code = main(["import", system, str(file), "--drop-refused"])
    seconds = time.process_time() - start
    text = "".join(capsys.readouterr())
    unprintable = {each for each in text if not each.isprintable() and each != "\n"}
    return [
        *([f"it ended with {code}"] if code not in (0, 2) else []),
        *([f"it took {seconds:.1f} s"] if seconds > CPU_SECONDS else []),
        *([f"it printed {len(text)} characters"] if len(text) > 400_000 else []),
        *([f"it printed {unprintable}"] if unprintable else []),
    ]


@pytest.mark.parametrize("group", range(GROUPS))
def test_a_hostile_script_is_read_in_bounds_and_never_run(group, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BIG", "b" * 100_000)
    wrong = {}
    for name, text in itertools.islice(SCRIPTS.items(), group, None, GROUPS):
        (tmp_path / "run.sh").write_text(text, encoding="utf-8")
        if found := check("verl", tmp_path / "run.sh", capsys):
            wrong[name] = found
    assert not wrong
    assert [each.name for each in tmp_path.iterdir()] == ["run.sh"]


def test_the_hostile_scripts_are_many():
    assert len(SCRIPTS) >= 300


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("#" * 200_000 + f"\n{COMMAND}", "more than 100000"),
        ("A=x\n" + "A=$A$A\n" * 40 + COMMAND, f"become more than {MOST_CHARACTERS} characters"),
        (f"{COMMAND} a={{1..999999999}}", "line 1: the words of the script become more than"),
        (f"{COMMAND} a={'{a,b}' * 60}", "line 1: more than 50 levels deep"),
        ("if :; then\n" * 60 + COMMAND, "line 52: more than 50 levels deep"),
        (f"A={'${A:-' * 60}x{'}' * 60}\n{COMMAND} a.b=$A", "line 1: more than 50 levels deep"),
        (f"A=((a))\n{COMMAND}", "'(' in an array"),
        (f"A=(B=(a))\n{COMMAND}", "'(' in an array"),
    ],
)
def test_a_script_beyond_a_bound_is_refused_with_its_line(script, message):
    with pytest.raises(ConfigError, match=r"run\.sh") as error:
        read_script(script, "run.sh", [], {})
    assert message in str(error.value)


def test_lines_are_counted_in_linear_time(monkeypatch):
    counted = []

    class Counted(str):
        def count(self, sub: str, start: int = 0, end: int | None = None) -> int:  # type: ignore[override]
            counted.append((len(self) if end is None else end) - start)
            return super().count(sub, start, end)

        def replace(self, *_: object) -> "Counted":  # type: ignore[override]
            return self

    text = Counted("a=1\n" * 10_000 + COMMAND)
    read_script(text, "run.sh", [], {})
    assert sum(counted) < 3 * len(text)


NUMBERS = ("0", "-1", "1e308", "1e999", "-1e999", ".nan", "9" * 390, "9" * 5000, "true", "[]", "{}", "''", "[1]")
KEYS = {
    "verl": ("data.train_batch_size", "actor_rollout_ref.rollout.n", "trainer.n_gpus_per_node", "actor_rollout_ref"),
    "trl": ("num_generations", "per_device_train_batch_size", "generation_batch_size", "learning_rate", "warmup_steps"),
}
FORMS = {
    "doubled": "a0: x\n" + "".join(f"a{i}: '${{a{i - 1}}}${{a{i - 1}}}'\n" for i in range(1, 60)),
    "doubled lists": "a0: x\n" + "".join(f"a{i}: ['${{a{i - 1}}}', '${{a{i - 1}}}']\n" for i in range(1, 60)),
    "doubled by siblings": "b:\n  a0: x\n" + "".join(f"  a{i}: '${{.a{i - 1}}}${{.a{i - 1}}}'\n" for i in range(1, 60)),
    "a section in itself": "a: {b: '${a}', c: '${a}'}\n",
    "two that name each other": "a: '${b}'\nb: '${a}'\n",
    "a chain": "a0: x\n" + "".join(f"a{i}: '${{a{i - 1}}}'\n" for i in range(1, 5000)),
    "nested": "a: '" + "${" * 3000 + "}" * 3000 + "'\n",
    "open": "a: '" + "${" * 100_000 + "'\n",
    "many": "x: 1\na: '" + "${x}" * 50_000 + "'\n",
    "sections": "b: {" + ", ".join(f"k{i}: xxxxxxxxxx" for i in range(500)) + "}\n"
    + "".join(f"a{i}: '${{b}}'\n" for i in range(500)),
    "dots": "a" + ".a" * 100_000 + ": 1\n",
    "bomb": "a: &a [x, x, x, x, x, x, x, x, x]\n"
    + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in itertools.pairwise("abcdefghij")),
    "an anchor in itself": "a: &a [*a]\n",
    "keys": "".join(f"k{i}: 1\n" for i in range(60_000)),
    "keys nearly right": "".join(f"num_generation{i}: 1\n" for i in range(3000)),
    "a long value": "a: " + "x" * 3_000_000,
    "a long value of a name": "trainer.experiment_name: " + "x" * 300_000 + "\nrun_name: " + "x" * 300_000 + "\n",
    "a long key": "x" * 100_000 + ": 1\n",
    "deep": "a: " + "[" * 5000 + "]" * 5000,
    "a tag": "a: !!python/object/apply:os.system [touch made]\n",
    "a text that steers": 'a: "\\e[2J\\a\\r\\u202e\\x9b"\nrun_name: "\\e[2J"\n',
    "a name that steers": 'trainer.experiment_name: "\\e[2J\\u2028x"\nrun_name: "\\e[2J"\n',
    "half a character": 'trainer: {experiment_name: "\\ud800"}\nrun_name: "\\ud8000\\ud801"\n',
    "a resolver": "trainer.experiment_name: ${eval:__import__('os').system('touch made')}\n",
    "itself as default": "defaults: [run, run, ./run.yaml, ../x/run]\n",
    "no mapping": "[1, 2]",
    "nothing": "",
    "NUL": "a: 'x\0y'\n",
    "a number of the environment": "data.train_batch_size: ${oc.env:BIG}\nnum_generations: ${oc.env:BIG}\n",
}  # fmt: skip


@pytest.mark.parametrize("system", KEYS)
def test_a_hostile_file_of_settings_is_read_in_bounds(system, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BIG", "9" * 5000)
    files = FORMS | {f"{key}: {number[:9]}": f"{key}: {number}\n" for key in KEYS[system] for number in NUMBERS}
    wrong = {}
    for name, text in files.items():
        (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
        if found := check(system, tmp_path / "run.yaml", capsys):
            wrong[name] = found
    assert not wrong
    assert [each.name for each in tmp_path.iterdir()] == ["run.yaml"]
