"""From verl and TRL: their recipes and tools become those here, their names are answered with those here.

imports/           settings of other projects -> recipes, with an account of every key
tables/            settings of other projects as data, one row per key
verl_tools.py      the environment `verl_tools`: tools of verl's tool files
verl_modules.py    stand-ins of what such files import of verl
names_here.py      what settings and values of verl and TRL are called here
"""
