"""Random programs of bash, of conditions, branches and groups in each other: what is read is what bash computes."""

import random
import subprocess

import pytest

from hwgrpo.errors import ConfigError
from hwgrpo.migrate.imports.shell_script import read_script

PROGRAMS = 200
WORDS = '"$X.$Y.$A.$B.$N"'
PATTERNS = ("a", "b | c", "(a|c", '"x"*', "?", "*", "$A")


class Program:
    """A random program: every statement leaves its number in what it sets."""

    def __init__(self, seed: int) -> None:
        self._draw, self._number = random.Random(seed), 0
        self._stops = self._draw.random() < 0.2
        """Whether a command that fails ends it."""
        self._in_groups = 0
        first = "set -e\n" if self._stops else ""
        self.text = f"{first}A=a B=xx N=2 X= Y= Z=\n{self._block(3)}\n{self._block(2)}"

    def _condition(self, depth: int) -> str:
        draw = self._draw
        simple = (
            f'[ "$A" = {draw.choice("abc")} ]',
            f"[[ $B == {draw.choice(('x*', 'y', '*'))} ]]",
            draw.choice(("true", "false")),
            f"(( N > {draw.randrange(4)} ))",
            '! [ -z "$' + draw.choice("AZ") + '" ]',
        )
        kind = draw.randrange((8 if self._stops else 9) if depth else 5)
        if kind < 5:
            return simple[kind]
        listed = f"{self._condition(depth - 1)} {draw.choice(('&&', '||'))} {self._condition(depth - 1)}"
        negated = draw.choice(("", "! "))
        groups = {5: f"{negated}{{ {listed}; }}", 6: listed, 7: f"{negated}( {listed} )"}
        return groups.get(kind) or f"{listed}; X=${{X}}c"

    def _statement(self, depth: int) -> str:
        draw = self._draw
        self._number += 1
        number = self._number
        kind = draw.randrange(10 if depth else 3)
        if kind == 0:
            return f"X=${{X}}{number}"
        if kind == 1:
            return draw.choice((f"A={draw.choice('abc')}", f"N={draw.randrange(5)}", f"B={draw.choice(('xx', 'y'))}"))
        if kind == 2:
            return draw.choice(
                ("X=*; X=$X$N &\nwait", f"Y=${{Y}}{number} | true", f"true | N={number}", self._failing())
            )
        if kind == 3:
            branches = [f"{self._condition(2)}; then\n{self._block(depth - 1)}\nelif {self._condition(1)}; then "]
            return f"if {branches[0]}{self._block(depth - 1)}\nelse\n{self._block(depth - 1)}\nfi"
        if kind == 4:
            branches = [
                f"{draw.choice(PATTERNS)}) {self._block(depth - 1)}{draw.choice((';;', chr(10) + ';;'))}\n"
                for _ in range(draw.randrange(1, 4))
            ]
            return f'case "${draw.choice("AB")}" in\n{"".join(branches)}esac'
        if kind == 5:
            return f"{self._condition(2)} && X=${{X}}{number} || Y={number}"
        if kind == 6:
            return self._statement(depth - 1) + "\n" + self._failing()
        self._in_groups += 1
        block = self._block(depth - 1)
        self._in_groups -= 1
        groups = (
            f"{{ {block}\n}}",
            f"{self._condition(1)} || {{ {block}\n}}",
            f"{{ {block}\n}} {draw.choice(('&', '| cat'))}\nwait",
            f"{draw.choice(('true |', 'true && true |', 'X=0 &&'))} {{ {block}\n}} {draw.choice(('', '| cat', '&'))}",
            f"if true; then {block}\nfi {draw.choice(('', '| cat', '&'))}",
        )
        return draw.choice(groups)

    def _failing(self) -> str:
        """Return a command that ends the script where it fails, if it is known to count."""
        return self._condition(0) if self._stops and not self._in_groups else "true"

    def _block(self, depth: int) -> str:
        return "\n".join(self._statement(depth) for _ in range(self._draw.randrange(1, 3)))


def test_random_programs_set_what_bash_sets():
    found, ended = set(), 0
    for seed in range(PROGRAMS):
        text = Program(seed).text
        bash = subprocess.run(["bash"], input=f"{text}\necho {WORDS}", capture_output=True, text=True, check=False)
        if bash.returncode:
            with pytest.raises(ConfigError, match="the script ends here, by a command that fails after set -e"):
                read_script(f"{text}\npython3 -m verl.trainer.main_ppo", "run.sh", [], {})
            ended += 1
            continue
        command = read_script(f"{text}\npython3 -m verl.trainer.main_ppo a.b={WORDS}", "run.sh", [], {})
        assert command.marked == [f"a.b={bash.stdout.strip()}"], text
        found.add(bash.stdout)
    assert len(found) > PROGRAMS // 4
    assert ended > PROGRAMS // 40
