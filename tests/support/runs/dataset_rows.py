"""Rows made up here in the documented columns of published datasets, by their names in `hwgrpo data`."""


def dapo(number: int, answer: int | None = None, copy: int = 0):
    question = (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        f"$Answer (without quotes) where $Answer is the answer to the problem.\n\nWhat is {number} + 1?\n\nRemember to "
        'put your answer on its own line after "Answer:".'
    )
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": question, "role": "user"}],
        "ability": "MATH",
        "reward_model": {
            "ground_truth": str(number + 1 if answer is None else answer),
            "style": "rule-lighteval/MATH_v2",
        },
        "extra_info": {"index": f"{number}-{copy}"},
    }


def pair(*turns, chosen, rejected):
    speakers = ("Human", "Assistant")
    talk = "".join(f"\n\n{speakers[number % 2]}: {turn}" for number, turn in enumerate(turns))
    return {"chosen": f"{talk}\n\nAssistant: {chosen}", "rejected": f"{talk}\n\nAssistant: {rejected}"}


OPTIONS = ["All birds fly.", "Some birds swim.", "No bird sings.", "Birds eat."]
RECLOR = [
    {
        "context": f"Passage {label}.",
        "question": "What follows?",
        "answers": OPTIONS,
        "label": label,
        "id_string": "t_1",
    }
    for label in range(4)
]
LOGIQA = [
    {"context": f"Passage {label}.", "query": "What follows?", "options": OPTIONS, "correct_option": label}
    for label in range(4)
]
TRIVIA_QA = [
    {
        "question": "Who was the man behind The Chipmunks?", "question_id": "tc_2", "question_source": "http://x",
        "entity_pages": {"title": []}, "search_results": {"title": []},
        "answer": {
            "value": "David Seville", "aliases": ["David Seville", "Ross Bagdasarian"], "type": "WikipediaEntity",
            "normalized_value": "david seville", "normalized_aliases": ["david seville", "ross bagdasarian"],
            "matched_wiki_entity_name": "", "normalized_matched_wiki_entity_name": "",
        },
    }
]  # fmt: skip
HUMANEVAL = [
    {
        "task_id": "HumanEval/0", "prompt": 'def double(x):\n    """Return twice x."""\n', "entry_point": "double",
        "canonical_solution": "    return 2 * x\n",
        "test": "\n\nMETADATA = {}\n\n\ndef check(candidate):\n    assert candidate(2) == 4\n",
    }
]  # fmt: skip
MBPP = [
    {
        "task_id": 11, "text": "Write a function to double a number.", "code": "def double(x):\r\n  return 2 * x",
        "test_list": ["assert double(2) == 4", "assert double(3) == 6"], "test_setup_code": "",
        "challenge_test_list": [],
    }
]  # fmt: skip
MBPP_SANITIZED = [
    {
        "source_file": "x.ipynb", "task_id": 11, "prompt": "Write a function to double a number.",
        "code": "def double(x):\n  return 2 * x", "test_imports": ["import math"],
        "test_list": ["assert double(2) == 4", "assert double(3) == 6"],
    }
]  # fmt: skip
HH_RLHF = [
    pair("Hello", chosen="Hi there.", rejected="Go away."),
    pair("Hello", chosen="Hi there.", rejected="No."),
    pair("How?", "Like so.", "Why?", chosen="Because:\n\nit is.", rejected="Ask me later."),
]
ROWS = {
    "dapo_math": [dapo(number) for number in range(3)],
    "dapo_math_processed": [
        {"prompt": f"What is {number} + 1?", "solution": str(number + 1), "data_source": "math_dapo"}
        for number in range(3)
    ],
    "hh_rlhf": HH_RLHF,
    "reclor": RECLOR,
    "logiqa": LOGIQA,
    "trivia_qa": TRIVIA_QA,
    "humaneval": HUMANEVAL,
    "mbpp": MBPP,
}
