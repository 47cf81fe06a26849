"""Sheets of labels: whatever a spreadsheet does to one, labels reach their answers, or none do."""

import csv
import io
import random

import pytest

from lm_polygraph_asmi.decisions.labels import is_wrong, labels_in, with_labels
from lm_polygraph_asmi.scoring.sheet import COLUMNS, LONGEST, key_of, read_sheet, write_sheet
from lm_polygraph_asmi.tables import Row

TEXTS = ["Who?", " 1931", "=1+1", "-5", "+1", "@x", "\t", "\rx", "a\r", "a\r\nb\n", 'so "it"; x',
         "né 🪁", "x" * 39_700 + "y" * 300, "1e3", "TRUE", "007", "[1]", "", "\u2028", "key,prompt",
         "a\nb"]  # fmt: skip
NUMBER = len(TEXTS)


def records(number=NUMBER, digest="d"):
    """As `score_file` writes them: some are chats, of token ids, or failed."""
    made = [
        {"row": n + 1, "prompt": TEXTS[n % len(TEXTS)], "answer": TEXTS[-1 - n % len(TEXTS)],
         "correct": None, "digest": f"{digest}{n // 2}", "signals": {"msp": n / 7, "score": 1e-7}}
        for n in range(number)
    ]  # fmt: skip
    made[1] |= {"answer": [7, 8], "scored_text": " Brask</s>"}
    made[2]["prompt"] = [
        {"role": "user", "content": "Who?"},
        {"role": "user", "content": "So？ \nAct:"},
    ]
    return [*made, {"row": number + 1, "prompt": "x", "correct": None, "error": "too long"}]


def labelled(made, *sheets):
    rows = [Row(record["row"], record) for record in made]
    return with_labels(rows, labels_in(sheets, rows).labels)


@pytest.fixture
def written(tmp_path):
    write_sheet(records(), tmp_path / "labels.csv")
    return tmp_path / "labels.csv"


def cells_of(path):
    """By Python's own reader, as a list of lists."""
    return list(csv.reader(io.StringIO(path.read_text("utf-8-sig"), newline=""), strict=True))


@pytest.mark.parametrize("more", [{}, {"accept": True}, {"id": "=7"}, {"id": {"d": 1}}])
def test_what_is_written(tmp_path, more):
    path = tmp_path / "labels.csv"
    *given, failed = (record | more for record in records())
    write_sheet([*given, failed | {"digest": None}], path)
    header, *rows = cells_of(path)
    assert header == [*COLUMNS[:1], "question", *COLUMNS[1:], *more, "msp", "score"]
    keys = [row[0] for row in rows]
    assert (keys, len({*keys})) == ([key_of(record) for record in given], len(given))
    assert [rows[at][1] for at in (0, 9, 12)] == ["Who?", "b", "y" * 300]
    assert (rows[1][2].strip(), rows[2][1], rows[2][4]) == (
        "Brask</s>",
        "So？",
        "Who?\nSo？ \nAct:",
    )
    assert [float(row[-2]) for row in rows] == [record["signals"]["msp"] for record in given]
    cells = [cell for row in rows for cell in row]
    assert max(map(len, cells)) <= LONGEST + 10  # a spreadsheet breaks a longer cell in two
    assert not [cell for cell in cells if cell.startswith(("=", "+", "-", "@", "\t", "\r"))]
    with pytest.raises(ValueError, match=r"labels\.csv exists"):
        write_sheet(given, path)


WORDS = {"TRUE": True, "False": False, "wahr": True, "FAUX": False, "1": True, "0": False}


def opened_and_saved(path, draw, labels):
    """The sheet as a person and a spreadsheet leave it; key -> label."""
    header, *rows = cells_of(path)
    header[5] = draw.choice([str.title, str.upper, str])(header[5])
    keys = [row[0] for row in rows]
    for row in rows:
        row[3] = labels.get(row[0], "")
        for at in (1, 4, -2, -1):  # what a spreadsheet, or a person, makes of texts and numbers
            row[at] = draw.choice([row[at], f" {row[at]}", "", "#NAME?", "1,5", "né\n\x0b", "1931"])
        row[2] = draw.choice([row[2], f" {row[2]}", "", "#NAME?"])
        row[0] = draw.choice([row[0], row[0].upper(), f" {row[0]} ", row[0].title()])
    draw.shuffle(rows)
    gone = draw.choice([0, 3])
    removed, rows = {row[0].strip().lower() for row in rows[:gone]}, rows[gone:]
    header, rows = [*header, "my notes é"], [[*row, "x"] for row in rows]
    order = draw.sample(range(len(header)), len(header))
    table = [[row[at] for at in order] for row in (header, *rows)]
    table.insert(draw.randint(1, len(table)), draw.choice([[""] * len(header), []]))
    file, quoting = io.StringIO(), draw.choice([csv.QUOTE_ALL, csv.QUOTE_MINIMAL])
    csv.writer(file, delimiter=draw.choice(",;\t"), quoting=quoting).writerows(table)
    text = file.getvalue().replace("\r\n", draw.choice(["\r\n", "\n"]))
    encoding = draw.choice(["utf-8", "utf-8-sig", "cp1252", "latin-1"])
    path.write_bytes(text.encode(encoding, errors="replace"))
    return {key: label for key, label in labels.items() if key not in removed and key in keys}


@pytest.mark.parametrize("seed", range(40))
def test_labels_reach_their_answers(tmp_path, seed):
    draw, made, path = random.Random(seed), records(), tmp_path / "labels.csv"
    made[0]["correct"] = True  # labels of a sheet take the place of the rows' own
    by = draw.choice(["", "msp"])
    write_sheet(made, path, by)
    plain = {key_of(record, by): key_of(record) for record in made[:-1]}
    keys = draw.sample(sorted(plain), draw.randint(4, 12))
    found = opened_and_saved(path, draw, {key: draw.choice(list(WORDS)) for key in keys})
    labels = {plain[key]: label for key, label in found.items()}
    read, order = read_sheet(path, made)
    expected = {key: {"correct": label} for key, label in labels.items()}
    assert ({key: of for key, of in read.items() if of}, order or "") == (expected, by)
    for row, record in zip(labelled(made, path), made, strict=True):
        assert row.content | {"correct": None} == record | {"correct": None, "quality": None}
        label = labels.get(key_of(record)) if record.get("digest") else None
        assert row.content["correct"] == label
        assert label is None or is_wrong(row.content) != WORDS[label]


def test_two_sheets_and_other_labels(written, tmp_path):
    """A quality, and clusters, which are labels of people too; two people share the work."""
    key, other = (key_of(record) for record in records()[:2])
    written.write_text(f"key;quality;cluster\n{key};0,9;a\n")
    (tmp_path / "b.csv").write_text(f"key,correct\n{other},TRUE\n")
    first, second, third, *_ = labelled(records(), written, tmp_path / "b.csv")
    assert (first.content["quality"], first.content["cluster"]) == ("0,9", "a")
    assert (second.content["correct"], third.content["correct"]) == ("TRUE", None)


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize(
    ("scored", "cell", "refused"),
    [
        (" Brask, in Norland", "Edda Holm", True),
        ("Brask", "Brask (wrong: it was Edda Holm)", True),
        ("Brask", "1931", True),
        ("1931", "1932", True),
        ("in the year 1931 or in 1932", "in the year 1931 or in 1933", True),
        ("Dvořák", "Dvoák", False),
        ("Dvořák", "Dvorak", False),
        ("Москва", "Одесса", False),
        ("Прага", "Vienna", True),
        ("A Holm", " a HOLM.\n", False),
        ("3 of May", "03. Mai", False),
        ("007", "7", False),
        ("True", "WAHR", False),
        ("7/3 or so", "#WERT!", False),
    ],
)
def test_a_label_of_a_rewritten_answer_is_refused(tmp_path, scored, cell, refused, lost):
    """A person corrects the answer in the sheet and calls it right. An encoding loses letters, but
    not if another answer has them still."""
    made = [
        each | {"answer": answer} for each, answer in zip(records(), (scored, "né"), strict=False)
    ]
    with (path := tmp_path / "labels.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([
            ("key", "answer", "correct"),
            (key_of(made[0]), cell, "true"), (key_of(made[1]), "nÃ©" if lost else "né", ""),
        ])  # fmt: skip
    if refused or not (lost or scored.isascii()):
        with pytest.raises(ValueError, match=r"labels\.csv, row 1: .* answer .* is not the scored"):
            labelled(made, path)
    else:
        assert labelled(made, path)[0].content["correct"] == "true"


KEY, SECOND = (key_of(record) for record in records()[:2])
REFUSED = [
    (f"key,correct\n{KEY},TRUE\n{KEY.upper()},FALSE", "row 2.*row 1"),
    (f"key,correct\n{KEY},\n{KEY},FALSE", "row 2.*row 1"),
    (f"key,correct\n{key_of(records(digest='e')[0])},TRUE", "row 1.*key"),  # of another file
    (f"key,correct\n{key_of(records()[0] | {'row': 99})},TRUE", "row 1.*key"),
    (f"key,correct\n{KEY},TRUE\n{KEY[:-1]},TRUE", f"row 2.*{KEY[:-1]!r}"),
    (f"key,correct\n{KEY},TRUE\n,TRUE", "row 2.*has no key"),
    (f"key,correct\n{KEY},TRUE,\n", "row 1.*cells"),
    (f"key,correct\n{KEY}\n", "row 1.*cells"),
    (f"key,rank by msp\n{KEY},1", "row 1.*sorted"),
    (f"key,correct\n{KEY},\n{key_of(records()[1], 'msp')},", "several sheets"),
    (f"key,Correct\n{KEY},TRUE", "'Correct'.*'correct'"),
    (f"key,correct,Quality\n{KEY},TRUE,1", "'Quality'.*'quality'"),
    (f"key,correct,correct\n{KEY},TRUE,FALSE", "'correct'.*twice"),
    (f"key,context\n{KEY},x", "'context'"),
    (f"Key,correct\n{KEY},TRUE", "'key'"),
    (f"prompt,correct\n{KEY},TRUE", "'key'"),
    ("", "'key'"),
]


def with_keys(order):
    """Rows whose keys are those of the rows in this order; the texts stay."""
    return lambda rows: [[rows[at][0], *row[1:]] for at, row in zip(order(rows), rows, strict=True)]


def spoiled(rows):
    """Most texts are changed, in ways that are no other answer's."""
    draw = random.Random(0)
    changed = [draw.choice(["#NAME?", "#NAME?", f" {row[4].upper()}\n"]) for row in rows]
    return [[*row[:4], text, *row[5:]] for row, text in zip(rows, changed, strict=True)]


MOVED = [
    lambda rows: sorted(range(len(rows)), key=lambda at: rows[at][0]),
    lambda rows: [*range(1, len(rows)), 0],
    lambda rows: [1, 0, *range(2, len(rows))],
    lambda rows: reversed(range(len(rows))),
]
CHANGED = [
    lambda rows: rows[::-1],
    lambda rows: [
        [*row[:2], f'"{row[2].lower()}"', row[3], row[4].strip(), *row[5:]] for row in rows
    ],
    lambda rows: [[row[0], "1931", *row[2:4], "1931", *row[5:]] for row in rows],
    lambda rows: [[row[0], "", *row[2:4], "", *row[5:]] for row in rows],
    spoiled,
]
CHANGES = [
    *((records(), change, False) for change in CHANGED),
    *((records(), with_keys(order), True) for order in MOVED),
    *((records(), lambda rows, order=order: (moved := with_keys(order)(rows))[:2]
       + spoiled(moved[2:]), True) for order in MOVED[:3]),
    # In any script; the same question and answer twice, of which nothing tells the keys apart.
    *(([each | {"prompt": letter * n, "answer": letter} for n, each in enumerate(records(), 1)],
       with_keys(MOVED[1]), True) for letter in ("д", "山", "ق", "अ")),
    # Of equal answers, the error is about the questions.
    ([each | {"prompt": f"Who {n}?", "answer": "Yes"} for n, each in enumerate(records(), 1)],
     with_keys(MOVED[1]), True),
    ([each | {"prompt": "Who?", "answer": " x"} for each in records()], with_keys(MOVED[2]), False),
]  # fmt: skip


@pytest.mark.parametrize(("made", "change", "moved"), CHANGES)
def test_keys_that_were_moved_alone_are_refused_and_changed_texts_are_not(
    tmp_path, made, change, moved
):
    write_sheet(made, path := tmp_path / "labels.csv")
    header, *rows = cells_of(path)
    table = change([[*row[:3], "TRUE", *row[4:]] for row in rows])
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([header, *table])
    if moved:
        with pytest.raises(
            ValueError,
            match=r"labels\.csv, row \d+: .* not those of its key: "
            r"the [a-z]+ (.+) is not the scored one, (?!\1,)",
        ):
            labelled(made, path)
    else:
        found = [row.content["correct"] for row in labelled(made, path)]
        assert found == ["TRUE"] * NUMBER + [None]


@pytest.mark.parametrize(("text", "words"), REFUSED)
def test_what_is_refused(written, text, words):
    written.write_text(text)
    with pytest.raises(ValueError, match=rf"labels\.csv.*{words}"):
        labelled(records(), written)
