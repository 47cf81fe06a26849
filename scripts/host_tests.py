"""LM-Polygraph's own tests of estimators, with those of this plugin among them.

    python scripts/host_tests.py test_estimators.py --model FOLDER

The file is of its repository, not of its wheel; its NLI model needs the hub.
"""

import sys
import tempfile
from pathlib import Path

import click
import pytest

OWN = """
import lm_polygraph.utils.estimate_uncertainty as host
from lm_polygraph_asmi import ASMI, AdaptASMI, SemASMI, available_stat_calculators

@pytest.mark.parametrize("estimator", [ASMI(), SemASMI(), AdaptASMI()], ids=str)
def test_of_the_plugin(model, estimator, monkeypatch):
    own = available_stat_calculators([estimator])
    monkeypatch.setattr(host, "register_default_stat_calculators", lambda _: own)
    ue = estimate_uncertainty(model, estimator, INPUT)
    assert isinstance(ue.uncertainty, float)
"""


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--model", required=True, help="Folder or hub name, instead of bloomz-560m.")
def main(file: Path, model: str) -> None:
    """Run LM-Polygraph's tests of estimators, and the same test of this plugin's."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "test_estimators.py")
        # Attention maps, which RAUQ reads, need eager attention since transformers 5.
        text = file.read_text().replace("trust_remote_code=True", 'attn_implementation="eager"')
        copy.write_text(text.replace("bigscience/bloomz-560m", model) + OWN)
        sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "--rootdir", folder, str(copy)]))


if __name__ == "__main__":
    main()
