"""Settings of other projects as data, one row per key: for messages, for the importers, for the documentation.

peer_row.py        a row, and how rows are written
peer_names.py      the tables of a project, and other names of their keys
verl_mapped.py     verl's settings that have a counterpart
verl_ignored.py    verl's settings that mean nothing here
verl_refused.py    verl's settings that have no counterpart, except at their neutral value
verl_names.py      other names of verl's settings: older ones, and ones that only tutorials use
trl_mapped.py      TRL's settings that have a counterpart
trl_ignored.py     TRL's settings that mean nothing here
trl_refused.py     TRL's settings that have no counterpart, except at their neutral value
trl_names.py       other names of TRL's settings: older ones, and ones that only tutorials use
"""
