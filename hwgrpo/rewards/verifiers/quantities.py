"""Numbers in a text with their percent signs and units, from plain text and LaTeX."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

QUANTITY = re.compile(
    r"(?<![A-Za-z0-9_.^])(?<!\^[-+])(?P<sign>[-+](?=[0-9.]))?"
    r"(?P<number>[0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)(?P<dotted>(?:\.[0-9]+)+)?"
    r"(?:[eE](?P<exponent>[-+]?[0-9]{1,4})(?![0-9A-Za-z]))?"
    r"(?: ?(?:×|\*|x|·) ?10 ?(?:\^|\*\*) ?\(?(?P<ten>[-+]?[0-9]{1,4})\)?|(?:\^|\*\*)\(?(?P<power>[-+]?[0-9]{1,4})\)?"
    r"|(?: ?/ ?)(?P<divisor>[0-9][0-9,]*(?:\.[0-9]+)?))?"
    r"(?P<percent> ?(?:%|percent\b|per cent\b))?"
)
THOUSANDS = re.compile(r"[0-9]{1,3}(?:,[0-9]{3})+")
FRACTION = re.compile(r"\\[dt]?frac ?(?:\{([^{}\\]{1,60})\} ?\{([^{}\\]{1,60})\}|([0-9])([0-9]))")
STYLE = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mathit|operatorname|mbox) ?(?=\{)")
BOLD = re.compile(
    r"(?<![0-9])\*\*|\*\*(?![0-9])"
    r"|(?<![\w)\]}])(__?)((?=[-+$.0-9])[^_\n]{1,60}|[^_\n]{1,60}(?<=[0-9.%]))\1(?![\w{(])"
)
"""Signs of emphasis; underscores only as a pair around a text that begins or ends with a number: `101_{2}` has none."""
DOLLARS = re.compile(r"(?<![A-Za-z0-9_\\])[A-Z]{1,2}(?=\\?\$[0-9.])")
"""The letters of `US$18` and `A$18`."""
GROUPS = re.compile(r"(?<=[0-9])(?:\\,|\\ |['’_\u00a0\u202f\u2009])(?=[0-9]{3}(?![0-9]))")
"""Separators of thousands that are no comma: `1\\,000`, `1'000`."""
DASH = re.compile(r"(?<![\w.%)\]}])(?<![0-9] )[–‒](?=\\?\$?[0-9.])")
"""A dash as a minus sign, where no range can stand."""
SUPERSCRIPT = re.compile("[⁻⁺]?[⁰¹²³⁴-⁹]+")
PLAIN = {
    **dict.fromkeys(("−", "－", "﹣"), "-"),
    **dict.fromkeys(("\\,", "\\;", "\\:", "\\ ", "~", "\u00a0", "\u202f", "\u2009"), " "),
    **dict.fromkeys(("\\!", "\\left", "\\right"), ""),
    **dict.fromkeys(("^{\\circ}", "^\\circ", "\\circ"), "°"),
    **dict.fromkeys(("\\mu", "μ"), "µ"),
    **dict.fromkeys(("\\Omega", "\u2126"), "Ω"),
    "\\%": "%",
    "\\$": "$",
    "{,}": ",",
    "\\times": "×",
    "\\cdot": "·",
    "\\approx": "≈",
}
"""LaTeX and look-alikes -> the characters that are read."""
REMOVED = str.maketrans("", "", "${}€£¥₹\\`")
WIDE = {0xFF01 + code: 0x21 + code for code in range(94)}
"""Full-width characters -> those of ASCII."""
DIGITS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
LONGEST_NUMBER = 400
"""Characters of a number; no float has more before its decimal point."""
LONGEST_UNIT = 80

PREFIXES = {"p": -12, "n": -9, "µ": -6, "u": -6, "m": -3, "c": -2, "d": -1, "": 0, "k": 3, "M": 6, "G": 9, "T": 12}
UNITS = "m g s A K V W J N L l B b F C T H Hz Pa Ω mol eV bar cal"
PREFIXED = frozenset(UNITS.split())
"""Units that a prefix may precede."""


@dataclass(frozen=True)
class Quantity:
    """A number of a text."""

    value: float
    """As written, without the percent sign."""
    percent: bool
    rest: str
    """What follows it, of at most `LONGEST_UNIT` characters, in which a unit may stand."""


def plain(text: str) -> str:
    """Return a text without LaTeX markup, currency signs and emphasis; white space within lines is one space."""
    text = DASH.sub("-", GROUPS.sub("", DOLLARS.sub("", text.translate(WIDE))))
    for written, read in PLAIN.items():
        text = text.replace(written, read)
    text = FRACTION.sub(_fraction, text)
    text = SUPERSCRIPT.sub(lambda found: "^" + found[0].translate(DIGITS), BOLD.sub(r"\2", STYLE.sub("", text)))
    return "\n".join(" ".join(line.split()) for line in text.translate(REMOVED).split("\n"))


def _fraction(found: re.Match[str]) -> str:
    apart = " " if found.string[found.start() - 1 : found.start()].isdigit() else ""  # of a mixed number: not 11/2
    return f"{apart}{found[1] or found[3]}/{found[2] or found[4]}"


def quantities(text: str) -> list[Quantity | None]:
    """Return the numbers of a `plain` text in order; None for one that has no finite value or wrong separators."""
    return [_quantity(found, text) for found in QUANTITY.finditer(text)]


def last_number(text: str) -> str | None:
    """Return the last number of a `plain` text in digits: `1000` for `1,000` and `1e3`, `0.5` for `1/2`.

    One as written keeps all its digits. None without a number, and where it has no finite value or wrong separators.
    """
    all_found = [*QUANTITY.finditer(text)]
    last = _quantity(all_found[-1], text) if all_found else None
    if last is None:
        return None
    found = all_found[-1]
    if any(found[part] for part in ("exponent", "ten", "power", "divisor")):
        return f"{last.value:.15g}"
    return ("-" if found["sign"] == "-" else "") + found["number"].replace(",", "")


def _quantity(found: re.Match[str], text: str) -> Quantity | None:
    value, divisor = _number(found["number"]), _number(found["divisor"] or "1")
    if value is None or not divisor or found["dotted"]:  # 1.2.3 is a version, a date, or has points for thousands
        return None
    try:
        value *= 10.0 ** int(found["exponent"] or 0) * 10.0 ** int(found["ten"] or 0) / divisor
        value **= int(found["power"] or 1)
    except (OverflowError, ZeroDivisionError):
        return None
    if not math.isfinite(value):
        return None
    signed = -value if found["sign"] == "-" else value
    return Quantity(signed, bool(found["percent"]), text[found.end() : found.end() + LONGEST_UNIT])


def _number(text: str) -> float | None:
    text = text.rstrip(",")
    if len(text) > LONGEST_NUMBER:
        return None
    whole, point, decimals = text.partition(".")
    if "," in whole and not THOUSANDS.fullmatch(whole):
        return None  # a list, or a decimal comma
    return float(whole.replace(",", "") + point + decimals)


def plain_number(text: str) -> float | None:
    """Return the value of a text that is one number, as in `-1,000.5`, `.5`, `1e-1`; None for any other text."""
    text = text.strip().replace("−", "-").rstrip(".,")
    whole = text.lstrip("+-").partition(".")[0]
    if "," in text and not (THOUSANDS.fullmatch(whole) and "," not in text.partition(".")[2]):
        return None
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


def unit_of(rest: str) -> str:
    """Return a text in the form in which units are compared: without spaces around signs or a final period."""
    return re.sub(r" ?([/·*^]) ?", r"\1", rest.split("\n")[0]).replace("*", "·").strip(" .")


def has_unit(rest: str, unit: str) -> bool:
    """Return whether the text after a number starts with a unit, in the form of `unit_of`."""
    following = unit_of(rest)
    return following.startswith(unit) and not re.match(r"[\w/·^]", following[len(unit) :])


def prefix_ratio(rest: str, unit: str) -> float | None:
    """Return the factor that turns the unit after a number into `unit`, None where more than a prefix differs."""
    found = re.match(r"[A-Za-zµΩ]+(?![\w/·^])", unit_of(rest))
    own, wanted = _split_prefix(found[0]) if found else None, _split_prefix(unit)
    if own is None or wanted is None or own[1] != wanted[1]:
        return None
    return 10.0 ** (own[0] - wanted[0])


def _split_prefix(unit: str) -> tuple[int, str] | None:
    """Return the power of ten of a unit's prefix and the unit without it."""
    if unit in PREFIXED:
        return 0, unit
    prefix, base = unit[:1], unit[1:]
    return (PREFIXES[prefix], base) if prefix in PREFIXES and base in PREFIXED else None
