"""Further rule-based rewards, one topic per file; docs/rewards.md has what each scores on tricky responses.

stated_answer.py       the part of a response that states its answer
multiple_choice.py     multiple_choice
gsm8k.py               gsm8k: the number after `####`
geo3k.py               geo3k: verl's reward of Geometry3K, by the package mathruler
numeric.py             numeric: the final number, with tolerance, percent, fractions and units
quantities.py          numbers and units in a text
question_answers.py    question_exact_match and question_f1, normalized as for SQuAD
json_schema.py         json_schema
regular_expression.py  regex
tag_counts.py          tags: partial credit for `<think>` and `<answer>`
cosine_length.py       length_cosine
repetition.py          repetition of n-grams of tokens
by_source.py           by_source: the rule of each row's source
language.py            language: the share of letters of its scripts
reasoning_gym_tasks.py  addresses of tasks of the package reasoning-gym
reasoning_gym_score.py reasoning_gym: the score of the package reasoning-gym
"""
