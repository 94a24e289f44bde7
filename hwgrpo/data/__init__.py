"""Prompts: file formats, synthetic tasks, chat templates, the resumable sampler.

tasks.py           task://sort, add, copy: synthetic prompts with disjoint splits, and warm-start demonstrations
formats.py         one data file -> rows, with the file and line of every complaint
sources.py         what `data.train` names (task, file, folder, hub dataset) -> rows
row_schema.py      one row -> conversation or text, ground truth, source; verl's and TRL's columns
prompts.py         rows -> tokenized prompts, the length limit
chat_template.py   a row's prompt as the model sees it
sampler.py         the order in which prompts are visited, exactly resumable
published.py       datasets that `hwgrpo data` converts, and the final answer in their solutions
dataset_files.py   where the rows of one come from
convert.py         its rows in verl's schema, as Parquet
inspection.py      data files as the trainer reads them
reward_check.py    whether rewards could score them
"""
