"""Recipes as settings of other projects, and what is lost on the way.

peer_export.py     settings with one counterpart, and what is lost: found by importing the result again
verl_export.py     verl's settings that are converted together
trl_export.py      TRL's
variable_settings.py  texts that variables make, which stay interpolations
export_text.py     the settings as a script or a YAML file
"""
