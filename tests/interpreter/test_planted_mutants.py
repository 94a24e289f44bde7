"""The tests of the row kernels see what they are there for: plant a mistake of any kind, and one of them fails."""

import pytest
from hwgrpo_kernels import rows_triton
from triton.runtime.errors import InterpreterError

from tests.interpreter.mutants import Mutant, load, sources_with, unchanged
from tests.interpreter.row_mutants import MUTANTS
from tests.interpreter.watched_memory import REFUSED

CASES = {f"{each.case}": each.case for each in MUTANTS}.values()


@pytest.mark.parametrize("number,mutant", list(enumerate(MUTANTS)), ids=[each.name for each in MUTANTS])
def test_the_suite_sees(number, mutant, monkeypatch, tmp_path_factory):
    folder = tmp_path_factory.mktemp(f"row_mutant_{number}_", numbered=False)
    monkeypatch.setattr(rows_triton, "_kernels", load(sources_with(mutant), folder))
    with pytest.raises((AssertionError, InterpreterError)) as seen:
        mutant.case.run()
    # What fails for another reason is not a wrong kernel but one that cannot run.
    assert seen.type is AssertionError or REFUSED in str(seen.value)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The kernels as they are, loaded like a mutant."""
    return load(unchanged(), tmp_path_factory.mktemp("row_kernels_unchanged", numbered=False))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.test.__name__.removeprefix("test_"))
def test_the_suite_has_the_case_of_a_mutant_and_it_passes_for_an_unchanged_copy(case, copy, monkeypatch):
    assert case.is_run_by_the_suite(), case
    monkeypatch.setattr(rows_triton, "_kernels", copy)
    case.run()


@pytest.mark.parametrize(
    "snippet,where", [("no such line", "nowhere"), ("import triton\n", "1 times in triton_kernels.py, 1")]
)
def test_a_mutant_of_source_that_has_changed_since_is_refused(snippet, where):
    with pytest.raises(ValueError, match=rf"'stale' replaces a snippet that must be once in .*, and is {where}"):
        sources_with(Mutant("stale", MUTANTS[0].case, ((snippet, ""),)))
