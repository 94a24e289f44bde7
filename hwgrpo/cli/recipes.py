"""`hwgrpo recipes`: the recipes that ship, one line each."""

from __future__ import annotations

import argparse
import dataclasses
import json

HELP = "list the recipes that ship: model, method, data, and the devices each is planned for"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--json", action="store_true", help="print a JSON list instead of a table")


def run(args: argparse.Namespace) -> int:
    """Print the table; return the exit code."""
    from hwgrpo.config.shipped_recipes import ShippedRecipe, shipped_recipes

    def planned_for(recipe: ShippedRecipe) -> str:
        if recipe.memory_gib is None:
            return "any device, or a CPU" if recipe.model.startswith("builtin://") else "see hwgrpo plan"
        return f"{recipe.devices} x {recipe.memory_gib} GiB"

    recipes = shipped_recipes()
    if args.json:
        print(json.dumps([dataclasses.asdict(each) for each in recipes], indent=1))
        return 0
    rows = [("recipe", "model", "method", "data", "planned for")]
    rows += [(each.name, each.model, each.method, each.data.partition("?")[0], planned_for(each)) for each in recipes]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    print(
        "\nhwgrpo train RECIPE trains one; hwgrpo data math or gsm8k makes its data; hwgrpo plan RECIPE says on which "
        "chips it fits."
    )
    return 0
