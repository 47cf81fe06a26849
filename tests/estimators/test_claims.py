"""Claims of an answer, each with a score; experimental."""

import numpy as np
import pytest
from lm_polygraph.estimators import MaximumClaimProbability
from lm_polygraph.stat_calculators.extract_claims import Claim, ClaimsExtractor

from lm_polygraph_asmi import ASMI, AdaptASMI, SemASMI, available_stat_calculators
from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.results.names import saved_stats
from lm_polygraph_asmi.stat_calculators.sentence_claims import (
    SentenceClaimsCalculator,
    load_stat_calculator,
)
from tests.test_manager import TEXTS, manager
from tests.tiny_lm import tokenizer, whitebox

ANSWER = " It was built in Brask. Who knows $3.50?\n- né 🪁 kites"


def test_in_lm_polygraphs_manager():
    """Beside its own estimator of claims, over the same ones; by a loop over tokens."""
    estimators = [kind(level="claim") for kind in (ASMI, SemASMI, AdaptASMI)]
    everything = [*estimators, SemASMI(), MaximumClaimProbability()]
    available = available_stat_calculators(everything, sentence_claims=True)
    run = manager(whitebox(), everything, available, save_stats=[*saved_stats(), "claims"])
    run()
    stats = {name.removesuffix("_d60"): values for name, values in run.stats.items()}
    expected = {str(estimator): [] for estimator in estimators}
    for row, claims in enumerate(stats["claims"]):
        alpha = 1 / (1 + np.exp(-10 * (0.3 - stats["asmi_diversity_second_last"][row])))
        for claim in claims:
            for name, gate in zip(expected, (0, 1, alpha), strict=True):
                scores = [
                    stats["asmi_mi"][row][t] * (1 - gate * stats["asmi_agreement"][row][t])
                    for t in claim.aligned_token_ids
                ]
                expected[name].append(sum(scores) / len(scores))
    own = run.estimations["claim", str(MaximumClaimProbability())]
    for name, scores in expected.items():
        np.testing.assert_allclose(run.estimations["claim", name], scores, rtol=1e-6)
        assert len(scores) == len(own) >= len(TEXTS)
    assert len(run.estimations["sequence", "Sem-ASMI (60%, K=64)"]) == len(TEXTS)
    assert "Sem-ASMI (60%, K=64, claims, experimental)" in expected


def test_sentences_are_claims():
    ids = tokenizer()(ANSWER, add_special_tokens=False)["input_ids"]
    calculator = load_stat_calculator({}, None)
    stats = {"greedy_texts": [ANSWER, ""], "greedy_tokens": [[*ids, 2], [2]]}
    found = calculator(stats, ["one", "two"], whitebox())
    first, second = found["claims"]
    said = ["It was built in Brask.", "Who knows $3.50?", "- né 🪁 kites"]
    assert [claim.claim_text for claim in first] == said
    assert second == []
    assert found["claim_texts_concatenated"] == first
    assert found["claim_input_texts_concatenated"] == ["one"] * 3
    assert set(found) == set(ClaimsExtractor.meta_info()[0]) == set(calculator.meta_info()[0])
    # Each has the tokens of its own characters, and together they have all but the white space.
    covered = [token for claim in first for token in claim.aligned_token_ids]
    assert len(set(covered)) == len(covered)
    for claim, text in zip(first, said, strict=True):
        written = tokenizer().decode([ids[t] for t in claim.aligned_token_ids])
        assert written.strip() == text
    assert isinstance(calculator, SentenceClaimsCalculator)


@pytest.mark.parametrize("places", [[], [3], [-1], [0, 9]])
def test_claims_of_another_answer(places):
    stats = {
        "asmi_mi_d60": [np.ones(3)],
        "asmi_settings_d60": [
            ASMIConfig(num_masks=47, mask_rate=0.09).to_dict("masks") | {"num_heads": 4}
        ],
        "claims": [[Claim("text", "sentence", places)]],
    }
    with pytest.raises(ValueError, match="claims and scores belong to different answers"):
        ASMI(level="claim")(stats)


def test_levels():
    with pytest.raises(ValueError, match="level must be one of 'sequence', 'claim', got 'token'"):
        ASMI(level="token")
    assert "claims" in SemASMI(level="claim").stats_dependencies
    assert "claims" not in SemASMI().stats_dependencies
