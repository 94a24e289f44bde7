"""Settings: the schema, loading (recipe + overrides), checking, documentation.

schema.py          `Settings`: all settings as dataclasses: type, default, limits, and a docstring for each
bound_arguments.py keyword arguments of functions, within what their signatures declare
fields.py          how a field states its limits and its uses; conditions.py the conditions of these
backend_choices.py choices that the device backends declare
load.py            recipe + overrides -> `Config`
recipe_files.py    where recipes are looked up, and their content; the settings of published methods
adapter_settings.py the settings of an existing adapter
named_files.py     files that settings name: functions of the user's own, absolute paths
shipped_files.py   recipes and presets that ship with hwgrpo
shipped_recipes.py the recipes that ship, for display
keys.py            the type of each key; errors for unknown ones; `section.key=value` arguments
interpolation.py   `${...}` in values
interpolation_bounds.py  how many there may be, and how long they may become
typed.py           YAML values -> the schema's types, strictly
yaml_text.py       YAML with the line of every mistake
validate.py        checks beyond types: limits, files, conflicting settings
rollout_rules.py   the same for rollout settings
algorithm_rules.py the same for pairs of algorithm settings
combinations.py    which algorithm settings exclude each other, as a list
uses.py            settings without effect
derived.py         values that follow from several settings
deepspeed_json.py  DeepSpeed's configuration, made from ours
written_config.py  settings as they are stored: secrets as interpolation and digest
stored_settings.py the settings that a run has stored
supervised.py      the settings that supervised training uses
document.py        the schema as documentation
"""

from hwgrpo.config.load import Config, load_config

__all__ = ["Config", "load_config"]
