"""Prompts: file formats, synthetic tasks, chat templates, the resumable sampler.

tasks.py           task://sort, add, copy: synthetic prompts with disjoint splits, and warm-start demonstrations
agent_tasks.py     task://calculator, lookup, guess, spell: the same with tools and in environments
picture_tasks.py   task://squares, look: the same about pictures
reasoning_gym_rows.py   reasoning_gym://...: rows of tasks of the package reasoning-gym
expansion.py       compressed files that expand to far more than their size
formats.py         one data file -> rows; every error names the file and line
sources.py         what `data.train` names (task, file, folder, hub dataset) -> rows
missing_data.py    the check of settings that what `data.train` names is here
given_rows.py      rows in memory, given as an object -> rows
row_schema.py      one row -> conversation or text, ground truth, source; verl's and TRL's columns
prompts.py         rows -> tokenized prompts, the length limit
prompt_findings.py what is odd about prompts that can be read, counted and said
media.py           images, video and sound in rows, which text models refuse
images.py          images of rows -> RGB, within limits
image_urls.py      the same at URLs, fetched within limits
image_rows.py      where images stand in a prompt
image_prompts.py   text and images -> tokens and what the model's tower reads
thumbnails.py      images -> small copies for logs
observed_images.py images in messages that a policy observes
chat_template.py   a row -> the model's input text
examples.py        rows -> prompts with responses, for supervised training
chat_targets.py    which tokens of a conversation are trained
row_filter.py      the rows that meet `data.keep`
sampler.py         the order in which prompts are visited, exactly resumable
difficulty.py      the same without prompts that were too easy or too hard when they were last sampled
tool_descriptions.py  tools in a system message, for chat templates that show none
published.py       datasets that `hwgrpo data` converts: columns, instruction, reward
raw_rows.py        a row as it is published -> prompt, ground truth, further columns
final_answers.py   the final answer in a worked solution
dataset_files.py   finding and reading the files of such a dataset
own_files.py       the same for files of the user's own, and a validation split of them
convert.py         rows -> verl's schema, as Parquet
duplicates.py      rows that repeat a prompt, or have one of a split to test with
inspection.py      statistics and bad rows of data files
reward_check.py    check whether rewards could score the rows
"""
