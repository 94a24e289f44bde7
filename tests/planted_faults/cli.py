"""Faults of hwgrpo/cli."""

from tests.planted_faults.fault import Fault

FAULTS = (
    Fault(
        "an option of an import that train ignores",
        "cli/import_settings.py",
        '"--set": "settings", ',
        "",
        "imports/test_verl_tutorials.py -k without_an_import",
    ),
    Fault(
        "the options of a launched command lost",
        "cli/launch.py",
        "set_options += [option, *([] if value is True else [str(value)])]",
        "set_options += []",
        "cli/test_launch.py -k with_their_options",
    ),
    Fault(
        "another command's options passed on",
        "cli/launch.py",
        "if name not in (command, COMMANDS[0]):",
        "if False:",
        "cli/test_launch.py -k own_arguments",
    ),
    Fault(
        "no device left to the server",
        "cli/launch.py",
        "if args.devices is None and not visible:",
        "if False:",
        "cli/test_launch.py -k server",
    ),
    Fault(
        "several nodes untold of their network interface",
        "cli/launch.py",
        'name.endswith("_SOCKET_IFNAME")',
        'name.endswith("_IFACE")',
        "cli/test_launch.py -k network_interface",
    ),
    Fault(
        "servers that sleep on training devices refused",
        "cli/launch.py",
        "if shares_device(config) and sleeps(config, on_host=False):",
        "if False:",
        "cli/test_launch.py -k devices_of_a_server",
    ),
)
