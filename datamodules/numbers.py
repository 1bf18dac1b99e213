r"""Parses numbers in generated text, whatever their spelling, for every grader.

As in the graders of GSM8K and MATH, spelling does not change a number:

- currency signs, a plus, a percent sign, surrounding spaces, a final period, Markdown and LaTeX
  markup around it, and trailing zeros after the decimal point are ignored: "$5.00", "5%" and
  ``\boxed{5}`` are 5;
- thousands may be separated by commas, underscores, apostrophes, thin or no-break spaces, or
  LaTeX's ``{,}``: "1,234", "1_234";
- minus signs and digits of all scripts, "1e3", and fractions are parsed: "1/2" is 0.5, "1 1/2" is
  1.5. Values are compared exactly, not as floats.

Some spellings are ambiguous. "5%" is 5 and never 0.05, a comma or point before three digits follows
English usage ("1.234" is below 2, "1,234" is above 1000), a plain space does not separate
thousands, and a whole number before a fraction belongs to it. In running text, a minus after a
word, a number or a bracket is a subtraction or a hyphen, and a minus followed by a space is a sign
only after "=". Units, number words, sums and powers are not parsed.
"""

import re
import unicodedata
from fractions import Fraction

_MINUS_SIGNS = "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d"
_CHARACTERS = str.maketrans({**dict.fromkeys(_MINUS_SIGNS, "-"), "\u066b": ".", "\u066c": ","})
_LATEX_SIGNS = re.compile(r"\{(,)\}|\\([$%])|\\[,!;:()\[\]]")  # the signs in groups are kept
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\s*(?:\{([^{}]*)\}|([0-9]))\s*(?:\{([^{}]*)\}|([0-9]))")
_SMALL_FRACTION = re.compile("[\u00bc-\u00be\u2150-\u215e\u2189]")
_BOX = re.compile(r"\\f?box(?:ed)?\s*\{([^{}]*)\}")

_CURRENCY = "[$\u00a2-\u00a5\u20a0-\u20c0]"
_SEPARATOR = "[,_'\u2019\u00a0\u2009\u202f]"
# Groups of three digits, or India's: 12,34,567.
_GROUPED = rf"[0-9]{{1,3}}(?:{_SEPARATOR}[0-9]{{2,3}})*{_SEPARATOR}[0-9]{{3}}(?![0-9])"
_DECIMAL = (
    rf"(?:(?:{_GROUPED}|[0-9]+)(?:\.[0-9]+)?|(?<!\w)\.[0-9]+)(?:[eE][-+]?[0-9]{{1,3}}(?!\w))?"
)
# A fraction is one number, so that "1/2" is not read as 2.
_UNSIGNED = rf"(?:[0-9]+\ (?=[0-9]+/[0-9]))?{_DECIMAL}(?:/{_DECIMAL})*"
_IN_TEXT = re.compile(rf"(?:(?<![\w.)%])-|(?<==)-\ |(?<==\ )-\ )?(?:{_CURRENCY}\ ?-?)?{_UNSIGNED}")
_WHOLE = re.compile(
    rf"[\s*`$]*((?:[-+]\s*)?(?:{_CURRENCY}\s?-?)?{_UNSIGNED})\s*(?:%|{_CURRENCY})*[\s.*`$]*"
)
_IGNORED = re.compile(rf"{_SEPARATOR}|{_CURRENCY}")


def read_number(text: str) -> str | None:
    r"""Parses a text, or the last ``\boxed{}`` in it, as one number.

    Returns:
        The value in canonical form, e.g. "-1200" for "-$1,200.00", and a fraction in lowest terms,
        e.g. "1/3", if it has no finite decimal. None if the text is not one number.
    """
    plain = _plain(text)
    boxes = _BOX.findall(plain)
    match = _WHOLE.fullmatch(boxes[-1] if boxes else plain)
    return None if match is None else _value(match[1])


def numbers_in(text: str) -> list[str]:
    """Returns the numbers in a text in order, each in the form of `read_number`."""
    return [_value(match) for match in _IN_TEXT.findall(_plain(text))]


def same_number(text: str, answer: str) -> bool:
    """Returns whether two texts are the same number, in any spelling, or the same text.

    Surrounding spaces and a final period are ignored.
    """
    value, expected = read_number(text), read_number(answer)
    if value is None or expected is None:
        return text.strip().removesuffix(".") == answer.strip().removesuffix(".")
    return value == expected


def _plain(text: str) -> str:
    """Returns a text with ASCII digits, signs and fractions."""
    text = re.sub(r"\d", lambda digit: str(unicodedata.decimal(digit[0])), text)
    text = _LATEX_SIGNS.sub(lambda sign: sign[1] or sign[2] or "", text.translate(_CHARACTERS))
    return _SMALL_FRACTION.sub(_fraction, _LATEX_FRACTION.sub(_fraction, text))


def _fraction(match: re.Match[str]) -> str:
    """Returns a fraction with a slash, after a space if a whole number precedes it."""
    parts = [part for part in match.groups() if part is not None]
    ratio = "/".join(parts) or unicodedata.normalize("NFKD", match[0]).replace("\u2044", "/")
    return f" {ratio}" if match.string[match.start() - 1 : match.start()].isdigit() else ratio


def _value(spelling: str) -> str:
    """Returns the value of a match; dates and divisions by zero stay unchanged."""
    text = _IGNORED.sub("", spelling)
    start = next(index for index, character in enumerate(text) if character in ".0123456789")
    whole, _, ratio = text[start:].rpartition(" ")
    try:
        numerator, denominator, *more = [*map(Fraction, ratio.split("/")), Fraction(1)]
        value = Fraction(whole or 0) + numerator / denominator
    except (ValueError, ZeroDivisionError):  # Python parses at most 4,300 digits
        return text
    return text if more[1:] else _decimal(-value if "-" in text[:start] else value)


def _decimal(value: Fraction) -> str:
    """Returns a value as a finite decimal if it has one, else as a fraction."""
    rest, decimals = value.denominator, 0
    while rest > 1 and (rest % 2 == 0 or rest % 5 == 0):
        rest //= 10 if rest % 10 == 0 else 2 if rest % 2 == 0 else 5
        decimals += 1
    if rest > 1:
        return str(value)
    digits = str(abs(value.numerator) * 10**decimals // value.denominator).zfill(decimals + 1)
    point = len(digits) - decimals
    sign = "-" if value < 0 else ""
    return sign + ".".join(filter(None, (digits[:point], digits[point:])))
