"""`hwgrpo launch [COMMAND] RECIPE key=value ...`: the command for torchrun, or a Slurm script, printed or run."""

from __future__ import annotations

import argparse
import getpass
import hashlib
import importlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hwgrpo.cli.import_settings import add_import_options, import_options, use_imported
from hwgrpo.cli.train import CHIP_HELP
from hwgrpo.errors import ConfigError
from hwgrpo.support.launched_ranks import launcher_variables

if TYPE_CHECKING:
    from hwgrpo_backends import Backend

    from hwgrpo.config import Config

HELP = "print or run the command that starts a recipe on several devices, nodes or a Slurm cluster"
COMMANDS = ("train", "sft")
"""Commands that it starts; the first one if none is named. Each is a module of this package with
`add_flags(parser)`, its own options, and, where they are not the recipe's, `launched_config(args)`, its settings
without its data and secrets."""
PORTS = range(10000, 30000)
"""Ports for the rendezvous of several nodes, below the range of ephemeral ports."""
MAX_RESTARTS = 3
NEW_STORE = ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
"""Variable of torchrun on several nodes. torchrun keeps the rendezvous store over a restart (torch 2.13), and with it
the addresses of dead processes, for which the new ones would wait: with this variable each start has its own store.
Processes of one node join under the restart's number instead (`strategies.processes`)."""
SIGNAL_SECONDS = 600
"""Seconds before a job's time limit at which Slurm sends SIGTERM; a step and its checkpoint may take as long."""
SHUTDOWN_TIMEOUT = ("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SIGNAL_SECONDS))
"""Variable of torchrun, which otherwise kills ranks 30 s after SIGTERM, even while they write a checkpoint."""
CPUS_PER_DEVICE = 8
WHY_NEW_STORE = "# each start has its own store: a reused one has the addresses of processes that died"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "recipe",
        help="recipe YAML, or the name of a shipped recipe (tiny_sort), which is trained with GRPO; or "
        f"{' or '.join(COMMANDS)}, followed by the recipe",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that override the recipe")
    parser.add_argument(
        "--devices", type=int, metavar="D", help="devices per node, one process each (default: all of this host)"
    )
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="number of nodes (default 1)")
    parser.add_argument(
        "--visible", metavar="LIST", help="use these devices of the node, e.g. 4,5,6,7 (sets the backend's variable)"
    )
    parser.add_argument(
        "--rendezvous",
        metavar="HOST[:PORT]",
        help="rendezvous node, for several nodes (the port is derived from the recipe, its settings and your name)",
    )
    parser.add_argument(
        "--rendezvous-id",
        metavar="ID",
        help="name of the job, for several nodes; distinguishes two jobs of the same recipe and settings",
    )
    parser.add_argument(
        "--max-restarts",
        type=int,
        metavar="K",
        help=f"restarts by torchrun after a failure (default {MAX_RESTARTS}; resumes from the newest checkpoint)",
    )
    parser.add_argument(
        "--cpus", type=int, metavar="C", help=f"CPUs per node for --slurm (default {CPUS_PER_DEVICE} per device)"
    )
    parser.add_argument("--chip", metavar="NAME", help=CHIP_HELP)
    parser.add_argument("--slurm", action="store_true", help="make a script for sbatch")
    parser.add_argument("--sbatch", action="append", metavar="OPTION", help="further #SBATCH line, e.g. --time=8:00:00")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--print", action="store_true", dest="shown", help="print it (the default)")
    action.add_argument("--run", action="store_true", dest="started", help="run it, or submit it to Slurm")
    for name in COMMANDS:
        _module(name).add_flags(parser)
    add_import_options(parser)


def run(args: argparse.Namespace) -> int:
    """Print or run the command; return the exit code."""
    visible = _visible(args.visible)
    name = args.recipe if args.recipe in COMMANDS else COMMANDS[0]
    if args.recipe in COMMANDS:
        args.recipe, args.overrides = next(iter(args.overrides), None), args.overrides[1:]
    given = [*filter(None, (args.recipe,)), *args.overrides, *import_options(args)]
    _import(args, name, visible)
    module, options = _module(name), _options(args, name)
    from hwgrpo.config.validate import check_world_size

    config = getattr(module, "launched_config", _recipe_config)(args)
    plans = args.dry_run or args.print_config
    if args.chip and not args.dry_run:
        raise ConfigError(f"--chip {args.chip} is for `hwgrpo launch RECIPE --dry-run`, which plans a run")
    backend, found = _backend(config), 1
    if not args.slurm and (args.started or not (args.devices or visible)):
        backend, found = _select(config, backend, needed=args.started and not plans)
    devices = args.devices if args.devices is not None else len(visible) or found
    if args.devices is None and not visible:
        _check_server_devices(config, backend, devices)
    _check_counts(args, devices, visible)
    check_world_size(config, devices * args.nodes)
    if plans:
        os.environ.update(launcher_variables(devices, args.nodes))
        args.devices = None  # the variables name them all
        return module.run(args)
    restarts = _restarts(args.max_restarts, config)
    variables = _variables(backend, visible, devices, os.environ)
    variables |= dict([NEW_STORE] if args.nodes > 1 else [])
    variables |= dict([SHUTDOWN_TIMEOUT] if args.nodes * devices > 1 else [])
    train = [name, *given, *options]
    if args.slurm:
        cpus = args.cpus or CPUS_PER_DEVICE * devices
        script = slurm_script(train, backend, devices, args.nodes, restarts, cpus, args.sbatch or ())
        return _submit(script) if args.started else _show([script])
    arguments = command(train, devices, args.nodes, restarts, args.rendezvous, args.rendezvous_id)
    if args.started:
        return _start(arguments, backend, variables, config)
    lines = []
    if args.nodes > 1:
        lines = [f"# on each of the {args.nodes} nodes", *_interface_note(backend), WHY_NEW_STORE]
    if arguments[0] == "torchrun":
        lines.append(f'eval "$({_tool("hwgrpo")} env --backend {config.backend.name} --shell)"')
    assigned = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    return _show([*lines, " ".join([*assigned, _tool(arguments[0]), shlex.join(arguments[1:])])])


def _import(args: argparse.Namespace, name: str, visible: Sequence[str]) -> None:
    """Use the settings of --from, and start as many processes as they are for, unless the command says how many."""
    if args.source is not None and name != COMMANDS[0]:
        raise ConfigError(f"--from is an option of `hwgrpo launch {COMMANDS[0]}`, not of {name}")
    if args.source is not None and args.recipe == "-":
        raise ConfigError(
            "--from with -: each process that is started reads the script; write it to a file, and name it"
        )
    imported = use_imported(args)
    if imported is not None and imported.launch is not None:
        args.devices = args.devices if args.devices is not None or visible else imported.launch.devices
        args.nodes = imported.launch.nodes or 1 if args.nodes == 1 else args.nodes


def _module(name: str) -> Any:
    return importlib.import_module(f"hwgrpo.cli.{name.replace('-', '_')}")


def _recipe_config(args: argparse.Namespace) -> Config:
    """Return the settings of a recipe: data and secrets are on the training host, which may be another one."""
    from hwgrpo.config import load_config

    if args.recipe is None:
        raise ConfigError("name a recipe: hwgrpo launch train RECIPE")
    return load_config(args.recipe, args.overrides, data_may_be_missing=True, variables_may_be_missing=True)


def _options(args: argparse.Namespace, command: str) -> list[str]:
    """Return the options of the command to start that are set.

    Raises:
        ConfigError: one is of another command.
    """
    set_options: list[str] = []
    for name in COMMANDS:
        flags = argparse.ArgumentParser(add_help=False)
        _module(name).add_flags(flags)
        for key, default in vars(flags.parse_args([])).items():
            option, value = f"--{key.replace('_', '-')}", getattr(args, key)
            if value == default:
                continue
            if name not in (command, COMMANDS[0]):  # all commands have the options of the first
                raise ConfigError(f"{option} is an option of `hwgrpo launch {name} RECIPE`, not of {command}")
            set_options += [option, *([] if value is True else [str(value)])]
    return set_options


def command(
    train: Sequence[str], devices: int, nodes: int, restarts: int, rendezvous: str | None, job: str | None = None
) -> list[str]:
    """Return the command that starts training on a node.

    Args:
        train: arguments of `hwgrpo`.
        devices: devices per node.
        nodes: number of nodes.
        restarts: restarts by torchrun.
        rendezvous: HOST or HOST:PORT of the rendezvous node; None with one node.
        job: name of the job, the same on all nodes; None: made from `train` and the user's name.
    """
    if devices * nodes == 1:
        return ["hwgrpo", *train]
    arguments = ["torchrun", "--nproc-per-node", str(devices), "--max-restarts", str(restarts)]
    if nodes == 1:
        arguments.append("--standalone")  # finds a free port by itself
    else:
        assert rendezvous is not None, "several nodes need a rendezvous"
        job = job or job_name(train)
        host, _, port = rendezvous.rpartition(":") if ":" in rendezvous else (rendezvous, "", str(port_of(job)))
        arguments += ["--nnodes", str(nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host}:{port}"]
        arguments += ["--rdzv-id", job]
    return [*arguments, "-m", "hwgrpo", *train]


def job_name(train: Sequence[str]) -> str:
    """Return the job name, the same on all nodes; two jobs with one name would join each other."""
    key = json.dumps([getpass.getuser(), *train])
    return f"hwgrpo-{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def port_of(job: str) -> int:
    """Return the rendezvous port of a job."""
    return PORTS[int.from_bytes(hashlib.sha256(job.encode()).digest()[:4]) % len(PORTS)]


def slurm_script(
    train: Sequence[str],
    backend: Backend | None,
    devices: int,
    nodes: int,
    restarts: int,
    cpus: int,
    options: Sequence[str],
) -> str:
    """Return a script for sbatch.

    Args:
        train: arguments of `hwgrpo`.
        backend: backend of the training nodes.
        devices: devices per node.
        nodes: number of nodes.
        restarts: restarts by torchrun.
        cpus: CPUs per node.
        options: further options of sbatch, which override the others.

    Raises:
        ConfigError: no backend is named; the submitting host may differ from the training nodes.
    """
    if backend is None:
        raise ConfigError(
            "--slurm needs backend.name=NAME, since the submitting host may differ from the training nodes"
        )
    # administrators name devices in Slurm; these are the usual names
    kind = backend.device_type if backend.plugin else "gpu"
    wanted = () if backend.is_host else (f"--gres={kind}:{devices}",)
    named = next((each for each in train[1:] if "=" not in each and not each.startswith("-")), train[0])
    header = [
        f"--job-name=hwgrpo-{Path(named).stem}",
        f"--nodes={nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={cpus}",
        *wanted,
        f"--signal=TERM@{SIGNAL_SECONDS}",
        "--requeue",
        "--open-mode=append",
        *options,
    ]
    arguments = command(train, devices, nodes, restarts, "HOST:PORT", "JOB")
    line = shlex.join(arguments[1:])
    line = line.replace("HOST:PORT", '"$head:$port"', 1).replace("--rdzv-id JOB", '--rdzv-id "$SLURM_JOB_ID"', 1)
    setup = []
    if nodes > 1:
        setup = ['head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)']
        setup += [f"port=$(({PORTS.start} + SLURM_JOB_ID % {len(PORTS)}))"]
        setup += [*_interface_note(backend), WHY_NEW_STORE, f"export {'='.join(NEW_STORE)}"]
    if nodes * devices > 1:
        setup += ["# after SIGTERM ranks may finish their step and write a checkpoint"]
        setup += [f"export {'='.join(SHUTDOWN_TIMEOUT)}"]
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            *(f"#SBATCH {option}" for option in header),
            "set -euo pipefail",
            *setup,
            f'eval "$({_tool("hwgrpo")} env --backend {backend.name} --shell)"',
            # srun does not inherit it from sbatch (Slurm 22.05)
            f'srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 {_tool(arguments[0])} {line}',
        ]
    )


def _interface_note(backend: Backend | None) -> list[str]:
    """Return a comment with the variables that name a network interface, which only the user knows."""
    names = [name for name in (backend.env_optional if backend else ()) if name.endswith("_SOCKET_IFNAME")]
    if not names:
        return []
    return [f"# nodes with several network interfaces: set {' and '.join(names)} to the one between them"]


def _check_counts(args: argparse.Namespace, devices: int, visible: Sequence[str]) -> None:
    for option, value in (("--devices", devices), ("--nodes", args.nodes)):
        if value < 1:
            raise ConfigError(f"{option} {value}: use 1 or more")
    if args.max_restarts is not None and args.max_restarts < 0:
        raise ConfigError(f"--max-restarts {args.max_restarts}: use 0 or more")
    if visible and len(visible) != devices:
        raise ConfigError(f"--visible {args.visible} names {len(visible)} devices, not --devices {devices}")
    if args.slurm and (visible or args.rendezvous):
        raise ConfigError("--slurm: Slurm assigns devices and hosts; omit --visible and --rendezvous")
    if args.sbatch and not args.slurm:
        raise ConfigError("--sbatch is an option of --slurm")
    if args.nodes > 1 and not args.slurm and args.rendezvous is None:
        raise ConfigError(
            f"--nodes {args.nodes} needs --rendezvous HOST, a node that all others can reach (or --slurm)"
        )
    if args.nodes == 1 and args.rendezvous is not None:
        raise ConfigError(f"--rendezvous {args.rendezvous} is for several nodes; add --nodes N")
    if args.rendezvous_id is not None and (args.nodes == 1 or args.slurm):
        raise ConfigError(
            f"--rendezvous-id {args.rendezvous_id} is for several nodes with --rendezvous; Slurm has its own"
        )
    if args.cpus is not None and (args.cpus < 1 or not args.slurm):
        raise ConfigError(f"--cpus {args.cpus}: use 1 or more, with --slurm")
    port = args.rendezvous.rpartition(":")[2] if args.rendezvous and ":" in args.rendezvous else str(PORTS.start)
    if not (port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError(f"--rendezvous {args.rendezvous}: the text after the colon is not a port")


def _check_server_devices(config: Config, backend: Backend | None, devices: int) -> None:
    """Check that training on every device of the host leaves some to the server that the run starts there.

    Servers that sleep while the policy is trained need none.
    """
    from hwgrpo.rollout.engine_kind import engine_kind
    from hwgrpo.rollout.shared_devices import shares_device, sleeps, split_arguments

    r, name = config.rollout, backend.visible_env if backend else None
    if devices < 2 or name is None or r.server.url is not None or not engine_kind(r).on_server:
        return
    if name in r.server.env and os.environ.get(name):  # both have theirs
        return
    if shares_device(r) and sleeps(r, on_host=False):  # one server per device
        return
    raise ConfigError(
        f"rollout.engine={r.engine!r} starts a server on this host, and all {devices} devices would train: give each "
        f"its own, e.g. {split_arguments(name, devices)}; with --devices {devices} they are shared"
    )


def _visible(option: str | None) -> list[str]:
    if option is None:
        return []
    numbers = option.split(",")
    if not all(number.isdigit() for number in numbers) or len(set(numbers)) != len(numbers):
        raise ConfigError(f"--visible {option!r}: use distinct device numbers separated by commas, e.g. 0,1,2,3")
    return numbers


def _backend(config: Config) -> Backend | None:
    from hwgrpo_backends import registry
    from hwgrpo_backends.decide import AUTO

    return None if config.backend.name == AUTO else registry.get(config.backend.name)


def _select(config: Config, named: Backend | None, *, needed: bool) -> tuple[Backend | None, int]:
    """Return the backend that is selected on this host and its number of devices.

    Args:
        config: the run's settings.
        named: the backend that they name.
        needed: the run starts here; otherwise without a device `named` and 1 are returned.

    Raises:
        BackendError: no backend can be selected, and it is needed.
    """
    from hwgrpo_backends import BackendError, choose

    try:
        choice = choose(config.backend.name)
    except BackendError:
        if needed:
            raise
        return named, 1
    return choice.backend, choice.decision.verdicts[choice.backend.name].devices


def _restarts(requested: int | None, config: Config) -> int:
    if config.trainer.resume != "never":
        if not config.trainer.save_every and requested != 0:
            print(
                "hwgrpo: note: trainer.save_every=0 writes no checkpoint before the end: a restart begins at step 0",
                file=sys.stderr,
            )
        return MAX_RESTARTS if requested is None else requested
    if requested:
        raise ConfigError(f"--max-restarts {requested} and trainer.resume=never: a restart would not resume the run")
    return 0


def _variables(
    backend: Backend | None, visible: Sequence[str], devices: int, environ: Mapping[str, str]
) -> dict[str, str]:
    """Return the variables that select devices; check a variable that is already set."""
    if visible:
        if backend is None:
            raise ConfigError("--visible needs backend.name=NAME, since each backend has its own variable")
        if backend.visible_env is None:
            raise ConfigError(f"--visible: backend {backend.name!r} has no variable that selects devices")
        return {backend.visible_env: ",".join(visible)}
    name = backend.visible_env if backend else None
    if name and environ.get(name):
        seen = len(environ[name].split(","))
        if seen < devices:
            raise ConfigError(f"--devices {devices}, but {name}={environ[name]} leaves {seen}")
    return {}


def _tool(name: str) -> str:
    """Return the path of a command of this Python environment, or its name where PATH finds it."""
    if shutil.which(name):
        return name
    return shlex.quote(str(Path(sys.executable).parent / name))


def _start(arguments: Sequence[str], backend: Backend | None, variables: Mapping[str, str], config: Config) -> int:
    """Replace this process by the one that trains or launches."""
    if backend is not None:
        from hwgrpo_backends.environment import apply

        apply(backend, "train", os.environ, config.trainer.deterministic)
    os.environ.update(variables)
    module = {"hwgrpo": "hwgrpo", "torchrun": "torch.distributed.run"}[arguments[0]]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *arguments[1:]])


def _show(lines: Sequence[str]) -> int:
    print("\n".join(lines))
    return 0


def _submit(script: str) -> int:
    try:
        return subprocess.run(["sbatch"], input=script + "\n", text=True, check=False).returncode
    except FileNotFoundError:
        raise ConfigError(
            "--slurm --run: sbatch is not installed here; print the script and submit it on a host of the cluster"
        ) from None
