"""`hwgrpo import verl|trl FILE key=value`: a recipe from another project's settings, and what became of each."""

from __future__ import annotations

import argparse
import atexit
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hwgrpo.errors import ConfigError, shown
from hwgrpo.support.launched_ranks import launched_rank
from hwgrpo.support.text import terminal_lines

if TYPE_CHECKING:
    from hwgrpo.migrate.imports.import_result import Imported

HELP = "write a recipe from the settings of verl or TRL, and show what became of each"
_NAME = re.compile(r"[A-Za-z_]\w*")
SYSTEMS = ("verl", "trl")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("system", choices=SYSTEMS, help="whose settings they are")
    parser.add_argument(
        "overrides",
        nargs="+",
        metavar="FILE|KEY=VALUE",
        help="verl: a run script, which is read and never run (- for standard input), or a YAML file that Hydra wrote; "
        "trl: a YAML file of `trl grpo --config`; then settings that override it. Settings alone are accepted, too; "
        "write -- before flags",
    )
    parser.add_argument("--output", metavar="FILE", help="write the recipe to this file (default: standard output)")
    _add_reading_options(parser)


def add_import_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `hwgrpo train` and `hwgrpo launch` that import settings."""
    parser.add_argument(
        "--from",
        dest="source",
        choices=SYSTEMS,
        help="the arguments are another project's: a run script and settings, or settings alone (hwgrpo import)",
    )
    _add_reading_options(parser, "with --from: ")


def _add_reading_options(parser: argparse.ArgumentParser, when: str = "") -> None:
    """Declare the options of all commands that read another project's settings."""
    parser.add_argument(
        "--set",
        dest="settings",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help=f"{when}a variable of the run script, whatever the script sets it to"
        + (", or a setting of hwgrpo, section.key=VALUE" if when else ""),
    )
    parser.add_argument(
        "--entry", choices=("main_ppo",), help=f"{when}read another entry point of verl as if it were main_ppo"
    )
    parser.add_argument(
        "--drop-refused", action="store_true", help=f"{when}leave out the settings that have no counterpart"
    )


def run(args: argparse.Namespace) -> int:
    """Print the table and the recipe; return the exit code."""
    variables, own = _set_values(args.system, args.settings)
    if own:
        raise ConfigError(
            f"--set {shown(own[0])}: write NAME=VALUE, with the name of a variable of the run script; settings of "
            "hwgrpo follow the recipe: hwgrpo launch RECIPE key=value"
        )
    imported, recipe = import_settings(
        args.system,
        args.overrides,
        drop_refused=args.drop_refused,
        prints=True,
        variables=variables,
        any_entry=args.entry is not None,
    )
    if args.output is None:
        print(recipe, end="")
        return 0
    write_output(args.output, recipe)
    from hwgrpo.migrate.imports.conversion import Launch

    launch = imported.launch or Launch((), None)
    print(f"wrote {args.output}: {launch.command(shlex.quote(args.output))}", file=sys.stderr)
    return 0


def _set_values(system: str, given: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the variables of a run script that `--set` sets, and the settings of hwgrpo, which have a dot."""
    settings = [each for each in given if "." in each.partition("=")[0]]
    variables = {}
    for each in given:
        name, equals, value = each.partition("=")
        if each in settings:
            continue
        if not equals or not _NAME.fullmatch(name):
            raise ConfigError(f"--set {shown(each)}: write NAME=VALUE, with the name of a variable of the run script")
        if system != "verl":
            raise ConfigError(
                f"--set {shown(each)} is for the variables of a run script, which {system} has none of; write key=value"
            )
        variables[name] = value
    return variables, settings


def write_output(output: str, text: str) -> None:
    """Write text to the file of --output.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        Path(output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output={output!r} cannot be written: {error}") from error


def import_settings(
    system: str,
    arguments: Sequence[str],
    *,
    drop_refused: bool,
    prints: bool,
    variables: Mapping[str, str] | None = None,
    any_entry: bool = False,
) -> tuple[Imported, str]:
    """Return an import and its recipe, and print the table on standard error.

    Args:
        system: one of `SYSTEMS`.
        arguments: a file and settings, or settings alone.
        drop_refused: leave refused settings out instead of raising.
        prints: whether to print the table.
        variables: of a run script, whatever it sets them to.
        any_entry: read the settings of any program of verl as those of main_ppo.

    Raises:
        ConfigError: a setting is unknown, illegal or refused.
    """
    from hwgrpo.migrate.imports.import_table import table_text
    from hwgrpo.migrate.imports.recipe_text import compact, recipe_text

    deletes = arguments[0].startswith("~") and "/" not in arguments[0]
    has_file = "=" not in arguments[0] and not arguments[0].startswith("--") and not deletes
    file, rest = (arguments[0], arguments[1:]) if has_file else (None, arguments)
    imported, notices = _imported(system, file, rest, variables or {}, any_entry)
    if prints:
        print(table_text(imported, shutil.get_terminal_size((140, 24)).columns), file=sys.stderr)
        for notice in [*notices, *imported.notices]:
            print(f"hwgrpo: note: {terminal_lines(compact(notice))}", file=sys.stderr)
    if imported.refused() and not drop_refused:
        keys = ", ".join(f"{each.key}={_shown(each.value)}" for each in imported.refused())
        raise ConfigError(
            f"without a counterpart here: {keys}; see above. Change them, or leave them out with --drop-refused"
        )
    _check(imported)
    source = imported.project if file is None else "standard input" if file == "-" else file
    return imported, recipe_text(imported, source)


def _check(imported: Imported) -> None:
    """Check the recipe of an import as a run on its machine would, whose files, variables and packages are not here.

    Raises:
        ConfigError: a run would refuse it.
    """
    from hwgrpo.config import load_config
    from hwgrpo.migrate.imports.recipe_text import nested
    from hwgrpo.migrate.imports.variable_text import known, variables_in

    settings = {key: known(value) for key, value in imported.settings.items()}
    settings |= {key: "unknown" for key in ("model.path", "data.train") if not settings.get(key)}
    settings.setdefault("reward.functions", [{"name": "exact_match"}])
    try:
        load_config(nested(settings), data_may_be_missing=True, files_may_be_missing=True)
    except ConfigError as error:
        text = str(error)
        for each in variables_in(imported.settings):
            text = text.replace(each.value, each) if each.value else text
        raise ConfigError(f"{imported.project}'s settings make a recipe that a run refuses: {text}") from None


def _shown(value: object) -> object:
    from hwgrpo.migrate.imports.recipe_text import compact

    return compact(value) if isinstance(value, str) else value


def _imported(
    system: str, file: str | None, settings: Sequence[str], variables: Mapping[str, str], any_entry: bool
) -> tuple[Imported, list[str]]:
    """Return an import, and notices about what was read."""
    if system == "verl":
        from hwgrpo.migrate.imports.verl_import import import_verl
        from hwgrpo.migrate.imports.verl_reader import read_verl

        of_verl, notices = read_verl(file, settings, os.environ, variables, any_entry=any_entry)
        return import_verl(of_verl), notices
    from hwgrpo.migrate.imports.trl_import import import_trl
    from hwgrpo.migrate.imports.trl_reader import read_trl

    of_trl, notices = read_trl(file, settings, os.environ)
    return import_trl(of_trl), notices


def use_imported(args: argparse.Namespace) -> Imported | None:
    """Let a command with --from train on the imported settings, with those of --set above them; else do nothing.

    Returns:
        The import; `args` then name a recipe, as if it had been given.

    Raises:
        ConfigError: an option that is for --from is given without it; or as `import_settings` does.
    """
    if getattr(args, "source", None) is None:
        options = {"--set": "settings", "--entry": "entry", "--drop-refused": "drop_refused"}
        option = next((option for option, name in options.items() if getattr(args, name, None)), None)
        if option is not None:
            raise ConfigError(
                f"{option} is for --from {'|'.join(SYSTEMS)}; settings of a recipe follow it as key=value"
            )
        return None
    first = launched_rank().rank == 0
    arguments = [args.recipe, *args.overrides]
    variables, own = _set_values(args.source, args.settings)
    imported, recipe = import_settings(
        args.source,
        arguments,
        drop_refused=args.drop_refused,
        prints=first,
        variables=variables,
        any_entry=args.entry is not None,
    )
    folder = Path(tempfile.mkdtemp(prefix="hwgrpo-import-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "imported.yaml").write_text(recipe, encoding="utf-8")
    args.recipe, args.overrides = str(folder / "imported.yaml"), own
    args.source, args.settings, args.entry, args.drop_refused = None, [], None, False
    return imported


def import_options(args: argparse.Namespace) -> list[str]:
    """Return the options of --from as they were given, for a command that passes them on."""
    if args.source is None:
        return []
    settings = [word for each in args.settings for word in ("--set", each)]
    entry = ["--entry", args.entry] if args.entry is not None else []
    return ["--from", args.source, *settings, *entry, *(["--drop-refused"] if args.drop_refused else [])]
