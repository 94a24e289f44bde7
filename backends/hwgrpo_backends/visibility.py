"""Variables that choose devices: what they leave of a host's devices, and what to do where they leave too few.

Advice is safe on shared hosts: in a scheduler's job it never takes away the variable that keeps the job to its own
devices.
"""

from __future__ import annotations

from hwgrpo_backends import surroundings
from hwgrpo_backends.backend import Backend
from hwgrpo_backends.facts import Facts

HIDES_ALL = ("", "-1", "none", "void", "nodevfiles")

Problem = tuple[str, str]
"""What is wrong, and the fix."""


def in_order(facts: Facts, backend: Backend) -> tuple[str, ...]:
    """Return the variables that choose this process's devices, in the order in which they are applied."""
    names = (backend.visible_env, *backend.conflicts)
    chosen = next((name for name in names if name and name in facts.variables), backend.visible_env)
    return (*backend.filters, *((chosen,) if chosen else ()))


def settings_of(facts: Facts, variables: tuple[str, ...]) -> str:
    """Return those of `variables` that are set, as text: "A='1' and B='2'"."""
    return " and ".join(f"{name}={facts.variables[name]!r}" for name in variables if name in facts.variables)


def hidden_by(facts: Facts, variables: tuple[str, ...]) -> str | None:
    """Return the first of `variables` whose value hides every device, as NAME='value'."""
    for name in variables:
        value = facts.variables.get(name)
        if value is not None and value.split(",")[0].strip().lower() in HIDES_ALL:
            return f"{name}={value!r}"
    return None


def visible_count(facts: Facts, variables: tuple[str, ...], present: int, counted: bool = True) -> int:
    """Return how many of `present` devices the visibility variables leave to this process.

    Args:
        variables: in the order of application; each renumbers from 0 the devices that the previous one leaves.
        counted: whether `present` is their number, not a guess.
    """
    for name in (name for name in variables if name in facts.variables):
        left = 0
        for entry in map(str.strip, facts.variables[name].split(",")):
            # a number without a device ends the list; anything else is an identifier, e.g. GPU-1234
            if entry.lower() in HIDES_ALL or (counted and entry.isdigit() and int(entry) >= present):
                break
            left += 1
        present, counted = min(present, left) if counted else left, True  # what a list leaves is counted
    return present


def unhide(facts: Facts, name: str) -> str:
    """Return what to do about a variable that hides every device."""
    job = surroundings.job(facts.variables)
    if job is None:
        return f"unset {name} to use them"
    if own := surroundings.job_devices(facts.variables):
        return f"leave {name} as the {job.name} job sets it: {own} says that it has devices"
    return f"ask for devices: {job.request}; {name} is how a {job.name} job without them has none"


def nothing_left(facts: Facts, variables: tuple[str, ...], present: int, counted: bool = True) -> Problem | None:
    """Return the problem and its fix where the variables leave none of `present` devices; arguments as above."""
    given = [name for name in variables if name in facts.variables]
    if visible_count(facts, variables, present, counted):
        return None
    *outer, last = given
    before = visible_count(facts, tuple(outer), present, counted)
    if not before:  # the first one names no device of this host
        outer, last, before = [], outer[0], present
    nested = f": {last} numbers from 0 the devices that {outer[-1]} leaves" if outer else ""
    nested = nested or f": numbered from 0 to {before - 1}"
    verb = "leave" if len(given) > 1 else "leaves"
    reason = f"{settings_of(facts, variables)} {verb} none of {present} devices{nested}"
    numbers = f"name numbers from 0 to {before - 1} in {last}"
    # Without the last one the process has what the others leave it: never another job's devices.
    alone = not outer and surroundings.job(facts.variables) is not None
    return reason, numbers if alone else f"unset {last}, or {numbers}"


def may_be_why(facts: Facts, variables: tuple[str, ...]) -> list[str]:
    """Return what to do, of this process's own surroundings, where torch finds no device: at most one remedy."""
    job = surroundings.job(facts.variables)
    if job is not None and not surroundings.job_devices(facts.variables):
        return [f"see that the {job.name} job asks for devices: {job.request}"]
    given = [name for name in variables if name in facts.variables]
    return [f"unset {given[-1]}"] if given and job is None else []


def contradictions(facts: Facts, backend: Backend) -> list[Problem]:
    """Return what is wrong with variables that are set together, judged by their effect.

    Nested ones are right where the last finds all devices that it names: a scheduler sets the first, the user the
    second.
    """
    found = []
    names = [name for name in (backend.visible_env, *backend.conflicts) if name and name in facts.variables]
    if len({facts.variables[name] for name in names}) > 1:
        first, *others = names
        found.append(
            (
                f"{settings_of(facts, tuple(names))} choose different devices, and only {first} counts",
                f"unset {' '.join(others)}, or set it to the same",
            )
        )
    order = in_order(facts, backend)
    if all(name in facts.variables for name in order) and len(order) > 1 and not hidden_by(facts, order):
        last = order[-1]
        wanted = len(facts.variables[last].split(","))
        before = visible_count(facts, order[:-1], 0, counted=False)
        left = visible_count(facts, order, 0, counted=False)
        if left < wanted:
            found.append(
                (
                    f"{settings_of(facts, order)} leave {left} of the {wanted} devices that {last} names: it numbers "
                    f"from 0 the {before} that {' and '.join(order[:-1])} leaves",
                    f"unset {last}, or name numbers from 0 to {before - 1} in it",
                )
            )
    return found
