"""Rows made up here in the columns that GSM8K and MATH have where they are published."""

import json

GSM8K = [
    {
        "question": f"A printer makes {pages} pages an hour. How many pages are made in {hours} hours?",
        "answer": f"Every hour gives {pages} pages, so {hours} hours give {pages}*{hours}=<<{pages}*{hours}="
        f"{pages * hours}>>{pages * hours} pages.\n#### {pages * hours:,}",
    }
    for pages, hours in ((120, 3), (250, 8), (90, 2), (700, 12), (35, 4), (60, 6), (1000, 9), (45, 5), (80, 7), (15, 1))
]
GSM8K_TRUTHS = ["360", "2000", "180", "8400", "140", "360", "9000", "225", "560", "15"]

MATH_ANSWERS = [
    "\\frac{3}{4}", "-7", "2\\sqrt{5}", "\\$18.90", "(1, \\infty)", "\\left\\{ 1, 2 \\right\\}", "\\text{(B)}",
    "45^\\circ", "x^2+3x", "\\begin{pmatrix} 1 \\\\ \\frac{1}{2} \\end{pmatrix}",
]  # fmt: skip
MATH = [
    {
        "problem": f"Find the quantity number {number}.",
        "level": "Level 3",
        "type": "Algebra",
        "solution": f"A first guess is $\\boxed{{0}}$, but the sum of both parts is $\\boxed{{{answer}}}$.",
    }
    for number, answer in enumerate(MATH_ANSWERS)
]


def write_jsonl(path, rows):
    """Write rows as JSON lines; a text is written as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path
