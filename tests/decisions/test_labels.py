"""Which answers are wrong, which rows belong together, and what is no label, id or cluster."""

import math

import numpy as np
import pytest

from lm_polygraph_asmi.analysis import Labelled
from lm_polygraph_asmi.decisions.labels import clusters_of, digest_of_texts, is_wrong, labels_of
from tests.decisions.conftest import WORDS, numbered

FIRST = {"id": 1, "correct": True, "cluster": "a"}
NO_NAME = 'row 2: "cluster": expected a text or a number'


def read(*contents):
    rows = numbered(*contents)
    return [is_wrong(row.content) for row in rows], labels_of(rows), clusters_of(rows)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"label": 1}, 'expected "correct" .* got neither: the fields prompt, label'),
        ({"correct": True, "quality": 1}, r"got \['correct', 'quality'\]"),
        *(({"correct": value}, "expected true or false, got") for value in ("yes", 2, 0.5)),
        *(({"quality": value}, "quality must be a number")
          for value in ("good", "1,5", "0.9.1", True, math.nan, math.inf)),
        *(({"quality": value}, "between 0 and 1, got") for value in (90, 1.2, -0.1, 2)),
        ({"correct": True, "id": "1.0"}, r"row 2: .id.: row 1 has .1\.0., too: label it once"),
        ({"correct": True, "id": math.nan}, 'row 2: "id": expected a text or a number'),
        ({"correct": True}, "in all rows or in none, got none in row 2"),
        *(({"correct": True, "cluster": name}, NO_NAME)
          for name in (math.nan, "", " \n", True, ["a"], {"a": 1})),
    ],
    ids=str,
)  # fmt: skip
def test_what_a_row_is_refused_for(content, words):
    with pytest.raises(ValueError, match=words):
        read(FIRST, content)
    if words == NO_NAME:
        with pytest.raises(ValueError, match="clusters, row 1: expected a text or a number"):
            Labelled([0, 1], ["a", content["cluster"]])


def test_labels():
    assert [is_wrong({"correct": value}) for value in (True, False, 1, 0)] == [False, True] * 2
    right = (
        (0.49, None),
        (0.5, None),
        (1, None),
        (0.6, 0.7),
        (90, 50),
        (10, 50),
        (0.3, 0),
        (-1.0, -2.0),
    )
    found = [is_wrong({"quality": quality}, limit) for quality, limit in right]
    assert found == [True, False, False, True, False, True, False, False]
    assert not is_wrong({"quality": 1 + 1e-9})  # a metric's rounding
    for right_from in (math.nan, math.inf, True, "0.5"):
        with pytest.raises(ValueError, match="right_from must be a number"):
            is_wrong({"quality": 0.9}, right_from)


@pytest.mark.parametrize("form", [str, lambda t: [t], lambda t: {"text": t}])
def test_passages_are_found_by_their_context_or_else_their_prompt(form):
    """Of a chat only the text counts."""
    passages = [f"{word} was built in Brask in 1931 by three brothers. " * 3 for word in WORDS]
    rows = numbered(*({"context": form(passages[n // 2])} for n in range(6)))
    assert [clusters_of(rows).index(key) for key in clusters_of(rows)] == [0, 0, 2, 2, 4, 4]
    chats = [[{"role": "user", "content": f"{passages[n // 2]} {n}?"}] for n in range(6)]
    found = clusters_of(numbered(*({"prompt": chat, "context": " "} for chat in chats)))
    assert [found.index(key) for key in found] == [0, 0, 2, 2, 4, 4]


@pytest.mark.parametrize(
    "names",
    [
        (1, 1.0, "1", " 1\n", "1.0", np.int64(1), np.float32(1)),
        ("Zo\u00eb", "Zoe\u0308", "Zo\u00eb\u200b"),
        ("Doc a", "Doc\u00a0a ", "Doc\r\na", "Doc  a"),
        (0.5, "0.5"),
    ],
)
def test_one_cluster_under_several_names(names):
    assert len(set(clusters_of(numbered(*({"cluster": name} for name in names))))) == 1
    assert Labelled([0] * len(names), list(names)).n_clusters == 1
    others = numbered(*({"cluster": name} for name in ("1", "01", "A", 2**60, 2**60 + 1)))
    assert len(set(clusters_of(others))) == 5


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("Who?", "Who? "),
        ("Who\nbuilt it?", "Who\r\nbuilt it?"),
        ("Zo\u00eb?", "Zoe\u0308?"),
        ("Who?", "\ufeffWho?"),
        ([{"role": "user", "content": "Who?"}], [{"role": "user", "content": "Who? "}]),
    ],
)
def test_a_question_labelled_twice_is_one_cluster(first, second):
    named = ((first, "a"), (second, "b"), ("When?", "c"), ("When?", "b"), ("Why?", "d"))
    rows = numbered(*({"prompt": prompt, "cluster": cluster} for prompt, cluster in named))
    found = clusters_of(rows)
    assert len(set(found[:4])) == 1
    assert found[4] not in found[:4]
    unnamed = clusters_of(numbered(*({"prompt": p} for p in (first, second, "When?"))))
    assert unnamed[0] == unnamed[1] != unnamed[2]
    assert digest_of_texts(first, " Holm") == digest_of_texts(second, "Holm\n")
    assert digest_of_texts(first, "Holm") != digest_of_texts(first, "Rell")
