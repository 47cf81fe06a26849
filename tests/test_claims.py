"""What README and the page of results state is what the kept rows give."""

import claims
import pytest
from click.testing import CliRunner


@pytest.mark.parametrize("options", [["--quick"], pytest.param([], marks=pytest.mark.slow)])
def test_pages_state_what_the_rows_give(options):
    done = CliRunner().invoke(claims.main, ["--check", *options])
    assert done.exit_code == 0, done.output
    assert int(done.output.split()[-4]) >= (19 if options else 40)


@pytest.mark.parametrize(
    ("right", "wrong", "told"),
    [
        ("AUROC is .07 below", "AUROC is .08 below", "README.md P3a, size .08 .07"),
        ("AUROC is .07 below", "AUROC is some below", "does not state"),
        ("`asmi_coqa` | 5.6 | 7,983", "`asmi_coqa` | 5.7 | 7,983", "costs.md asmi_coqa 5.7 5.6"),
        ("was **not run** here", "was **not run**, +.123", "than is recomputed: +.123"),
    ],
)
def test_a_wrong_number_is_found(monkeypatch, tmp_path, right, wrong, told):
    pages = {name: (claims.ROOT / name).read_text() for name in claims.CLAIMS}
    assert any(right in text for text in pages.values())
    for name, text in pages.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text.replace(right, wrong))
    monkeypatch.setattr(claims, "ROOT", tmp_path)
    monkeypatch.setattr(claims, "RESAMPLES", 100)
    done = CliRunner().invoke(claims.main, ["--check", "--quick"])
    assert done.exit_code == 1
    assert told in " ".join(done.output.split())
