"""Settings of other projects -> recipes, with an account of every key.

verl_reader.py     a verl script, a Hydra file or overrides -> the settings of a verl run
shell_script.py    the verl command in a bash script, found without running it
shell_conditions.py  conditions of a script, evaluated where what they compare is known
script_command.py  that command, with marks where a piece is not known
bash_words.py      bash source -> statements of words
bash_variables.py  variables, and the words that expand to them
bash_setters.py    commands that set variables
bash_arithmetic.py  `$((...))`, `((...))`, `let`
bash_braces.py     `{1,2}`, `{1..8}`
bash_programs.py   `$(dirname ...)` and its kin
hydra_values.py    Hydra's overrides, values and interpolations
variable_text.py   texts with values of variables, which stay interpolations
variable_secrets.py  values of variables that may be secrets
input_text.py      the text of a script, a YAML file or standard input
reading_budget.py  bounds on what is read
peer_settings.py   another project's settings by the names of the tables, checked
peer_import.py     they become settings here
verl_settings.py   a verl run's settings
verl_import.py     they become settings here
verl_algorithm.py  conversions: advantage, loss, KL, correction, filter, rewards
verl_batches.py    conversions: data, batches, adapters, optimizer
verl_images.py     conversions: the column of images, the vision tower
verl_agents.py     conversions: tools, turns
verl_devices.py    conversions: engine, parallelism, the run
trl_reader.py      a YAML file of `trl grpo`, or settings -> the settings of a TRL run
trl_settings.py    a TRL run's settings, and its batches in prompts
trl_import.py      they become settings here
trl_algorithm.py   conversions: loss, advantage, KL, correction, rewards
trl_batches.py     conversions: batches, length, optimizer, data, model, adapters
trl_run.py         conversions: sampling, engine, devices, validations, checkpoints, logs
vision_names.py    models that read images, by their names
conversion.py      what a conversion yields
import_result.py   what became of every key
import_table.py    it as a table
recipe_text.py     it as a recipe
"""
