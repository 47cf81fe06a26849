"""Write the statistics of fixed answers, to compare two commits bit by bit on one machine.

    python scripts/golden.py before.json        # at the first commit
    python scripts/golden.py after.json --compare before.json

A tiny model of every family, and SmolLM2 on ten of the demo's prompts; both scopes, one and several
depths, the three estimators, and the scores of `Scorer`. Values are kept as hexadecimal floats.
Differences are listed by name; statistics that only one file has are counted apart.
"""

import json
import sys
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from lm_polygraph_asmi import Scorer
from lm_polygraph_asmi.estimators import ASMI, AdaptASMI, SemASMI
from lm_polygraph_asmi.runs.squad import DEMO_DATA, prompt_of, read_squad
from lm_polygraph_asmi.stat_calculators.masked_heads import MaskedHeadsCalculator
from tests.families import CONFIGS
from tests.tiny_lm import whitebox

PROMPT = "The ferry Ondine was built in Brask in 1931. Who built it?"
RESPONSE = [40, 77, 131, 9, 200, 311]
DEPTHS = ([0.6], [0.3, 0.6, 0.9])
SCOPES = ("all", "response")
SECONDS = ("seconds", "settings", "reused")
"""Parts of names whose values are no statistics of the answer."""


def as_text(value: Any) -> Any:
    """Numbers as hexadecimal floats or integers, arrays as nested lists."""
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): as_text(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_text(item) for item in value]
    return value.hex() if isinstance(value, float) else value


def kept(stats: dict[str, Any]) -> dict[str, Any]:
    return {n: as_text(v) for n, v in sorted(stats.items()) if not any(s in n for s in SECONDS)}


def tiny_statistics(family: str) -> dict[str, Any]:
    model, result = whitebox(family), {}
    for scope in SCOPES:
        for depths in DEPTHS:
            calculator = MaskedHeadsCalculator(depths=depths, scope=scope, details=True)
            stats = calculator({"greedy_tokens": [RESPONSE]}, [PROMPT], model)
            result[f"{scope} {depths}"] = kept(stats)
            estimators = [
                kind(depth=depth, scope=scope)
                for kind in (ASMI, SemASMI, AdaptASMI)
                for depth in depths
            ]
            diversity = {"asmi_diversity": [0.25], "asmi_diversity_second_last": [0.25]}
            result[f"scores {scope} {depths}"] = {
                str(e): as_text(e(stats | diversity)) for e in estimators
            }
    return result


def score_of(scorer: Scorer, prompt: str) -> dict[str, Any]:
    result = scorer.score(prompt)
    tokens = [[t.u, t.mi, t.agreement, t.entropy, t.log_likelihood] for t in result.tokens]
    return {"score": as_text(result.score), "msp": as_text(result.msp), "tokens": as_text(tokens)}


def smollm2_statistics() -> dict[str, Any]:
    prompts = [prompt_of("demo", False)(q) for q in read_squad(DEMO_DATA)[:10]]
    return {
        f"{scope} {number}": score_of(scorer, prompt)
        for scope in SCOPES
        for scorer in [Scorer("smollm2", scope=scope, stop="\n", max_new_tokens=12)]
        for number, prompt in enumerate(prompts)
    }


def flat(content: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(content, dict):
        return {path: content}
    return {k: v for name, item in content.items() for k, v in flat(item, f"{path}/{name}").items()}


@click.command(help=__doc__)
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--compare", type=click.Path(exists=True, path_type=Path), help="Earlier file.")
def main(out: Path, compare: Path | None) -> None:
    torch.set_num_threads(1)
    content = {family: tiny_statistics(family) for family in CONFIGS}
    content["smollm2"] = smollm2_statistics()
    out.write_text(json.dumps(content))
    values = flat(content)
    click.echo(f"{out}: {len(values)} statistics")
    if compare is not None:
        before = flat(json.loads(compare.read_text()))
        differ = [name for name in values if name in before and values[name] != before[name]]
        for title, names in (
            ("only before", before.keys() - values.keys()),
            ("only after", values.keys() - before.keys()),
            ("differ", differ),
        ):
            click.echo(f"{title}: {len(names)}")
            for name in sorted(names)[:20]:
                click.echo(f"  {name}")
        raise SystemExit(bool(differ))


if __name__ == "__main__":
    main()
