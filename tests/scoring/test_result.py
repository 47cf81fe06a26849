"""What a score says, and what it does not."""

import io
import json
import math
from dataclasses import asdict, fields, replace

import numpy as np
import pytest
from rich.console import Console

from lm_polygraph_asmi import score
from lm_polygraph_asmi.decisions import Decision
from lm_polygraph_asmi.scoring import Token
from tests.scoring.conftest import PROMPT


@pytest.fixture(scope="module")
def found(model, tokenizer):
    return score(
        model, PROMPT, " in Brask\n 1931", tokenizer=tokenizer, mask_rate=0.3, num_masks=30
    )


def decided(found) -> Decision:
    """A decision that accepts this answer."""
    return Decision(
        accept=True, reason="Accept: MSP 1 nats is at most 2.", signal="msp", value=1.0,
        signals=found.signals, threshold=2.0,
        warnings=("A warning.",), prompt=found.prompt,
        answer=found.answer, text=found.scored_text, ids=found.ids,
        prompt_tokens=found.prompt_tokens, settings=found.settings, model=found.model,
        calibration="tiny", score=found,
    )  # fmt: skip


def test_score_is_the_mean_over_counted_tokens(found):
    assert float(found) == pytest.approx(np.mean([t.mi * (1 - t.agreement) for t in found.tokens]))
    assert found.msp == pytest.approx(-sum(t.log_likelihood for t in found.tokens))
    assert repr(found).startswith(f"Score(Sem-ASMI {float(found):.4f} nats, answer=' in Brask")


def test_printed_as_explained(found):
    warned = replace(found, warnings=("Look out.",))
    assert str(warned).splitlines() == warned.explanation
    assert "Look out." in warned.explanation


def test_unit_range_and_direction(found):
    unit = found.explanation[0]
    assert unit.startswith(f"Sem-ASMI: {float(found):.4f} nats (0 to {math.log(30):.2f}; ")
    assert "higher = more fragile" in unit
    assert f"over {len(found.tokens)} tokens" in unit
    assert found.highest == math.log(30)
    fewer = replace(found, counted=len(found.tokens) - 1)
    assert f"over {len(found.tokens) - 1} tokens" in fewer.explanation[0]


def test_a_number_alone_tells_no_probability(found):
    said = " ".join(found.explanation)
    assert "Scores have no common scale. A calibration, from labelled answers" in said
    assert "Sem-ASMI ranked errors worse than MSP and perplexity, and added little" in said
    assert "%" not in said


def test_to_dict_is_json(model, tokenizer, found):
    adapt = score(
        model, PROMPT, " Brask", tokenizer=tokenizer, method="adapt", samples=[" a", " b"]
    )
    for one in (found, adapt):
        content = json.loads(json.dumps(one.to_dict(), allow_nan=False))
        assert content["score"] == float(one)
        assert content["tokens"] == [asdict(token) for token in one.tokens]
        assert content["explanation"] == one.explanation
        assert (content["unit"], content["highest"]) == ("nats", one.highest)


def test_to_df(found):
    table = found.to_df()
    assert list(table.columns) == [field.name for field in fields(Token)]
    assert len(table) == len(found.tokens)
    assert "".join(table["text"]) == found.scored_text
    assert table["u"].mean() == pytest.approx(float(found))


def printed(one, width=100, **settings):
    console = Console(file=io.StringIO(), width=width, **settings)
    console.print(one)
    return console.file.getvalue()


def test_in_a_terminal(found):
    plain = printed(found)
    assert "in Brask⏎ 1931" in plain
    assert "\x1b" not in plain
    assert any(bar in plain for bar in "▁▂▃▄▅▆▇█")
    assert "Scores have no common scale" in " ".join(plain.split())
    highest = max(found.tokens, key=lambda token: token.u)
    assert f"{highest.u:.4f}" in plain


def test_text_is_not_taken_for_markup(found):
    tokens = (replace(found.tokens[0], text="[red]x[/red]", alternative="[/bold]"),)
    one = replace(found, tokens=tokens, warnings=("[/odd] warning",))
    for part in ("[red]x[/red]", "[/bold]", "[/odd] warning"):
        assert part in printed(one)


def test_bars_follow_the_shade(found):
    levels = [replace(found.tokens[0], u=u) for u in (-1e-9, 0.0, 0.001, 0.01, 0.05, 0.1, 2.0)]
    shades = [token.shade for token in levels]
    assert shades[:2] == [0, 0]
    assert shades[-2:] == [1, 1]
    assert shades == sorted(shades)
    assert levels[3].shade == pytest.approx(math.sqrt(0.1))
    bars = [token.bar for token in levels]
    assert bars == sorted(bars)
    assert (bars[0], bars[-1]) == (" ", "█")
    assert len(set(bars)) >= 5
