"""Helpers shared by the probes of accelerator families: pure functions of facts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from hwgrpo_backends import visibility
from hwgrpo_backends.backend import Backend, Hardware, State, Verdict
from hwgrpo_backends.facts import Facts, TorchDevice, TorchFacts
from hwgrpo_backends.visibility import Problem

# transformers and accelerate import these whenever they are installed (not only for their device), so
# one that is broken stops the trainer on every backend, even where TORCH_DEVICE_BACKEND_AUTOLOAD=0 saves torch.
IMPORTED_BY_OTHERS = ("torch_npu",)
GROUPS = "add this user to the group that owns them (render, video or HwHiAiUser), or pass them to the container"
CONTAINER_ACCESS = {
    "lxc": "give the container the nodes (Proxmox: dev0: /dev/NODE in its configuration; LXD and Incus: config device "
    "add NAME gpu gpu) and install the host's version of the driver in it, without the kernel module"
}
"""Kind of container -> how it gets devices, where the families' own text is for others."""


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
        return import_problem(facts, torch)
    for name in IMPORTED_BY_OTHERS:
        if errors := torch.plugins.get(name):
            return f"{name} is installed but does not import: {errors[-1]}", plugin_fix(facts, [name])
    return None


def import_problem(facts: Facts, torch: TorchFacts) -> Problem:
    """Return why `import torch` failed, and what to do."""
    cause = torch.errors[-1] if torch.errors else "no message"
    if torch.timed_out:
        fix = (
            "run it again: the first import from a cold or network disk takes minutes; where it never ends, look at "
            "`python -X importtime -c 'import torch'`, and at the driver (nvidia-smi, rocminfo or npu-smi info)"
        )
        return f"`import torch` has not ended in time: {cause}", fix
    if "SIGKILL" in cause:
        return (
            f"`import torch` was killed: {cause}",
            "see that this process may use more memory (container, job, ulimit)",
        )
    if torch.without_plugins:
        broken = broken_plugins(facts)
        # loading plug-ins may fail before any is known
        detail = next((torch.plugins[name][-1] for name in broken if torch.plugins.get(name)), cause)
        because = f" because of the plug-in {', '.join(broken)}" if broken else ""
        return f"`import torch` fails{because}: {detail}", plugin_fix(facts, broken)
    if facts.shadows:
        files = list(facts.shadows.values())
        return f"`import torch` fails: {cause}; {', '.join(files)} may hide its modules", shadow_fix(files)
    return f"`import torch` fails: {cause}", "reinstall torch: bash scripts/setup.sh"


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
    if facts.container in CONTAINER_ACCESS:
        return CONTAINER_ACCESS[facts.container]
    # A container may show no sign of itself.
    return access if facts.container else f"{access}; outside of a container load the driver's nodes (modprobe, udev)"


def leave_out(variable: str, foreign: Iterable[str], archs: tuple[str, ...]) -> str:
    """Return what to do about GPUs that this torch has no kernels for.

    Args:
        variable: what chooses GPUs.
        foreign: their architectures.
        archs: the architecture of each GPU.
    """
    install = "install a torch build for that GPU"
    return f"{install}, or leave it out with {variable}" if set(archs) - set(foreign) else install


def judge(
    facts: Facts,
    backend: Backend,
    *,
    chip: str,
    nodes: tuple[str, ...],
    where: str,
    claimed: bool,
    problem: Problem | None,
    broken_fix: Callable[[TorchDevice], str],
    present: int | None = None,
    counted: bool = True,
    driver: tuple[str, ...] = (),
    access: str = "",
    windows_fix: str = "",
) -> Verdict:
    """Judge an accelerator family from installed packages, device nodes and, when tier 1 ran, torch's facts.

    Args:
        backend: the family.
        chip: description of one device ("an NVIDIA GPU").
        nodes: the family's nodes under /dev.
        where: where they were looked for, for the message.
        claimed: the installed stack was built for this family.
        problem: problem found by the family's own rules; it decides.
        broken_fix: what to do when the stack is right, the device is there, and torch cannot use it.
        present: how many devices there are, where that is not the number of nodes.
        counted: whether `present` is their number, not a guess.
        driver: files by which the family's driver shows itself, nodes or not.
        access: how to give a container access to the nodes.
        windows_fix: what to do under WSL, where Windows has the driver.
    """
    present = len(nodes) if present is None else present
    library = facts.drivers(backend.wsl_files) if facts.wsl_gpu and not present else ()
    companions = backend.companion_nodes
    if library:  # Windows has the driver, and one node for all GPUs, which it does not count
        nodes, present, counted, companions = ("dxg",), 1, False, ()
        where = f"/dev/dxg, {library[0]}"
        access = windows_fix
    elif facts.wsl:
        access = windows_fix or access
    variables = visibility.in_order(facts, backend)
    withheld = claimed and not present and bool(driver)  # the kernel has devices that this process cannot access
    sign = f"{chip} is here ({where})" if present else f"the driver of {chip} is here ({', '.join(driver)})"
    hidden = visibility.hidden_by(facts, variables) if present or claimed else None
    hardware: Hardware = "hidden" if hidden else "present" if present or withheld else "none"
    device = facts.torch.devices.get(backend.device_type) if facts.torch else None
    signs = tuple(f"/dev/{node}" for node in nodes) + library if present else driver if withheld else ()

    def verdict(state: State, reason: str, fix: str = "", devices: int = 0, hardware: Hardware = hardware) -> Verdict:
        return Verdict(
            state=state, reason=reason, fix=fix, devices=devices, claimed=claimed, hardware=hardware, signs=signs
        )

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
        return verdict("unusable", f"{hidden} hides every device", visibility.unhide(facts, hidden.partition("=")[0]))
    if withheld:
        missing = "/dev/dxg" if facts.wsl else where
        fix = access if facts.wsl else no_nodes_fix(facts, access)
        return verdict("unusable", f"{sign}, but there is no {missing}", fix)
    if not present:
        note = ", although the installed packages are for one" if claimed else ""
        return verdict("unusable", f"no sign of {chip} ({where}) or of its driver{note}", access if facts.wsl else "")
    left = visibility.visible_count(facts, variables, present, counted)
    if not left and (nothing := visibility.nothing_left(facts, variables, present, counted)):
        return verdict("unusable", *nothing)
    needed = [(nodes, where), *((facts.nodes(pattern), f"/dev/{pattern}") for pattern in companions)]
    for some, pattern in needed:
        if not some:
            return verdict("unusable", f"{sign}, but there is no {pattern}", no_nodes_fix(facts, access))
        if set(some) <= set(facts.no_access):
            return verdict("unusable", f"this user may not open {', '.join(f'/dev/{node}' for node in some)}", GROUPS)
    closed = [node for node in nodes if node in facts.no_access]
    note = f"; this user may not open {', '.join(f'/dev/{node}' for node in closed)}" if closed else ""
    if device:
        cause = device.problem or f"torch.{backend.device_type}.is_available() is False"
        settings = visibility.settings_of(facts, variables)
        note += f"; {settings}" if settings else ""
        fixes = [GROUPS] * bool(closed) + visibility.may_be_why(facts, variables)
        fixes.append(windows_fix if library else broken_fix(device))
        return verdict("unusable", f"{sign}, but torch cannot use it: {cause}{note}", "; or ".join(fixes))
    count = min(left, present - len(closed)) if counted else left
    reason = f"{count} x {chip.split(maxsplit=1)[1]} by {where}; not opened yet{note}"
    return verdict("unverified", reason, GROUPS if closed else "", devices=count)
