"""Random programs of bash, of conditions, branches and groups in each other: what is read is what bash computes."""

import random
import subprocess

from hwgrpo.imports.shell_script import read_script

PROGRAMS = 150
WORDS = '"$X.$Y.$A.$B.$N"'
PATTERNS = ("a", "b | c", "(a|c", '"x"*', "?", "*", "$A")


class Program:
    """A random program: every statement leaves its number in what it sets."""

    def __init__(self, seed: int) -> None:
        self._draw, self._number = random.Random(seed), 0
        self.text = f"A=a B=xx N=2 X= Y= Z=\n{self._block(3)}\n{self._block(2)}"

    def _condition(self, depth: int) -> str:
        draw = self._draw
        simple = (
            f'[ "$A" = {draw.choice("abc")} ]',
            f"[[ $B == {draw.choice(('x*', 'y', '*'))} ]]",
            draw.choice(("true", "false")),
            f"(( N > {draw.randrange(4)} ))",
            '! [ -z "$' + draw.choice("AZ") + '" ]',
        )
        kind = draw.randrange(9 if depth else 5)
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
        kind = draw.randrange(7 if depth else 2)
        if kind == 0:
            return f"X=${{X}}{number}"
        if kind == 1:
            return draw.choice((f"A={draw.choice('abc')}", f"N={draw.randrange(5)}", f"B={draw.choice(('xx', 'y'))}"))
        if kind == 2:
            branches = [f"{self._condition(2)}; then\n{self._block(depth - 1)}\nelif {self._condition(1)}; then "]
            return f"if {branches[0]}{self._block(depth - 1)}\nelse\n{self._block(depth - 1)}\nfi"
        if kind == 3:
            branches = [
                f"{draw.choice(PATTERNS)}) {self._block(depth - 1)}{draw.choice((';;', chr(10) + ';;'))}\n"
                for _ in range(draw.randrange(1, 4))
            ]
            return f'case "${draw.choice("AB")}" in\n{"".join(branches)}esac'
        if kind == 4:
            return f"{self._condition(2)} && X=${{X}}{number} || Y={number}"
        if kind == 5:
            return f"{{ {self._block(depth - 1)}\n}}"
        return f"{self._condition(1)} || {{ {self._block(depth - 1)}; }}"

    def _block(self, depth: int) -> str:
        return "\n".join(self._statement(depth) for _ in range(self._draw.randrange(1, 3)))


def test_random_programs_set_what_bash_sets():
    found = set()
    for seed in range(PROGRAMS):
        text = Program(seed).text
        bash = subprocess.run(["bash"], input=f"{text}\necho {WORDS}", capture_output=True, text=True, check=True)
        command = read_script(f"{text}\npython3 -m verl.trainer.main_ppo a.b={WORDS}", "run.sh", [], {})
        assert command.marked == [f"a.b={bash.stdout.strip()}"], text
        found.add(bash.stdout)
    assert len(found) > PROGRAMS // 4
