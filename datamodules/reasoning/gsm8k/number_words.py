"""What words say about numbers: the tables behind `mentions.mentions_of`.

Everything is in lower case and in the singular; `mentions` adds plurals, "-ed", "-ing" and "-ly".
Words that are more often something else are left out: "second" and "third" count mostly in order,
"score" is one in a game; a "third" with a numerator in front is a fraction.
"""

from fractions import Fraction

_UNITS = "one two three four five six seven eight nine"
_TEENS = "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen"
UNITS = {word: value for value, word in enumerate(_UNITS.split(), start=1)}
TEENS = {word: value for value, word in enumerate(_TEENS.split(), start=10)}
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
TENS = {word: 10 * value for value, word in enumerate(_TENS.split(), start=2)}
SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9}
"""May stand after a number in digits or words, or after "a"."""

DENOMINATORS = {
    "half": 2,
    "halve": 2,
    "third": 3,
    "quarter": 4,
    "fourth": 4,
    "fifth": 5,
    "sixth": 6,
    "seventh": 7,
    "eighth": 8,
    "ninth": 9,
    "tenth": 10,
}
"""After a numerator ("a", "one", "two thirds") a fraction."""

_STATED: dict[str, list[int | str]] = {
    "zero": [0],
    "half": ["1/2", 2, 1],
    "halve": ["1/2", 2, 1],
    "quarter": ["1/4", 4, 1],
    "once": [1],
    "twice": [2],
    "double": [2],
    "twofold": [2],
    "couple": [2],
    "pair": [2],
    "both": [2],
    "twin": [2],
    "thrice": [3],
    "triple": [3],
    "threefold": [3],
    "triplet": [3],
    "trio": [3],
    "quadruple": [4],
    "quintuple": [5],
    "dozen": [12],
}
STATED = {word: tuple(map(Fraction, values)) for word, values in _STATED.items()}
"""Words that say a number by themselves; it may be multiplied by, or divided by."""

_IMPLIED: dict[str, list[int | str]] = {
    # time
    "minute": [60],
    "hour": [60, 3600, 24],
    "day": [24, 7, 30, 365],
    "week": [7, 52, 4, 5],
    "weekend": [2],
    "weekday": [5],
    "workday": [5],
    "fortnight": [14],
    "month": [30, 4, 12, 31, 28],
    "year": [12, 365, 52, 366],
    "annual": [12, 365, 52],
    "decade": [10],
    "century": [100],
    "february": [28, 29],
    **{word: [30] for word in ("april", "june", "september", "november")},
    **{word: [31] for word in ("january", "march", "july", "august", "october", "december")},
    # money
    "dollar": [100],
    "cent": [100, "1/100"],
    "penny": [1, "1/100", 100],
    "nickel": [5, "1/20", 20],
    "dime": [10, "1/10"],
    "quarter": [25],
    "percent": [100],
    "percentage": [100],
    # length, weight, volume
    "inch": [12],
    "foot": [12, 3],
    "feet": [12, 3],
    "yard": [3, 36],
    "mile": [5280],
    "centimeter": [100, 10],
    "cm": [100, 10],
    "meter": [100, 1000],
    "kilometer": [1000],
    "km": [1000],
    "gram": [1000],
    "kilogram": [1000],
    "kg": [1000],
    "liter": [1000],
    "ml": [1000],
    "ounce": [16, 8, 32, 128],
    "pound": [16, 2000],
    "ton": [2000, 1000],
    "cup": [16, 8, 2],
    "pint": [16, 2, 8],
    "quart": [4, 32, 2],
    "gallon": [4, 128, 16, 8],
    # shapes and bodies
    "triangle": [3],
    "square": [4, 2],
    "rectangle": [2, 4],
    "rectangular": [2, 4],
    "cube": [6],
    "pentagon": [5],
    "hexagon": [6],
    "octagon": [8],
    "circle": [2, 360],
    "perimeter": [2, 4],
    "average": [2, 3],
    "dog": [4],
    "cat": [4],
    "cow": [4],
    "horse": [4],
    "chicken": [2],
    "spider": [8],
    "insect": [6],
    "finger": [10],
    "parent": [2],
    # wheels
    "bicycle": [2],
    "bike": [2],
    "tricycle": [3],
    "car": [4],
}
IMPLIED = {word: tuple(map(Fraction, values)) for word, values in _IMPLIED.items()}
"""What a word lets a reader know without saying it: 12 for a year, 100 for a percentage."""
