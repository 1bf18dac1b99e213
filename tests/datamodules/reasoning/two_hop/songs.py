"""Questions about songs, as rows of both public formats, and files of them."""

import csv

SONGS = [  # subject, bridge, answer
    ("Song A", "Ann", "Mia"),
    ("Song B", "Bea", "Nia"),
    ("Song C", "Ann", "Mia"),
    ("Song D", "Dea", "Oda"),
    ("Song E", "Eve", "Pia"),
]


def prompts(songs):
    """Rows as TwoHopFact has them."""
    return [
        {
            "uid": number,
            "e1.value": song,
            "e2.value": singer,
            "e3.value": mother,
            "e2.aliases": f"((({singer!r}, 'A. {singer}')),)",
            "e3.aliases": f"(({mother!r},),)",
            "r1(e1).prompt": f"The singer of '{song}' is",
            "r2(e2).prompt": f"The mother of {singer} is",
            "r2(r1(e1)).prompt": f"The mother of the singer of '{song}' is",
        }
        for number, (song, singer, mother) in enumerate(songs)
    ]


def templates(songs, second="the mother of {}"):
    """Rows as the csv files of Hopping Too Late have them."""
    return [
        {
            "id": number,
            "e1_label": song,
            "e2_label": singer,
            "e3_label": mother,
            "e3_aliases": f"['{mother} X', 'M']",
            "r1_template": "the singer of {}",
            "r2_template": second,
            "source_prompt": second.format(f"the singer of {song}") + " is" * (second[-1] == "}"),
        }
        for number, (song, singer, mother) in enumerate(songs)
    ]


def write(path, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return str(path)
