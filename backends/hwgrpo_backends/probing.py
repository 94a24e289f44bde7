"""Helpers shared by the probes of accelerator families: pure functions of facts."""

from __future__ import annotations

import re
from collections.abc import Iterable

from hwgrpo_backends.backend import Hardware, State, Verdict
from hwgrpo_backends.facts import Facts

# transformers and accelerate import these whenever they are installed (not only for their device), so
# one that is broken stops the trainer on every backend, even where TORCH_DEVICE_BACKEND_AUTOLOAD=0 saves torch.
IMPORTED_BY_OTHERS = ("torch_npu",)
HIDES_ALL = ("", "-1", "none", "void", "nodevfiles")
GROUPS = "add this user to the group that owns them (render, video or HwHiAiUser), or pass them to the container"

Problem = tuple[str, str]
"""Why a backend cannot work, and the fix."""


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
            if entry in HIDES_ALL or (counted and entry.isdigit() and int(entry) >= present):
                break
            left += 1
        present = min(present, left)
    return present


def torch_problem(facts: Facts) -> Problem | None:
    """Return why torch itself cannot be used here, or None. Whether it imports is known from tier 1 only."""
    if file := facts.shadows.get("torch"):
        return f"torch is hidden: {file} is imported in its place", shadow_fix([file])
    if facts.torch_version is None:
        return "torch is not installed", "install torch: bash scripts/setup.sh chooses the build for this host"
    torch = facts.torch
    if torch is None:
        return None
    if not torch.imported:
        cause = torch.errors[-1] if torch.errors else "no message"
        if not torch.without_plugins and facts.shadows:
            files = list(facts.shadows.values())
            return f"`import torch` fails: {cause}; {', '.join(files)} may hide its modules", shadow_fix(files)
        if not torch.without_plugins:
            return f"`import torch` fails: {cause}", "reinstall torch: bash scripts/setup.sh"
        broken = broken_plugins(facts)
        if not broken:  # loading plug-ins fails before any is known
            return f"`import torch` fails: {cause}", plugin_fix(facts, broken)
        detail = next((torch.plugins[name][-1] for name in broken if torch.plugins.get(name)), cause)
        return f"`import torch` fails because of the plug-in {', '.join(broken)}: {detail}", plugin_fix(facts, broken)
    for name in IMPORTED_BY_OTHERS:
        if errors := torch.plugins.get(name):
            return f"{name} is installed but does not import: {errors[-1]}", plugin_fix(facts, [name])
    return None


def shadow_fix(files: Iterable[str]) -> str:
    """Return what to do about files that are imported in the place of modules. Set-up cannot: they are not its own."""
    return f"rename {', '.join(files)}, or take that folder off PYTHONPATH"


def broken_plugins(facts: Facts) -> list[str]:
    """Return the plug-ins that may be why `import torch` fails: those that fail on their own, else all there are."""
    tried = facts.torch.plugins if facts.torch else {}
    return [name for name, errors in tried.items() if errors] or list(facts.torch_plugins)


def plugin_fix(facts: Facts, plugins: Iterable[str]) -> str:
    """Return what to do about plug-ins of torch that do not import, by the names of their modules."""
    plugins = list(plugins)
    if facts.unreadable and not plugins:
        return f"pip install --force-reinstall {' '.join(facts.unreadable)}"
    owners = dict(entry.removesuffix(")").split(" (", 1) for entry in facts.entry_points.get("torch.backends", ()))
    packages = " ".join(owners.get(name, name).replace("_", "-") for name in plugins)
    if "torch_npu" not in plugins:
        return f"repair it, or pip uninstall {packages} where its device is not meant to be used"
    repair = f"source {facts.cann_script or 'the set_env.sh of CANN'}"
    if "ASCEND_HOME_PATH" in facts.variables:  # that has been done
        repair = "see that the Ascend driver, CANN and torch-npu match"
    return npu_remedy(facts, repair, packages)


def npu_remedy(facts: Facts, repair: str, packages: str) -> str:
    """Return what to do about torch-npu that does not work: the likelier way of two comes first.

    Args:
        repair: what makes it work.
        packages: what to uninstall otherwise.
    """
    signs = (*facts.device_nodes, *facts.driver_files)
    if facts.npu_driver or any(re.match("(/dev/)?davinci", sign) for sign in signs):
        return f"{repair}, or pip uninstall {packages} where its device is not meant to be used"
    return f"pip uninstall {packages}, as there is no sign of an NPU here; or, to use one, {repair}"


def no_nodes_fix(facts: Facts, access: str) -> str:
    """Return what gives this process the nodes of devices whose driver the kernel has.

    Args:
        access: how to give a container access to them.
    """
    # A container may show no sign of itself.
    return access if facts.container else f"{access}; outside of a container load the driver's nodes (modprobe, udev)"


def judge(
    facts: Facts,
    *,
    chip: str,
    nodes: tuple[str, ...],
    where: str,
    variables: tuple[str, ...],
    device_type: str,
    claimed: bool,
    problem: Problem | None,
    broken_fix: str,
    present: int | None = None,
    counted: bool = True,
    driver: tuple[str, ...] = (),
    companions: str = "",
    access: str = "",
) -> Verdict:
    """Judge an accelerator family from installed packages, device nodes and, when tier 1 ran, torch's facts.

    Args:
        chip: description of one device ("an NVIDIA GPU").
        nodes: the family's nodes under /dev.
        where: where they were looked for, for the message.
        variables: visibility variables that the family obeys, in the order in which they are applied.
        claimed: the installed stack was built for this family.
        problem: problem found by the family's own rules; it decides.
        broken_fix: what to do when the stack is right, the device is there, and torch cannot use it.
        present: how many devices there are, where that is not the number of nodes.
        counted: whether `present` is their number, not a guess.
        driver: files by which the family's driver shows itself, nodes or not.
        companions: pattern of nodes that the family's own are of no use without.
        access: how to give a container access to the nodes.
    """
    present = len(nodes) if present is None else present
    withheld = claimed and not present and bool(driver)  # the kernel has devices that this process cannot access
    sign = f"{chip} is here ({where})" if present else f"the driver of {chip} is here ({', '.join(driver)})"
    hidden = hidden_by(facts, variables) if present or claimed else None
    hardware: Hardware = "hidden" if hidden else "present" if present or withheld else "none"
    device = facts.torch.devices.get(device_type) if facts.torch else None

    def verdict(state: State, reason: str, fix: str = "", devices: int = 0, hardware: Hardware = hardware) -> Verdict:
        return Verdict(state=state, reason=reason, fix=fix, devices=devices, claimed=claimed, hardware=hardware)

    if problem:
        reason, fix = problem
        if present or withheld:
            return verdict("unusable", f"{sign}, but {reason}", fix)
        # No hardware: nothing to repair, unless torch itself is broken.
        return verdict("unusable", f"no sign of {chip} ({where}); {reason}", fix if claimed else "")
    if device and device.available and device.count:
        names = ", ".join(dict.fromkeys(device.names)) or chip
        return verdict("ok", f"{device.count} x {names}", devices=device.count, hardware="present")
    if hidden:
        return verdict("unusable", f"{hidden} hides every device", f"unset {hidden.partition('=')[0]} to use them")
    if withheld:
        return verdict("unusable", f"{sign}, but there is no {where}", no_nodes_fix(facts, access))
    if not present:
        note = ", although the installed packages are for one" if claimed else ""
        return verdict("unusable", f"no sign of {chip} ({where}) or of its driver{note}")
    left = visible_count(facts, variables, present, counted)
    given = [name for name in variables if name in facts.variables]
    settings = " and ".join(f"{name}={facts.variables[name]!r}" for name in given)
    if not left:
        effect = f"{settings} {'leave' if len(given) > 1 else 'leaves'} none of {present} devices"
        how = (
            "each renumbers from 0 the devices that the previous one leaves"
            if len(given) > 1
            else f"numbered from 0 to {present - 1}"
        )
        return verdict("unusable", f"{effect}: {how}", f"unset {' '.join(given[:-1] or given)}")
    for needed in (nodes, facts.nodes(companions)) if companions else (nodes,):
        if not needed:
            return verdict("unusable", f"{sign}, but there is no /dev/{companions}", no_nodes_fix(facts, access))
        if set(needed) <= set(facts.no_access):
            return verdict("unusable", f"this user may not open {', '.join(f'/dev/{node}' for node in needed)}", GROUPS)
    closed = [node for node in nodes if node in facts.no_access]
    note = f"; this user may not open {', '.join(f'/dev/{node}' for node in closed)}" if closed else ""
    if device:
        cause = device.problem or f"torch.{device_type}.is_available() is False"
        fixes = [GROUPS] * bool(closed) + [f"unset {' '.join(given)}"] * bool(given) + [broken_fix]
        note += f"; {settings}" if given else ""
        return verdict("unusable", f"{sign}, but torch cannot use it: {cause}{note}", "; or ".join(fixes))
    count = min(left, present - len(closed))
    reason = f"{count} x {chip.split(maxsplit=1)[1]} by {where}; not opened yet{note}"
    return verdict("unverified", reason, GROUPS if closed else "", devices=count)
