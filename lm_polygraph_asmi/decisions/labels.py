"""Read labels and clusters of rows: which answers are wrong, and which rows are dependent."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lm_polygraph_asmi.analysis.clusters import PASSAGE, joined, text_clusters
from lm_polygraph_asmi.analysis.right import below_right
from lm_polygraph_asmi.files import to_json
from lm_polygraph_asmi.inputs import LABELS, text_of
from lm_polygraph_asmi.scoring.provenance import short_hash
from lm_polygraph_asmi.scoring.sheet import Sheet, key_of, read_sheet
from lm_polygraph_asmi.tables import Row, each, identity_of, placing
from lm_polygraph_asmi.validation import check_number, same_text

RIGHT = {"true", "1", "wahr", "vrai", "verdadero", "verdadeiro", "vero", "waar", "prawda", "истина"}
WRONG = {"false", "0", "falsch", "faux", "falso", "onwaar", "fałsz", "ложь"}
"""Texts that are a label: words for true and false that spreadsheets write in some languages."""
NUMBER = re.compile(r"\d+(?:\.\d+)?|0,\d+|1,0+")
"""Matches a quality written as text, also with a decimal comma, as some spreadsheets write it."""


def is_wrong(content: Mapping[str, Any], right_from: float | None = None) -> bool | None:
    """Whether a row's answer is wrong by its label; None if the row has no label.

    The label is `correct`, or a `quality`. An answer with a quality below `right_from` is wrong. If
    `right_from` is None, a quality is in [0, 1], and wrong below 0.5. Raises ValueError: the row
    has two labels, or the label is not valid.
    """
    labels = [name for name in LABELS if content.get(name) is not None]
    if not labels:
        return None
    if len(labels) > 1:
        raise ValueError(f"expected one label, got {' and '.join(labels)}: remove one of them")
    value = content[labels[0]]
    if labels == ["quality"]:
        if isinstance(value, str) and NUMBER.fullmatch(value.strip()):
            value = float(value.strip().replace(",", "."))
        check_number("quality", value)
        return below_right(value, right_from)
    word = value.strip().lower() if isinstance(value, str) else value
    if word in (True, False):  # 1 and 0 pass
        return not word
    if str(word) not in RIGHT | WRONG:
        raise ValueError(f'"correct": expected true or false, got {value!r:.40}')
    return word in WRONG


def labels_in(sheets: Sequence[str | Path], rows: Sequence[Row]) -> Sheet:
    """Join sheets of scored rows. ValueError: an unknown key, an invalid label, or two labels."""
    labels, order = dict[str, dict[str, Any]](), None
    for path in sheets:
        sheet = read_sheet(path, [row.content for row in rows])
        order = order or sheet.order
        for key, label in sheet.labels.items():
            if label and labels.get(key):
                raise ValueError(
                    f"{path}: an answer also has a label in another sheet: keep one label"
                )
            if "correct" in label and "quality" not in label:
                with placing(f"{path}, key {key}"):
                    is_wrong(label)
            labels[key] = labels.get(key) or label
    return Sheet(labels, order)


def with_labels(rows: Sequence[Row], labels: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """The scored rows, with their own labels replaced by the labels of sheets, by key."""
    keys = [key_of(row.content) if row.content.get("digest") else "" for row in rows]
    return [
        row._replace(content={**row.content, **dict.fromkeys(LABELS), **labels.get(key, {})})
        for row, key in zip(rows, keys, strict=True)
    ]


def labels_of(rows: Sequence[Row], right_from: float | None = None) -> list[bool | None]:
    """Whether each row's answer is wrong; None if it has no label.

    Raises ValueError with the row: it cannot be read, its label is invalid, or a row before it with
    the same id has a label.
    """
    known = dict[str, int]()

    def read(row: Row) -> bool | None:
        wrong = is_wrong(row.content, right_from)
        if wrong is not None:
            check_once(known, row)
        return wrong

    return each(rows, read)


def check_once(known: dict[str, int], row: Row, digest: str | None = None) -> None:
    """Remember a row in `known`. Raises ValueError if a row before it has its id or its digest."""
    if digest is not None and (first := known.setdefault(digest, row.number)) != row.number:
        raise ValueError(f'"answer": row {first} has the same prompt and answer: keep one')
    if (row_id := row.content.get("id")) is not None:
        first = known.setdefault(f"id {identity_of('id', row_id)}", row.number)
        if first != row.number:
            raise ValueError(f'"id": row {first} has the same id {row_id!r}: label it once')


def clusters_of(rows: Sequence[Row]) -> list[str]:
    """Cluster key of each row: its field `cluster`, or found from its context or prompt.

    For the latter see `text_clusters`. A chat is also compared without its instructions, since a
    date there would hide that two chats share a passage. Rows with the same prompt always share a
    cluster: a question that is labelled twice is one piece of evidence. Raises ValueError: only
    some rows have a `cluster`.
    """
    prompts = each(rows, lambda row: question_of(row.content))
    asked = [same_text(text_of(prompt)) for prompt in prompts]
    missing = [row.number for row in rows if row.content.get("cluster") is None]
    if len(missing) == len(rows):
        contexts = [text_of(row.content.get("context")) for row in rows]
        whole, rest = (
            [a if same_text(a) else of(b) for a, b in zip(contexts, prompts, strict=True)]
            for of in (text_of, _uninstructed)
        )
        return joined(
            text_clusters(whole)
            if rest == whole
            else joined(text_clusters(whole), text_clusters(rest)),
            asked,
        )
    if missing:
        raise ValueError(
            f'expected a "cluster" in all rows or in none, got none in row {missing[0]}'
        )
    return joined(each(rows, lambda row: identity_of("cluster", row.content["cluster"])), asked)


def _uninstructed(prompt: Any) -> str:
    """The text of a prompt; of a chat, without the messages of system and developer.

    If what is left is too short to hold a passage, the whole text.
    """
    text = text_of(
        [m for m in prompt if m.get("role") not in ("system", "developer")]
        if isinstance(prompt, list | tuple)
        else prompt
    )
    return text if len(text) >= PASSAGE else text_of(prompt)


def question_of(content: Mapping[str, Any]) -> Any:
    """The prompt of a row; without one, its `id`. ValueError if it has neither."""
    if prompt := content.get("prompt") or content.get("messages"):
        return prompt
    if content.get("id") is None:
        raise ValueError('expected a "prompt", or an "id" in a table of another score, got neither')
    return f"id {identity_of('id', content.get('id'))}"


def digest_of_texts(*texts: Any) -> str:
    """Hash of a question, or of a question and its answer. Texts are normalised by `same_text`."""
    compared = [list(t) if isinstance(t, tuple) else same_text(text_of(t)) for t in texts]
    return short_hash(to_json(compared, str))
