"""Prompts: file formats, synthetic tasks, chat templates, the resumable sampler.

tasks      task://sort, add, copy: synthetic prompts with disjoint splits, and warm-start demonstrations
formats    one data file (.jsonl, .json, .parquet) -> rows, with the file and line of every complaint
sources    what `data.train` names (task, file, folder, hub dataset) -> rows
schema     one row -> conversation or text, ground truth, source; verl's and TRL's columns
prompts    rows -> tokenized prompts: chat template, length limit
sampler    the order in which prompts are visited, exactly resumable

published, answers   datasets that `hwgrpo data` converts, and the final answer in their solutions
copies, convert      a copy of one -> rows in verl's schema -> Parquet
inspection, judging  data files as the trainer reads them, and whether rewards could score them
inspected            what such a look found
"""
