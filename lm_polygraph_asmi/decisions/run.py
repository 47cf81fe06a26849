"""Calibrate on a finished benchmark run, whose manifest names its model and revision."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from lm_polygraph_asmi.analysis.clusters import joined
from lm_polygraph_asmi.analysis.labelled import Labelled
from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.decisions.calibration import USUAL_SAMPLING, Calibration
from lm_polygraph_asmi.decisions.fit import CalibrationOptions, fit
from lm_polygraph_asmi.decisions.labels import digest_of_texts
from lm_polygraph_asmi.results.run_groups import RunGroup, load_run_groups
from lm_polygraph_asmi.scoring.provenance import answer_end, prompt_format
from lm_polygraph_asmi.scoring.signals import LEARNED, unmasked_signals
from lm_polygraph_asmi.validation import same_text

SAMPLING = {"top_k": 50, "top_p": 1.0, "repetition_penalty": 1.0, "allow_newlines": True}
"""Settings besides the temperature that change samples, with the defaults that `score` uses."""


def calibrate_run(
    path: str | Path,
    risk: float,
    confidence: float = 0.95,
    *,
    metric: str | None = None,
    **options: Any,
) -> Calibration:
    """Calibrate on a finished benchmark run. Only load files you trust: they are pickles.

    Args:
        path: the manager file, or its folder.
        risk, confidence: see `CalibrationOptions`.
        metric: quality metric for the labels. None: AlignScore, or else the run's first metric.
        options: further fields of `CalibrationOptions`, and settings of the score, such as
            `method="asmi"`. Settings that are left out are the run's; if the run has several
            methods, those of Sem-ASMI.

    Example:
        >>> run = calibrate_run("RUN", risk=0.3, resamples=50)
        >>> run.n, run.label_source
        (60, 'AlignScore')
    """
    given = {
        each.name: options.pop(each.name)
        for each in fields(CalibrationOptions)
        if each.name in options
    }
    asked = CalibrationOptions(
        risk, confidence, **given | {"signal": given.get("signal") or "best"}
    )
    if asked.signal == LEARNED:
        raise ValueError(
            "a finished run has not saved the hidden states that a learned score needs: score "
            "its prompts and answers as rows (`polygraph_asmi score`), and calibrate on those"
        )
    if asked.signal == "adapt":  # other signals do not need the run's estimator of that name
        options = {"method": asked.signal} | options
    group, method = _scored_group(path, metric, options)
    group = _labelled(group, asked.right_from)
    config, model = group.methods[method], group.run.recorded("model")
    if model.get("path") is None:
        raise ValueError(
            f"{path}: expected a manifest that names its model: run it again with the callback "
            "RunRecord"
        )
    shared = settings_of(group, method) | {"revision": model.get("revision", "unknown")}
    answers, answered, digests = group.answers, np.arange(len(group)), list[str]()
    texts, prompts = group.saved("greedy_texts"), group.saved("input_texts")
    if texts:
        for stop in config.stop or ():
            texts = [text.partition(stop)[0] for text in texts]
        answered = np.flatnonzero([bool(text.strip()) for text in texts])
    if prompts:
        answers = Labelled(
            group.wrong, joined(group.clusters, [*map(same_text, prompts)]), group.quality
        )
        digests = sorted(digest_of_texts(prompts[i]) for i in answered)
    closes, ids = group.saved("asmi_closing"), group.saved("greedy_tokens")
    if config.closing_token and closes and ids:
        shared["answer_ends"] = sorted(
            {
                answer_end(bool(closed), len(row), config.max_new_tokens)
                for closed, row in zip(closes, ids, strict=True)
            }
        )
    columns = _signals_of(group) | {config.method: group.score(method)}
    lengths, empty = group.saved("asmi_prompt_length"), len(group) - len(answered)
    return fit(
        {kind: values[answered] for kind, values in columns.items()},
        answers.resampled(asked.resamples).take(answered),
        replace(asked, signal=config.method) if asked.signal == "score" else asked,
        name=group.label,
        left_out=f"{empty} empty" if empty else "",
        label_source=group.metric,
        model=str(model["path"]),
        settings=shared,
        prompt_tokens=sorted(float(lengths[row]) for row in answered) if lengths else [],
        question_digests=digests,
    )


def _labelled(group: RunGroup, right_from: float | None) -> RunGroup:
    """The group with `right_from`. ValueError if its gold answer gives a row no label."""
    from lm_polygraph_asmi.host.quality import unread_rows, why_unread

    problem = group.run.unlabelled(group.metric)
    if group.metric.startswith("Rouge") and not problem:
        golds = group.saved("target_texts") or []
        if unread := unread_rows(group.metric, golds):
            problem = why_unread(group.metric, unread, len(golds))
    if problem:
        raise ValueError(
            f"{group.run.path}: {problem}. The risk guarantee does not cover rows that are left "
            "out: name another metric (--metric), or run them with ReferenceInAnswer"
        )
    return replace(group, right_from=right_from)


def _scored_group(
    path: str | Path, metric: str | None, settings: dict[str, Any]
) -> tuple[RunGroup, str]:
    """The answers of a finished run, and the name of its score with these settings."""
    group, *others = load_run_groups([path], metric, settings.get("depth", ASMIConfig.depth))
    if others:
        raise ValueError(
            f"{path}: expected one run, got {1 + len(others)} over different answers. Name one of "
            "them"
        )
    if not group.methods:
        raise ValueError(
            f"{path}: expected a manifest with the settings of a score, which runs with the "
            "callback RunRecord write"
        )
    required = {"method": ASMIConfig.method} | ASMIConfig.check_names(settings)
    for method, config in group.methods.items():
        derived = [n for n in ("num_masks", "mask_rate") if getattr(config, n) is None]
        asked = {n: value for n, value in required.items() if n not in derived}
        if config.replace(**asked).score_key() == config.score_key():
            return replace(group, operating=config, depth=config.depth), method
    listed = ", ".join(f"{name}={value!r}" for name, value in required.items())
    raise ValueError(
        f"{path}: expected a score with the parameters {listed}; it has "
        f"{', '.join(group.methods)}. Leave these out to use the run's, or name another run"
    )


def settings_of(group: RunGroup, method: str) -> dict[str, Any]:
    """Settings of a run's score, under the names that `score` saves with an answer."""
    saved = group.settings()
    if saved is None:
        raise ValueError(f"{group.run.path} has no statistic asmi, so its masks are unknown")
    recorded = group.run.recorded("config") if group.run.manifest else {}
    # With `instruct`, LM-Polygraph makes each prompt a user message.
    shared = prompt_format([] if recorded.get("instruct") else "", {})
    sampling = recorded.get("generation_params") or {}
    if "temperature" in sampling:
        shared["temperature"] = sampling["temperature"]
    changed = [
        f"{n}={sampling[n]}" for n in SAMPLING if sampling.get(n, SAMPLING[n]) != SAMPLING[n]
    ]
    shared["sampling"] = ", ".join(changed) or USUAL_SAMPLING
    return saved | group.methods[method].besides_masks() | shared


def _signals_of(group: RunGroup) -> dict[str, np.ndarray]:
    """The signals that a run saved, (n,) values each, with keys and units as in `Score.signals`."""
    likelihoods = group.tokens(group.saved("asmi_log_likelihood"))
    entropies = group.tokens(group.saved("asmi_entropy"))
    columns: dict[str, np.ndarray | None] = {"asmi": group.mi, "sem": group.u_sem}
    if likelihoods is not None and entropies is not None:
        rows = [unmasked_signals(*row) for row in zip(likelihoods, entropies, strict=True)]
        columns |= {name: np.array([row[name] for row in rows]) for name in rows[0]}
    return {kind: values for kind, values in columns.items() if values is not None}
