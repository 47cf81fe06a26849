"""When a token ends an answer."""

from random import Random

import pytest

from lm_polygraph_asmi.host.stopping import StopConditions
from tests import tiny_lm

STOPS = (["\n"], ["e"], [". "], ["ss"], ["ho", "Who"])


@pytest.mark.parametrize("stops", STOPS)
def test_a_stop_string_closes_if_it_ends_in_the_last_token(stops):
    """Not one that ends just before it; as plain loops over all places find. The first is cut."""
    model = tiny_lm.whitebox()
    conditions, draw = StopConditions(model.model, model.tokenizer, stops), Random(0)
    ids, found = model.tokenizer(tiny_lm.TEXT, add_special_tokens=False)["input_ids"], set()
    for _ in range(200):
        tokens = draw.choices(ids, k=draw.randint(1, 6))
        before, text = map(model.tokenizer.decode, (tokens[:-1], tokens))
        ends = [
            (at + len(s), at) for s in stops for at in range(len(text)) if text.startswith(s, at)
        ]
        starts = [start for end, start in ends if end > len(before)]
        assert (
            conditions.closes(tokens),
            conditions.without(text, [(len(before), len(text))], tokens),
        ) == (bool(starts), text[: min(starts, default=None)])
        found.add((bool(starts), len(before) in dict(ends)))
    assert {(True, False), (False, False)} <= found
