"""From verl and TRL: their recipes become recipes here, their names are answered with those here.

imports/           settings of other projects -> recipes, with an account of every key
tables/            settings of other projects as data, one row per key
names_here.py      what settings and values of verl and TRL are called here
"""
