"""What README and the page of results state is what the kept rows give."""

import re

import claims
import pytest
from click.testing import CliRunner

from tests.composing import run_of

WRONG = {"AUROC is .07 below": "AUROC is .08 below", "| 5.6 | 7,983": "| 5.7 | 7,983"}
DIFFER = r"README.md P3a, size \.08 \.07 .*costs.md asmi_coqa 5\.7 5\.6 [3-9]\d claims, 2 differ"


@pytest.mark.parametrize(
    ("changes", "options", "told"),
    [
        (WRONG, ["--quick"], DIFFER),
        pytest.param(WRONG, [], DIFFER, marks=pytest.mark.slow),
        ({"AUROC is .07 below": "AUROC is some below"}, [], "does not state"),
        ({"was **not run** here": "was **not run**, +.123"}, [], r"than is recomputed: \+.123"),
    ],
    ids=range(4),
)
def test_only_what_was_changed_on_the_pages_differs(monkeypatch, tmp_path, changes, options, told):
    for name in claims.CLAIMS:
        text = (claims.ROOT / name).read_text()
        for right, wrong in changes.items():
            text = text.replace(right, wrong)
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(claims, "ROOT", tmp_path)
    monkeypatch.setattr(claims, "compose_run", lambda name, overrides: run_of(name, *overrides))
    done = CliRunner().invoke(claims.main, ["--check", *options])
    assert done.exit_code == 1
    assert re.search(told, " ".join(done.output.split())), done.output
