"""Faults of hwgrpo/config."""

from tests.planted_faults.fault import Fault

FAULTS = (
    Fault(
        "a deadline longer than a hang",
        "config/rollout_rules.py",
        "2 * r.group_timeout >= hung",
        "r.group_timeout >= hung",
        "rollout/test_deadlines.py -k refused",
    ),
    Fault(
        "a preset in an override loses to the recipe",
        "config/presets.py",
        "merge(recipe, preset) if given else",
        "merge(preset, recipe) if given else",
        "config/test_presets.py",
    ),
    Fault(
        "a preset wins over the recipe that names it",
        "config/presets.py",
        "else merge(preset, recipe)",
        "else merge(recipe, preset)",
        "config/test_presets.py",
    ),
    Fault(
        "a preset's setting without effect refused",
        "config/load.py",
        "{*imported, *used_before, *of_presets}",
        "{*imported, *used_before}",
        "config/test_presets.py",
    ),
)
