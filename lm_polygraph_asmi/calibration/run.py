"""The second door: a finished benchmark run, which needs its model only to check its scores."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lm_polygraph_asmi.analysis.clusters import RESAMPLES
from lm_polygraph_asmi.analysis.labelled import Labelled
from lm_polygraph_asmi.calibration.calibration import NOT_RECORDED, Calibration, unequal
from lm_polygraph_asmi.calibration.fit import check_signal, fit
from lm_polygraph_asmi.calibration.labels import check_right_from, joined
from lm_polygraph_asmi.calibration.rows import digests_of, reproduces, spread
from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.results.run_groups import load_run_groups, of_config
from lm_polygraph_asmi.scoring.provenance import answer_end, prompt_format
from lm_polygraph_asmi.scoring.rows import in_chat
from lm_polygraph_asmi.scoring.signals import unmasked_signals

if TYPE_CHECKING:
    from lm_polygraph_asmi.results.run_groups import RunGroup
    from lm_polygraph_asmi.scoring.scorer import Scorer


def calibrate_run(
    path: str | Path,
    scorer: "Scorer | None",
    risk: float,
    confidence: float = 0.95,
    *,
    signal: str = "best",
    metric: str | None = None,
    right_from: float | None = None,
    resamples: int = RESAMPLES,
    **settings: Any,
) -> Calibration:
    """Calibrate on a finished benchmark run; a quality metric is the correctness label.

    Args:
        path: the run's manager file or folder. It is a pickle: load only files you trust.
        scorer: with the run's settings; scores answers spread over the run again, and must get the
            saved scores, since a run does not record its weights. None: nothing is checked, and
            decisions compare the model's name and settings, not its weights.
        risk, confidence, signal: as for `calibrate_rows`; not "learned", which needs hidden states.
        metric: metric of the label; None: AlignScore, or the run's first.
        right_from: lowest quality of a right answer; None: 0.5, of a metric between 0 and 1.
        **settings: without a scorer: of the score, such as `method="asmi"`; those left out are the
            run's, of several methods Sem-ASMI's.

    Raises:
        FileNotFoundError: no such run.
        ValueError: no run or several, no such score or metric, only wrong answers; or the scorer's
            model or settings differ.

    Example:
        >>> run = calibrate_run("RUN", None, risk=0.3, resamples=50)
        >>> run.n, run.label_source
        (60, 'AlignScore')
    """
    check_signal(signal, risk, confidence, run=True)
    check_right_from(right_from)
    if scorer is not None:
        settings = {n: getattr(scorer.config, n) for n in ("method", "depth", "aggregation")}
    group, method = scored_group(path, metric, **settings)
    group = replace(group, right_from=right_from)
    _check_labels(group)
    config = group.methods[method]
    columns = signals_of(group) | {config.method: group.score(method)}
    shared = settings_of(group, method)
    texts, ids = group.saved("greedy_texts"), group.saved("greedy_tokens")
    stops = list(config.stop or ())
    if scorer is not None:
        stops = list(scorer.config.stop or ())
        shared |= _checked(path, group, method, scorer, shared)
        closes = _closing(scorer, ids or ())
    else:
        closes = list(group.saved("asmi_closing") or ())
    if config.closing_token and closes and ids is not None:
        limit = config.max_new_tokens
        ends = {answer_end(bool(e), len(row), limit) for e, row in zip(closes, ids, strict=True)}
        shared["answer_ends"] = sorted(ends)
    answered, answer_digests = np.arange(len(group)), []
    contents = texts and [content_of(text, stops) for text in texts]
    answers = group.answers
    if contents:
        answered = np.flatnonzero([bool(text.strip()) for text in contents])
    if prompts := group.saved("input_texts"):
        prompts = [_prompt(prompt, shared) for prompt in prompts]
        answers = Labelled(group.wrong, joined(group.clusters, prompts), group.quality)
    if contents and prompts:
        answer_digests = digests_of([prompts[i] for i in answered], [contents[i] for i in answered])
    lengths = group.saved("asmi_prompt_length")
    return fit(
        {kind: values[answered] for kind, values in columns.items()},
        answers.resampled(resamples).take(answered),
        risk=risk,
        confidence=confidence,
        signal=signal,
        method=config.method,
        name=group.label,
        label_source=group.metric,
        right_from=right_from,
        model=str(group.run.recorded("model").get("path") or NOT_RECORDED),
        settings=shared,
        prompt_tokens=sorted(float(lengths[row]) for row in answered) if lengths else [],
        answer_digests=answer_digests,
    )


def _closing(scorer: "Scorer", answers: Sequence[Sequence[Any]]) -> list[bool]:
    """Whether the last token ends each answer, as the scorer reads it."""
    from lm_polygraph_asmi.host.stopping import StopConditions  # imports transformers

    conditions = StopConditions(scorer.model, scorer.tokenizer, scorer.config.stop)
    return [conditions.closes([*map(int, row)]) for row in answers]


def _check_labels(group: "RunGroup") -> None:
    """Raise ValueError for rows whose label is missing, or was made without the gold answer."""
    if unlabelled := group.run.unlabelled(group.metric):
        raise ValueError(
            f"{group.run.path}: {unlabelled}. The risk guarantee does not cover rows left out: "
            "name another metric (--metric), or run them with ReferenceInAnswer"
        )
    if group.metric.startswith("Rouge"):
        from lm_polygraph_asmi.host.quality import unread

        if found := unread(group.metric, group.saved("target_texts") or []):
            raise ValueError(f"{group.run.path}: {found}")


def scored_group(
    path: str | Path, metric: str | None = None, **settings: Any
) -> tuple["RunGroup", str]:
    """The answers of a finished run, and its score with these settings; raises as `calibrate_run`.

    Settings left out are the run's; of several methods, Sem-ASMI.
    """
    depth = settings.get("depth", ASMIConfig.depth)
    group, *others = load_run_groups([path], metric, depth)
    if others:
        raise ValueError(
            f"{path}: expected one run, got {1 + len(others)} over different answers. Name one"
        )
    if not group.methods:
        raise ValueError(
            f"{path} records no score's settings: expected a manifest, which runs with the "
            "callback RunRecord write"
        )
    required = {"method": ASMIConfig.method} | ASMIConfig.check_names(settings)
    different = {name: _different(config, required) for name, config in group.methods.items()}
    method = next((name for name, settings in different.items() if not settings), None)
    if method is None:
        nearest = min(different, key=lambda name: len(different[name]))
        listed = ", ".join(f"{name}={value!r}" for name, value in required.items())
        raise ValueError(
            f"{path}: expected a score with the settings {listed}; {nearest} has others "
            f"({'; '.join(different[nearest])}). Leave these settings out to use the run's, or "
            "name another run"
        )
    return of_config(group, group.methods[method]), method


def _different(config: ASMIConfig, required: dict[str, Any]) -> list[str]:
    """Required settings that a score has not, in words; derived ones may be left open."""
    derived = ("num_masks", "mask_rate")
    open_ones = [n for n in derived if None in (required.get(n), getattr(config, n))]
    changed = config.replace(**{n: v for n, v in required.items() if n not in open_ones})
    return unequal(changed.score_key(), config.score_key())


def settings_of(group: "RunGroup", method: str) -> dict[str, Any]:
    """Settings of a score of a run, as saved with single answers."""
    saved = group.settings()
    if saved is None:
        raise ValueError(f"{group.run.path} has not saved asmi: its masks are unknown")
    recorded = group.run.recorded("config") if group.run.manifest else {}
    # LM-Polygraph makes a user message of each prompt.
    prompts = prompt_format([] if recorded.get("instruct") else "")
    return saved | group.methods[method].besides_masks() | prompts


def _checked(
    path: str | Path, group: "RunGroup", method: str, scorer: "Scorer", shared: dict[str, Any]
) -> dict[str, Any]:
    """What the scorer knows besides the run; raises unless it reproduces answers spread over it."""
    from lm_polygraph_asmi.scoring.unmasked import fingerprints  # imports torch

    prompts, ids = group.saved("input_texts"), group.saved("greedy_tokens")
    if prompts is None or ids is None:
        raise ValueError(f"{path} has not saved input_texts and greedy_tokens: both are needed")
    scores, known = group.score(method), fingerprints(scorer)
    for row in spread(len(group)):
        rescored = scorer.score(_prompt(prompts[row], shared), [int(token) for token in ids[row]])
        settings = rescored.compared_settings
        key, saved_key = (
            ASMIConfig.key_of(each) | {n: each[n] for n in ("layer", "prompt_format")}
            for each in (settings, shared)
        )
        if differences := unequal(key, saved_key):
            raise ValueError(f"settings differ from {path}: {'; '.join(differences)}")
        if not reproduces(rescored, scores[row]):
            raise ValueError(
                f"Cannot reproduce row {row} of {path}: stored {scores[row]:.5f}, recomputed "
                f"{rescored.score:.5f}. Weights or chat template differ; load the model used for "
                "that run"
            )
        known |= {n: settings[n] for n in ("attention_in_use", "system") if n in settings}
    return known


def _prompt(prompt: str, settings: dict[str, Any]) -> Any:
    """A saved prompt in the form that the run's model got."""
    content = {"prompt": prompt}
    return (in_chat(content) if settings["prompt_format"] == "chat" else content)["prompt"]


def signals_of(group: "RunGroup") -> dict[str, np.ndarray]:
    """Signal -> (n,) values of those a run has saved; keys and units as `Score.signals`."""
    likelihoods = group.tokens(group.saved("asmi_log_likelihood"))
    entropies = group.tokens(group.saved("asmi_entropy"))
    columns: dict[str, np.ndarray | None] = {"asmi": group.mi, "sem": group.u_sem}
    if likelihoods is not None and entropies is not None:
        rows = [unmasked_signals(*row) for row in zip(likelihoods, entropies, strict=True)]
        columns |= {name: np.array([row[name] for row in rows]) for name in rows[0]}
    return {kind: values for kind, values in columns.items() if values is not None}


def content_of(text: str, stops: Sequence[str]) -> str:
    """An answer before its stop string."""
    for stop in stops:
        text = text.partition(stop)[0]
    return text
