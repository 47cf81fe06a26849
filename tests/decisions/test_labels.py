"""Which answers are wrong, which rows belong together, and what is no label, id or cluster."""

import math

import numpy as np
import pytest
from scipy.sparse.csgraph import connected_components

from lm_polygraph_asmi.analysis import Labelled
from lm_polygraph_asmi.decisions.labels import clusters_of, digest_of_texts, is_wrong, labels_of
from lm_polygraph_asmi.inputs import as_chat
from tests.decisions.conftest import WORDS, numbered

FIRST = {"id": 1, "correct": True, "cluster": "a"}
QUESTIONS = [
    ("Who?", " Who? ", "\ufeffWho?", as_chat("Who?\n")),
    ("Zo\u00eb\nwho?", "Zoe\u0308\r\nwho?", as_chat("Zo\u00eb who?")),
    ("Who",), ("When?", "When? "),
]  # fmt: skip
CLUSTERS = [
    (1, 1.0, "1", " 1\n", "1.0", np.int64(1), np.float32(1)), (-1, "-1.0"), ("01",), ("A",),
    (2**60,), (2**60 + 1,), ("Zo\u00eb", "Zoe\u0308", "Zo\u00eb\u200b"), (0.5, "0.5"),
    ("Doc a", "Doc\u00a0a ", "Doc\r\na", "Doc  a"),
]  # fmt: skip
"""Texts and names that are the same question, and the same cluster."""


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"correct": True, "quality": 1}, "correct and quality"),
        *(({"correct": value}, "correct") for value in ("yes", 2, 0.5, ["true"])),
        *(({"quality": value}, "quality") for value in ("good", "1,5", "0.9.1", True, math.nan)),
        *(({"quality": value}, "between 0 and 1") for value in (90, 1.2, -0.1, 2)),
        ({"correct": True, "id": "1.0"}, '"id": row 1'),
        ({"correct": True, "id": math.nan}, '"id"'),
    ],
    ids=str,
)
def test_labels_that_are_refused(content, words):
    with pytest.raises(ValueError, match=rf"row 2: .*{words}"):
        labels_of(numbered(FIRST, content))


@pytest.mark.parametrize("name", [math.nan, "", " \n", True, ["a"], {"a": 1}, None])
def test_clusters_that_are_refused(name):
    with pytest.raises(ValueError, match=r"cluster.* row 2|row 2: .*cluster"):
        clusters_of(numbered(FIRST, {"cluster": name}))
    if name is not None:
        with pytest.raises(ValueError, match="clusters, row 1"):
            Labelled([0, 1], ["a", name])


def test_labels():
    for value, wrong in ((True, False), (False, True), (1, False), (0, True), (None, None)):
        assert is_wrong({"correct": value}) is wrong
    for quality, limit, wrong in (
        (0.49, None, True), (0.5, None, False), (1 + 1e-9, None, False), (-1e-9, None, True),
        (0.6, 0.7, True), (90, 50, False), (10, 50, True), (0.3, 0, False), (-1.0, -2.0, False),
    ):  # fmt: skip
        assert is_wrong({"quality": quality}, limit) is wrong
    for right_from in (math.nan, math.inf, True, "0.5"):
        with pytest.raises(ValueError, match="right_from"):
            is_wrong({"quality": 0.9}, right_from)


def same(rows):
    """Rows (question, cluster) that share one of both, and so on: number of the first such row."""
    pairs = np.array(rows)
    groups = connected_components((pairs[:, None] == pairs).any(2))[1].tolist()
    return [groups.index(group) for group in groups]


@pytest.mark.parametrize("seed", range(40))
def test_clusters_are_those_of_plain_loops(seed):
    """Of a question that is labelled twice as well, whatever its clusters are called."""
    rng = np.random.default_rng(seed)
    drawn = [(rng.integers(4), rng.integers(8)) for _ in range(rng.integers(2, 8))]
    rows = [
        {"prompt": of[q][rng.integers(len(of[q]))], "cluster": by[c][rng.integers(len(by[c]))]}
        for of, by, (q, c) in ((QUESTIONS, CLUSTERS, pair) for pair in drawn)
    ]
    unnamed = [{"prompt": row["prompt"]} for row in rows]
    for given, pairs in ((rows, drawn), (unnamed, [(question, question) for question, _ in drawn])):
        found = clusters_of(numbered(*given))
        assert [found.index(key) for key in found] == same(pairs)
    names = [row["cluster"] for row in rows]
    assert Labelled([0] * len(rows), names).n_clusters == len({c for _, c in drawn})
    for row, (question, _) in zip(rows, drawn, strict=True):
        digests = [digest_of_texts(row["prompt"], text) for text in (" Holm", "Holm\n", "Rell")]
        expected = digest_of_texts(QUESTIONS[question][0], "Holm")
        assert [one == expected for one in digests] == [True, True, False]


@pytest.mark.parametrize(
    "form", [str, lambda t: [t], lambda t: {"text": t}, lambda t: [{"page_content": t}]]
)
def test_passages_are_found_by_their_context_or_else_their_prompt(form):
    """Of a chat only the text counts."""
    passages = [f"{word} was built in Brask in 1931 by three brothers. " * 3 for word in WORDS]
    chats = [as_chat(f"{passages[n // 2]} {n}?") for n in range(6)]
    dated = [
        [{"role": ("system", "developer")[n % 2], "content": f"{n} May. {passages[-1] * 2}"}, *chat]
        for n, chat in enumerate(chats)
    ]
    apart = [[{"role": "system", "content": text}, *as_chat("Sum up.")] for text in passages]
    assert len({*clusters_of(numbered(*({"prompt": chat} for chat in apart)))}) == len(passages)
    for rows in (
        [{"prompt": chat} for chat in dated],
        [{"context": form(passages[n // 2])} for n in range(6)],
        [{"prompt": chat, "context": " "} for chat in chats],
    ):
        found = clusters_of(numbered(*rows))
        assert [found.index(key) for key in found] == [0, 0, 2, 2, 4, 4]
