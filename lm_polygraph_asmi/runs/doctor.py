"""Whether a run will work, and its cost: the checks before a run, then two of its rows."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from hydra.types import RunMode
from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lm_polygraph_asmi.runs.compose import compose_run
from lm_polygraph_asmi.runs.preflight import CHECKS, Finding, findings_of, rows_of
from lm_polygraph_asmi.runs.protocol import protocol
from lm_polygraph_asmi.runs.trial import Trial, costs, estimate, try_rows

STYLES = {"ok": "green", "warning": "yellow", "problem": "bold red"}


def _check_scores(trial: Trial) -> list[Finding]:
    finite = np.isfinite(trial.scores).all()
    if finite.all():
        return []
    text = (
        f"expected finite scores, got others from {', '.join(finite.index[~finite])}; "
        "LM-Polygraph ranks NaN as most confident. Leave them out, or try another "
        "model.load_model_args.dtype"
    )
    return [Finding(text, fatal=False)]


@dataclass(frozen=True)
class Diagnosis:
    """Findings about a run.

    Attributes:
        config: name of its config.
        checks: (check, state, what to do) of each finding, states of `STYLES`.
        cost: estimated cost of the whole run, from two rows; empty if none were scored.
        protocol: part -> what the run will do; empty if its settings have a problem.
    """

    config: str
    checks: list[tuple[str, str, str]]
    cost: dict[str, Any]
    protocol: dict[str, str] = field(default_factory=dict)

    @property
    def works(self) -> bool:
        """Whether no check found a problem."""
        return all(state != "problem" for _, state, _ in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        named = [dict(zip(("check", "state", "text"), check, strict=True)) for check in self.checks]
        return asdict(self) | {"checks": named, "works": self.works}


def diagnose(
    console: Console,
    config_name: str,
    config_dir: str | None = None,
    overrides: Sequence[str] = (),
    run: bool = True,
) -> Diagnosis:
    """Check a run, with `run` also by scoring two rows; print the findings and return them.

    All else is as for polygraph_eval. ValueError for an unknown config or override.
    """
    config = compose_run(config_name, config_dir, overrides)
    job = ", one job of its sweep" if config.hydra.mode == RunMode.MULTIRUN else ""
    report = Table("check", "state", "what to do", title=f"{config_name}{job}")
    diagnosis = Diagnosis(config_name, [], {})

    def add(name: str, findings: list[Finding]) -> None:
        states = [("problem" if fatal else "warning", text) for text, fatal in findings]
        for state, text in states or [("ok", "")]:
            diagnosis.checks.append((name, state, text))
            report.add_row(name, Text(state, STYLES[state]), Text(text))

    cost = None
    with console.status("") as status:
        for name, check in CHECKS.items():
            status.update(f"checking: {name}")
            add(name, findings_of(check, config))
            if name == "settings" and diagnosis.works:
                diagnosis.protocol.update(protocol(config))
        if run and diagnosis.works:
            status.update("scoring two rows with every method")
            folder = ["--config-dir", config_dir] if config_dir else []
            try:
                trial = try_rows(config, ["--config-name", config_name, *folder, *overrides])
                add("two rows", _check_scores(trial))
                minutes = OmegaConf.select(config, "hydra.launcher.timeout_min")
                limit = None if minutes is None else 60 * minutes
                shards = OmegaConf.select(config, "data.num_shards", default=1)
                seeds = len(config.get("seed") or [1])
                diagnosis.cost.update(costs(trial, len(rows_of(config)), seeds, limit, shards))
                cost = estimate(diagnosis.cost)
            except (RuntimeError, ValueError) as error:
                add("two rows", [Finding(str(error))])
    described = Table(title="What will run", show_header=False)
    for name, text in diagnosis.protocol.items():
        described.add_row(name, Text(text))
    if diagnosis.protocol:
        console.print(described)
    console.print(report)
    if cost:
        console.print(cost)
    return diagnosis
