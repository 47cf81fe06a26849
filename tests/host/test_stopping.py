"""When a token ends an answer."""

from random import Random

import pytest

from lm_polygraph_asmi.host.stopping import StopConditions
from tests import tiny_lm

STOPS = ("\n", "e", ". ", "ss", "Who")


@pytest.mark.parametrize("stop", STOPS)
def test_a_stop_string_closes_if_it_ends_in_the_last_token(stop):
    """Not one that ends just before it; as plain loops over all places find."""
    model = tiny_lm.whitebox()
    conditions, draw = StopConditions(model.model, model.tokenizer, [stop]), Random(0)
    ids, found = model.tokenizer(tiny_lm.TEXT, add_special_tokens=False)["input_ids"], set()
    for _ in range(200):
        tokens = draw.choices(ids, k=draw.randint(1, 6))
        before, text = map(model.tokenizer.decode, (tokens[:-1], tokens))
        ends = [at + len(stop) for at in range(len(text)) if text.startswith(stop, at)]
        expected = any(end > len(before) for end in ends)
        assert conditions.closes(tokens) == expected
        found.add((expected, len(before) in ends))
    assert {(True, False), (False, False)} <= found
