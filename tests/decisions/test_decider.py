"""Deciding computes what its signal needs, and no more; no threshold for answers unlike its own."""

import copy
import json
from functools import partial

import pandas as pd
import pytest
import torch

from lm_polygraph_asmi import decide
from lm_polygraph_asmi.decisions import Decider, Decision, calibrate_rows
from lm_polygraph_asmi.inputs import as_chat
from lm_polygraph_asmi.scoring import BatchScorer, UnmaskedAnswer, score_file
from lm_polygraph_asmi.scoring.provenance import digest_of
from lm_polygraph_asmi.scoring.scorer import Scorer
from lm_polygraph_asmi.tables import read_table
from tests.decisions.conftest import (
    ASKED,
    SETTINGS,
    labelled,
    limited,
    lines_of,
    refused,
    without_hashes,
    write,
)
from tests.scoring.conftest import MESSAGES, PROMPT
from tests.scoring.test_result import printed


def test_answers_unlike_the_calibrations(calibration, model, chat):
    """By their weights, tokenizer, form of the prompt and end; other copies are equal."""
    by_msp = limited(calibration, 1e9, "msp")
    changed, longer, turned = copy.deepcopy([model, model, chat])
    with torch.no_grad():
        changed.lm_head.weight[0, 0] += 1
    longer.generation_config.eos_token_id = [2, 7]
    turned.chat_template = "{{ messages[0]['content'] }}"
    used = by_msp.settings["attention_in_use"]
    other = {"eager": "sdpa", "sdpa": "eager"}[used]
    weights, tokenizer = "weights or their precision differ", "chat template or end tokens differ"
    for change, words in (
        ({"model": copy.deepcopy(model)}, None),
        ({"model": changed}, weights),
        ({"model": copy.deepcopy(model).bfloat16()}, weights),
        ({"model": longer}, tokenizer),
        ({"tokenizer": turned}, tokenizer),
        ({"attention": other}, f"attention_in_use {used!r} there, {other!r} here"),
        ({"prompt": MESSAGES}, "prompt_format 'text' there, 'chat' here"),
        ({"answer": None}, "answers complete there, cut off after 3 tokens here"),
        ({"answer": [7, 8]}, "answers complete there, without an end here"),
        ({"answer": [7, 8, 2]}, None),
    ):
        same = {"model": model, "tokenizer": chat, "prompt": PROMPT, "answer": " Brask"}
        one = decide(calibration=by_msp, **same | change)
        found = one.accept, one.reason.startswith("No decision"), (words or "") in one.reason
        assert found == (None if words else True, bool(words), True), (change, one.reason)
    own, other = Scorer(model, tokenizer=chat), Scorer(model, tokenizer=chat, stop="?")
    refused(
        (partial(Decider, own, by_msp, depth=0.3), "a Scorer has"),
        (partial(Decider, other, by_msp), "stop"),
    )


def test_the_same_weights_by_another_name(model, chat, scorer, scored, calibration, tmp_path):
    """In a folder that was moved or renamed: rows, resumed files and decisions go together."""
    renamed = copy.deepcopy(model)
    renamed.config.name_or_path = "prod-llm"
    other = Scorer(renamed, tokenizer=chat, **SETTINGS)
    mixed = [*scored[:-2], *lines_of(other, labelled()[-2:])]
    assert calibrate_rows(mixed, **ASKED).guarantee == calibration.guarantee
    first, decider = (Decider(one, limited(calibration, 1e9, "msp")) for one in (scorer, other))
    assert decider.decide(PROMPT, " Brask").accept is True
    source = write(tmp_path / "in.jsonl", labelled(2))
    for name, pair in (("scores", (scorer, other)), ("decisions", (first, decider))):
        assert [score_file(one, source, tmp_path / f"{name}.jsonl") for one in pair] == [0, 0]
    with torch.no_grad():
        renamed.lm_head.weight[0] += 1  # behind the decider's back
    assert "weights or their precision differ" in decider.decide(PROMPT, " Brask").reason
    rows = [*scored[:-2], *lines_of(other, labelled()[-2:])]
    refused(
        (partial(score_file, other, source, tmp_path / "scores.jsonl"), "'prod-llm' here"),
        (partial(score_file, decider, source, tmp_path / "decisions.jsonl"), "'prod-llm' here"),
        (partial(calibrate_rows, rows, **ASKED), "otherwise than row 1 .*weights"),
    )


def chatted(line, *system, developer=None, **template):
    """A scored line as if its prompt had been a chat, with these system messages, a message of the
    developer, and what its template got."""
    messages = [{"role": "system", "content": text} for text in system]
    messages += [{"role": "developer", "content": developer}] if developer else []
    line = line | {"prompt": [*messages, *as_chat(line["prompt"])]}
    line["settings"] = line["settings"] | {"template": template}
    return line | {"digest": digest_of(line)}


def test_a_threshold_for_chats(scored):
    """Of one system message; of several, any."""
    same = [chatted(line, "Be brief.") for line in scored[:6]]
    other = chatted(scored[0], "Be kind.")
    find = [chatted(line, "Be brief.", tools=["find"]) for line in scored[:6]]
    see = chatted(scored[0], "Be brief.", tools=["see"])
    developed = [chatted(line, developer="Be brief.") for line in scored[:6]]
    for lines, line, words in (
        (same, same[0], None), (same, other, "system message"), ([other, *same[1:]], same[1], None),
        (same, chatted(scored[0]), "system message"),
        (same, scored[0], "prompt_format 'chat' there, 'text' here"),
        (find, find[1], None), (find, see, "tools or"), ([find[0], *same[1:]], see, None),
        (same, find[1], "tools or"), (find, same[1], "tools or"),
        (same, chatted(scored[0], "Be brief.", documents=[{}]), "tools or"),
        (same, chatted(scored[0], "Be brief.", chat_template_kwargs={}), None),
        (developed, developed[1], None), (developed, same[1], "system message"),
        (developed, chatted(scored[0], developer="Be kind."), "system message"),
    ):  # fmt: skip
        known = limited(calibrate_rows(lines, **ASKED), 1e9, "msp")
        one = known.decide(UnmaskedAnswer.of_row(line))
        assert (one.accept, (words or "") in one.reason) == (None if words else True, True)


@pytest.mark.parametrize(
    ("signal", "suffix"), [("sem", "parquet"), ("adapt", "jsonl"), ("learned", "jsonl")]
)
def test_many_rows_and_files(scorer, calibration, signal, suffix, tmp_path):
    """A score comes with a masked signal only; samples that were passed are used."""
    limited(calibration, 1e9, signal).save(tmp_path / "c.json")
    own = {"tokenizer": scorer.tokenizer, "max_new_tokens": 3}
    decider = Decider(scorer.model, tmp_path / "c.json", **own)
    rows = [
        {"id": "a", "prompt": PROMPT, "answer": " Brask", "samples": [" Brask", " 1931"],
         "msp": 7},  # a field of its own
        {"id": "b", "prompt": PROMPT}, {"id": "c"},
    ]  # fmt: skip
    found = list(decider.score_many(rows))
    assert [(one.index, one.id, one.error is None) for one in found] == [
        (0, "a", True), (1, "b", True), (2, "c", False)
    ]  # fmt: skip
    with pytest.raises(ValueError, match="expected a text"):
        list(decider.score_many(rows, on_error="raise"))
    table = BatchScorer(lambda: decider)(pd.DataFrame(rows))
    assert table["accept"].tolist() == [True, pd.NA, pd.NA]
    source, out = write(tmp_path / "in.jsonl", rows), tmp_path / f"out.{suffix}"
    for _ in range(2):  # then nothing is left but the row that fails
        assert score_file(decider, source, out) == 1
        first, second, third = (row.content for row in read_table(out))
        assert (first["accept"], second["accept"], "error" in third) == (True, None, True)
        assert first["value"] == pytest.approx(found[0].result.value, rel=1e-5)
        scored, digest = first["score"] is not None, Decision.digest(first)
        assert (scored, first["digest"]) == (signal != "learned", digest)
    other = Decider(scorer.model, limited(calibration, 5.0, signal), **own)
    with pytest.raises(ValueError, match=r"\(threshold\)"):
        score_file(other, source, out)


def test_a_decision_is_json_and_reads_in_words(calibration, scorer):
    score = scorer.score(PROMPT, " Brask")
    one = limited(without_hashes(calibration), 1e9).decide(score)
    content = json.loads(json.dumps(one.to_dict(), allow_nan=False))
    expected = {"accept": True, "unit": "nats", "score": json.loads(json.dumps(score.to_dict()))}
    assert {name: content[name] for name in expected} == expected
    lines = [" Brask" + score.ending.replace("\n", "⏎"), *one.sentences]
    assert str(one).splitlines() == printed(one, width=500).splitlines() == lines
    heading = f"Accept: perplexity {one.value:.4g} nats"
    assert (one.card.heading, one.card.rank) == (heading, -one.value)
    assert {heading in page for page in (one.to_html("Decided"), one._repr_html_())} == {True}
    assert repr(one).startswith("Decision(accept, perplexity ")
