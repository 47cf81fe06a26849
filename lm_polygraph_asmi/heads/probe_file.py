"""The file of the causal probe, which holds predictions with some heads ablated.

It is written beside `ue_manager_seed1` as `asmi_probe_seed1.json`. From its predictions,
`lm_polygraph_asmi.heads.analysis.probe` computes flip rates.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lm_polygraph_asmi.files import read_json, to_json, write_whole

FORMAT = 1


@dataclass(frozen=True)
class Probe:
    """Probed tokens of one run: n tokens, K numbers of ablated heads.

    Attributes:
        settings: ASMI's settings in the run whose masks chose tokens and heads.
        k: numbers of ablated heads.
        tokens: columns (n,): "row" (in the run), "position", "token" (of the answer), "mi",
            "argmax" (of the unmasked model), "replayed" (of the pass without an ablation).
        groups: "high" and "low" MI -> indices into the columns.
        predicted: most likely token without these heads: "critical" -> (n, K), "random" ->
            (n, K, draws).
    """

    settings: dict[str, Any]
    k: tuple[int, ...]
    tokens: dict[str, np.ndarray]
    groups: dict[str, np.ndarray]
    predicted: dict[str, np.ndarray]

    def flipped(self, rule: str, group: str) -> np.ndarray:
        """(m, K) whether each token of a group flips; for random heads, the share of draws.

        A token flips if another token is predicted than without an ablation.
        """
        chosen, predicted = self.groups[group], self.predicted[rule]
        draws = predicted[chosen].reshape(len(chosen), len(self.k), -1)
        return (draws != self.tokens["replayed"][chosen, None, None]).mean(-1)


def probe_path(manager: str | Path) -> Path:
    """Path of a manager file's probe: `ue_manager_seed1` -> `asmi_probe_seed1.json`."""
    manager = Path(manager)
    return manager.with_name(f"{manager.name.replace('ue_manager', 'asmi_probe')}.json")


def read_probe(manager: str | Path) -> Probe | None:
    """The probe of a manager file; None if there is none, ValueError if it is damaged."""
    path = probe_path(manager)
    try:
        content = read_json(path)
        if content["format"] != FORMAT:
            raise ValueError(f"expected format {FORMAT}, got {content['format']}")
        return Probe(
            dict(content["settings"]),
            tuple(content["k"]),
            {name: np.asarray(values) for name, values in content["tokens"].items()},
            {name: np.asarray(places, dtype=int) for name, places in content["groups"].items()},
            {rule: np.asarray(ids, dtype=int) for rule, ids in content["predicted"].items()},
        )
    except FileNotFoundError:
        return None
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is damaged, or is not a file of `polygraph_asmi heads probe`: {error!r}. "
            "Remove it and run the command again"
        ) from error


def write_probe(content: Mapping[str, Any], path: str | Path) -> None:
    """Write a probe atomically. `read_probe` finds it only if `path` is its `probe_path`."""
    write_whole(path, to_json({"format": FORMAT, **content}))
