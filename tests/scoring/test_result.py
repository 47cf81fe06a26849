"""What a score says, and what it does not."""

import io
import json
import math
from dataclasses import asdict, fields, replace

import numpy as np
import pytest
from rich.cells import cell_len
from rich.console import Console

from lm_polygraph_asmi import score
from lm_polygraph_asmi.analysis.calibration import Step
from lm_polygraph_asmi.analysis.clusters import Interval
from lm_polygraph_asmi.analysis.mechanism import OVER_ROBUST
from lm_polygraph_asmi.scoring import Calibration, Token
from lm_polygraph_asmi.scoring.provenance import prompt_format
from tests.report import runs
from tests.scoring.conftest import PROMPT


@pytest.fixture(scope="module")
def found(model, tokenizer):
    return score(
        model, PROMPT, " in Brask\n 1931", tokenizer=tokenizer, mask_rate=0.3, num_masks=30
    )


def reference_for(found, **changed) -> Calibration:
    """Ten answers of the same model, half of them wrong, around this one."""
    own = float(found)
    made = Calibration(
        name="tiny, squad",
        method="Sem-ASMI (60%, K=64)",
        model=found.model,
        scores=[own * i / 5 for i in range(10)],
        median=own * 0.9,
        msp_median=found.msp + 1,
        prr=Interval(0.5, 0.1, 0.8),
        calibration=[Step(0.0, 5, 1), Step(own * 0.9, 5, 4)],
        brier=(0.2, 0.25),
        quality="AlignScore",
        n=10,
        clusters=5,
        errors=5,
        settings=found.settings | prompt_format(found.prompt),
    )
    return replace(made, **changed)


def interpreted(found, **changed):
    return replace(found, calibration=reference_for(found, **changed))


def test_score_is_the_mean_over_counted_tokens(found):
    assert float(found) == pytest.approx(np.mean([t.mi * (1 - t.agreement) for t in found.tokens]))
    assert found.msp == pytest.approx(-sum(t.log_likelihood for t in found.tokens))
    assert found.masking_response == pytest.approx(np.mean([t.mi for t in found.tokens]))
    assert repr(found).startswith(f"Score(Sem-ASMI {float(found):.4f} nats, answer=' in Brask")


def test_unit_range_and_direction(found):
    unit = found.verdict[0]
    assert unit.startswith(f"Sem-ASMI: {float(found):.4f} nats (0 to {math.log(30):.2f}; ")
    assert "higher = more fragile" in unit
    assert f"over {len(found.tokens)} tokens" in unit
    assert found.highest == math.log(30)
    assert "heads masked only" not in unit
    response = replace(found, settings=found.settings | {"scope": "response"})
    assert "tokens; heads masked only while the model predicts the answer." in response.verdict[0]
    fewer = replace(found, counted=len(found.tokens) - 1)
    assert f"over {len(found.tokens) - 1} tokens" in fewer.verdict[0]


def test_the_boundary_of_the_paper_is_always_said(found):
    for one in (found, interpreted(found)):
        assert "only for answers from the given context" in one.verdict[-1]
        assert "For closed-book questions, try MSP" in one.verdict[-1]


def test_without_a_reference_no_verdict(found):
    assert found.percentile is found.error_probability is found.confident_but_fragile is None
    said = " ".join(found.verdict)
    assert "No verdict: it needs a calibration (" in said
    assert "no evidence that Sem-ASMI helps beyond simpler scores (MSP, entropy and length)" in said
    assert "%" not in said


def test_with_a_reference_that_ranks(found):
    one = interpreted(found)
    assert one.percentile == 50
    assert one.error_probability == pytest.approx((4 + 0.5) / (5 + 1))
    assert one.confident_but_fragile is True
    assert "higher than 50 % of the calibration answers;" in one.verdict[1]
    assert "0.50 [0.10, 0.80]" in one.verdict[1]
    assert one.verdict[2].startswith("Confident but fragile")
    assert "describes the whole answer" in one.verdict[2]
    assert not any("No verdict" in line for line in one.verdict)


@pytest.mark.parametrize(
    ("median", "msp_above", "marked"),
    [(0.9, 1, True), (0.9, 0, True), (0.9, -1, False), (1.0, 1, False), (1.1, 1, False)],
)
def test_confident_but_fragile_by_the_medians_of_the_run(found, median, msp_above, marked):
    one = interpreted(found, median=median * float(found), msp_median=found.msp + msp_above)
    assert one.confident_but_fragile is marked
    assert any(line.startswith("Confident but fragile") for line in one.verdict) == marked


def test_a_probability_that_no_float_holds(found):
    """Of long answers: "0 is above 0" would say nothing."""
    one = interpreted(replace(found, msp=812.4), msp_median=900.0)
    for shown in (one.verdict[2], one.to_html()):
        assert "e^-812" in shown
        assert "e^-900" in shown


@pytest.mark.parametrize("interval", [(0.3, -0.1, 0.6), (0.3, 0.0, 0.6), (0.3, np.nan, np.nan)])
def test_with_a_reference_that_does_not_rank(found, interval):
    one = interpreted(found, prr=Interval(*interval))
    assert one.percentile is one.error_probability is one.confident_but_fragile is None
    why = "the PRR has no interval" if np.isnan(interval[1]) else "on the calibration answers ("
    assert one.verdict[1].startswith(f"No verdict: {why}")
    assert not any(line.startswith("Confident") for line in one.verdict)


@pytest.mark.parametrize("name", ["num_masks", "scope", "closing_token", "stop", "method"])
def test_with_a_reference_of_another_score(found, name):
    other = {"num_masks": 7, "scope": "response", "closing_token": False, "method": "asmi",
             "stop": ["\n"]}  # fmt: skip
    settings = reference_for(found).settings | {name: other[name]}
    one = interpreted(found, settings=settings)
    assert one.percentile is one.error_probability is one.confident_but_fragile is None
    assert f"other settings ({name} {other[name]} there, " in one.verdict[1]
    assert "% of the calibration answers" not in one.to_html()


def test_with_a_reference_of_another_model(found):
    one = replace(interpreted(found, model="some/other"), model="models/this")
    assert one.percentile is None
    assert "other settings (model other there, this here)" in one.verdict[1]


def test_a_reference_goes_with_the_call(model, tokenizer, tmp_path):
    run = runs.save(tmp_path / "run")
    settings = {"num_masks": runs.MASKS, "mask_rate": 0.1, "calibration": run.parent}
    one = score(model, PROMPT, " Brask", tokenizer=tokenizer, **settings)
    assert one.calibration == Calibration.from_run(run)
    one.calibration.save(tmp_path / "saved.json")
    settings["calibration"] = str(tmp_path / "saved.json")
    again = score(model, PROMPT, " Brask", tokenizer=tokenizer, **settings)
    assert again.verdict == one.verdict
    # The planted run has its layer 3 masked, this model its layer 2.
    assert "other settings (layer 3 there, 2 here)" in one.verdict[1]
    raw = score(model, PROMPT, " Brask", tokenizer=tokenizer, method="asmi", calibration=run)
    assert raw.calibration.method == "ASMI (60%, K=64)"


def test_a_masking_response_near_zero(model, tokenizer, found):
    still = score(model, PROMPT, " Brask", tokenizer=tokenizer, mask_rate=1e-9, num_masks=2)
    assert still.masking_response == pytest.approx(0, abs=1e-9)
    assert any("Masking heads hardly changed the predictions" in line for line in still.verdict)
    assert all(token.vote in (0, 1) for token in still.tokens)
    # The screen is the report's, over all tokens and before any discount.
    for mean, warned in ((OVER_ROBUST * 0.99, True), (OVER_ROBUST * 1.01, False)):
        tokens = tuple(replace(token, mi=mean, u=0.0) for token in found.tokens)
        said = replace(found, tokens=tokens).verdict
        assert any("hardly changed" in line for line in said) == warned


def test_to_dict_is_json(model, tokenizer, found):
    adapt = score(
        model, PROMPT, " Brask", tokenizer=tokenizer, method="adapt", samples=[" a", " b"]
    )
    for one in (
        found,
        interpreted(found),
        interpreted(found, prr=Interval(0.3, np.nan, np.nan)),
        adapt,
    ):
        content = json.loads(json.dumps(one.to_dict(), allow_nan=False))
        assert content["score"] == float(one)
        assert content["tokens"] == [asdict(token) for token in one.tokens]
        assert content["verdict"] == one.verdict
        assert (content["unit"], content["highest"]) == ("nats", one.highest)
        assert content["percentile"] == one.percentile
        assert content["error_probability"] == one.error_probability
        assert content["confident_but_fragile"] == one.confident_but_fragile
        assert content["calibration"] == (one.calibration and "tiny, squad")


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
    assert "No verdict" in plain
    highest = max(found.tokens, key=lambda token: token.u)
    assert f"{highest.u:.4f}" in plain
    coloured = printed(found, force_terminal=True, color_system="truecolor")
    assert "\x1b[" in coloured


@pytest.mark.parametrize("width", [30, 41, 80])
def test_a_long_answer_in_a_terminal(found, width):
    """Each line of it has its own bars below, column by column."""
    texts = ["né ", "漢字", "a", " \n", "ferry "] * 12
    tokens = [replace(found.tokens[0], text=text, u=0.1 * i / 60) for i, text in enumerate(texts)]
    shown = printed(replace(found, tokens=tuple(tokens)), width=width).split("\n")
    text, bars = "", ""
    for line, bar in zip(shown[::2], shown[1::2], strict=False):
        if line.startswith("Sem-ASMI"):
            break
        assert cell_len(bar) <= cell_len(line) <= width
        text += line
        bars += bar.ljust(cell_len(line))
    assert text == "".join(texts).replace("\n", "⏎")
    assert bars == "".join(token.bar * cell_len(token.text.replace("\n", "⏎")) for token in tokens)


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


def test_a_reference_of_heads_says_nothing_of_an_condition(found):
    run = reference_for(found)
    own = run.settings | {"model": run.model}
    assert run.other_settings(own) == []
    assert run.other_settings(own | {"perturbation": "mlp", "perturbation_scale": 0.5}) == [
        "perturbation heads there, mlp here",
        "perturbation_scale None there, 0.5 here",
    ]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"perturbation": "mlp"}, "mlp is a control, not a score: in a config, use asmi_controls"),
        ({"perturbation": "mlp", "perturbation_scale": 0.8}, r"mlp, scale=0\.8 is a control"),
        ({"perturbation_scale": 2.0}, "scale=2 is a control"),
        (
            {"perturbation": "mlp", "perturbation_scale": "a.json"},
            r"must be a number, got 'a\.json'",
        ),
    ],
)
def test_controls_are_no_scores_and_refused_before_anything_is_loaded(settings, named):
    with pytest.raises(ValueError, match=named):
        score("no such folder", "a prompt", **settings)
