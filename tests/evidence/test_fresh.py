"""The tests of docs/evidence/fresh-plan.md, on planted rows."""

import fresh_tables
import numpy as np
import pandas as pd
import pytest

MASKS, HEADS, N = 32, 4, 150


def plant(folder, name: str, known_by: str) -> None:
    """Rows whose errors show in the effect of head 0, in a hidden state, or nowhere."""
    rng = np.random.default_rng(len(name))
    rows, states = [], []
    for i in range(N):
        wrong = bool(rng.random() < 0.4)
        kept = rng.random((MASKS, HEADS)) > 0.2
        effect = rng.normal(size=HEADS) * 0.1
        effect[0] += 2.0 * wrong * (known_by == "heads")
        change = (1.0 - kept) @ effect
        ll, tokens = -rng.random(3), 3
        rows.append(
            {
                "id": str(i), "cluster": f"c{i // 2}", "ReferenceInAnswer": float(not wrong),
                "Rouge_rougeL": float(not wrong), "prompt_tokens": 9, "place": i % 7,
                "asmi_entropy": rng.random(tokens), "asmi_log_likelihood": ll,
                "asmi_kept_d60": np.packbits(kept.ravel()),
                "asmi_masked_log_likelihood_d60": ll.sum() + change,
                "asmi_mi_d60": rng.random(tokens), "asmi_agreement_d60": rng.random(tokens),
                "all asmi_mi_d60": rng.random(tokens), "all asmi_agreement_d60": rng.random(tokens),
            }
        )  # fmt: skip
        state = rng.normal(size=40)
        state[0] += 4.0 * wrong * (known_by == "states")
        states.append({"id": str(i), "hidden_mean": state, "hidden_last": rng.normal(size=40)})
    file = folder / f"{name}.parquet"
    file.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_parquet(file)
    pd.DataFrame(states).to_parquet(file.with_suffix(".states.parquet"))


@pytest.mark.parametrize(
    ("known_by", "expected"),
    [
        ("heads", {"P1": "holds", "P2": "holds"}),
        ("states", {"P1": "holds", "P2": "not"}),
        ("nothing", {"P2": "not", "P3a": "not"}),
    ],
)
def test_what_is_planted_is_reported(known_by, expected, tmp_path, monkeypatch):
    for name, value in (("FRESH", tmp_path), ("RESAMPLES", 500), ("REPEATS", 1), ("SHUFFLES", 1)):
        monkeypatch.setattr(fresh_tables, name, value)
    monkeypatch.setattr(fresh_tables, "LABELS", {"contains": "ReferenceInAnswer"})
    for name in ("gemma/babi", "qwen05/squad"):
        plant(tmp_path, name, known_by)
    made = fresh_tables.make_tables()
    means = {row[0]: dict(zip(made["fresh means"].columns, row, strict=True))
             for row in made["fresh means"].rows}  # fmt: skip
    for name, verdict in expected.items():
        assert (means[name]["by the plan"] == "holds") == (verdict == "holds"), means[name]
    # Masks that belong to other changes say nothing of heads.
    if known_by == "heads":
        assert means["random contrasts beyond free + hidden"]["by the plan"] != "holds"
        (line,) = (row for row in made["fresh permuted"].rows if row[0] == "Gemma, BabiQA")
        assert float(line[2]) > 0.1 > float(line[4].replace("−", "-"))
