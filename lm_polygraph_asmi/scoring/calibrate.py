"""Calibration from labelled answers or a finished run: signal, threshold and risk guarantee."""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lm_polygraph_asmi.analysis.calibration import (
    debiased_calibration_error,
    held_out_probability,
    reliability,
)
from lm_polygraph_asmi.analysis.clusters import RESAMPLES, text_clusters
from lm_polygraph_asmi.analysis.labelled import Labelled
from lm_polygraph_asmi.analysis.risk_control import check_guarantee, risk_threshold
from lm_polygraph_asmi.analysis.signals import (
    best_signal,
    combination,
    rank_signals,
    recommendation,
)
from lm_polygraph_asmi.files import parse_json, to_json
from lm_polygraph_asmi.maths.scores import aggregate
from lm_polygraph_asmi.results.runs import RIGHT
from lm_polygraph_asmi.scoring.calibration import FINGERPRINTS, Calibration
from lm_polygraph_asmi.scoring.decision import SIGNALS, Decision
from lm_polygraph_asmi.scoring.provenance import answer_end, made_from
from lm_polygraph_asmi.scoring.result import Score
from lm_polygraph_asmi.scoring.rows import RESERVED, Row, in_chat, score_rows
from lm_polygraph_asmi.validation import check_at_least_one, check_number, describe_fields

if TYPE_CHECKING:
    from lm_polygraph_asmi.results.run_groups import RunGroup
    from lm_polygraph_asmi.scoring.scorer import Scorer
    from lm_polygraph_asmi.scoring.text import Request

RISKS = (0.05, 0.1, 0.2)
"""Risks of `Calibration.threshold_table`."""
COMBINED = "combination"
COMBINES = ("perplexity", "msp")
"""Signals combined with the score: few features, so that few answers suffice."""
SHARED = 80
"""Least number of shared characters that count as a passage."""


def is_wrong(content: Mapping[str, Any], right_from: float = RIGHT) -> bool:
    """Whether a row's answer is wrong: not `correct`, or `quality` below `right_from`.

    Raises:
        ValueError: neither, both, or not a boolean or a number.
    """
    labels = [name for name in ("correct", "quality") if content.get(name) is not None]
    if len(labels) != 1:
        raise ValueError(
            'expected "correct" (true or false) or "quality" (a number), got '
            f"{labels or f'neither: {describe_fields(content)}'}"
        )
    value = content[labels[0]]
    if labels == ["correct"]:
        if value not in (True, False):  # 1 and 0 pass
            raise ValueError(f"expected correct to be true or false, got {value!r}")
        return not value
    check_number("quality", value)
    return bool(value < right_from)


def context_clusters(prompts: Sequence[Any]) -> list[str]:
    """Cluster keys (n,): prompts share one if over half of the longer is a common start.

    A start common to all prompts is ignored as instruction. Prompts in the paper's format are
    clustered by their passage. Only the text of chat messages counts.
    """
    texts = [_text_of(prompt) for prompt in prompts]
    by_passage = text_clusters(texts)
    if by_passage != texts:
        return by_passage
    distinct = sorted(set(texts))
    if len(distinct) < 2:
        return texts
    start = len(commonprefix([distinct[0], distinct[-1]]))
    key = {distinct[0]: distinct[0]}
    for before, text in pairwise(distinct):
        shared = len(commonprefix([before, text])) - start
        longer = max(len(before), len(text)) - start
        same_cluster = shared >= SHARED and 2 * shared > longer
        key[text] = key[before] if same_cluster else text
    return [key[text] for text in texts]


def _text_of(prompt: Any) -> str:
    """A prompt, or its passages, as one text."""
    if isinstance(prompt, Mapping):
        return str(prompt.get("content", ""))
    return prompt if isinstance(prompt, str) else "\n".join(map(_text_of, prompt))


def calibrate_rows(
    rows: Iterable[Row | Mapping[str, Any]],
    scorer: "Scorer",
    risk: float,
    confidence: float = 0.95,
    *,
    signal: str = "best",
    right_from: float = RIGHT,
    name: str = "labelled answers",
    resamples: int = RESAMPLES,
    progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """Calibrate on labelled answers: threshold with a risk guarantee, and error probability.

    Args:
        rows: from `read_rows`, or dictionaries: `prompt` (text or messages), `answer`, and
            `correct` or `quality`; `cluster` (all rows or none; default: `context_clusters`) if
            different prompts are not independent. Labelled lines of `score --out` keep their
            scores if prompt, answer, settings and model are those that made them, and the scorer
            reproduces some of them; other lines are scored again, with a warning.
        scorer: model and settings; scores with others get no verdict. With a `result_cache`, a
            killed call resumes.
        risk: largest error rate among accepted answers, in (0, 1).
        confidence: probability that the guarantee holds, over calibration samples.
        signal: a key of `SIGNALS`; "score": the scorer's method; "best": the signal with the
            highest AUROC on the fifth of the clusters that fixes the thresholds, which keeps the
            guarantee valid. Choosing after looking at the results does not.
        right_from: lowest quality of a right answer.
        name: name of the calibration.
        progress: called after each scored row, with the numbers of scored and of all rows.

    Empty and blank answers are left out: `Score.accept` never accepts them.

    Raises:
        ValueError: a row without answer or label, or that cannot be scored; texts and chats in one
            calibration; only right or only wrong answers; an unknown signal.

    Example:
        >>> rows = [
        ...     {"prompt": prompt, "answer": answer, "correct": right, "cluster": passage}
        ...     for passage in range(4)
        ...     for answer, right in ((" Edda Holm", True), (" Brask", False))
        ... ]
        >>> run = calibrate_rows(rows, scorer, risk=0.1, resamples=50)
        >>> run.n, run.errors, run.decision.guarantee.threshold  # far too few for a guarantee
        (8, 4, None)
    """
    if signal not in ("best", "score", *SIGNALS):
        raise ValueError(
            f"expected signal best, score or one of {', '.join(SIGNALS)}; got {signal!r}"
        )
    check_guarantee(risk, confidence)
    check_at_least_one("resamples", resamples)
    numbered_rows = [
        row if isinstance(row, Row) else Row(number, dict(row))
        for number, row in enumerate(rows, start=1)
    ]
    input_rows = [
        Row(row.number, {n: row.content[n] for n in row.content if n not in RESERVED}, row.error)
        for row in numbered_rows
    ]
    if not input_rows:
        raise ValueError("expected at least two labelled answers, got no row")
    labels = labels_of(input_rows, right_from)
    if all(labels.values()):
        raise ValueError(f"{name}: expected right and wrong answers, got {len(labels)}, all wrong")
    if all(isinstance(a := row.content["answer"], str) and not a.strip() for row in input_rows):
        raise ValueError("expected answers, got only empty or blank ones")
    saved_scores = _saved_scores(numbered_rows, scorer)
    if note := scored_again(numbered_rows, len(saved_scores)):
        warnings.warn(note, stacklevel=2)
    prompts = [row.content.get("context") or row.content["prompt"] for row in input_rows]
    keys: Sequence[Any] = [row.content.get("cluster") for row in input_rows]
    if any(key is None for key in keys):
        if not all(key is None for key in keys):
            raise ValueError('expected a "cluster" in all rows or in none, got it in some')
        keys = context_clusters(prompts)
    scores_by_row = _scores_by_row(input_rows, scorer, progress, saved_scores)
    tested = [
        (scores_by_row[row.number], labels[row.number], str(key))
        for row, key in zip(input_rows, keys, strict=True)
        if scores_by_row[row.number].answered
    ]
    if not tested:
        raise ValueError("expected answers, got only empty or blank ones")
    scores, wrong, clusters = zip(*tested, strict=True)
    return _calibration(
        scores, np.array(wrong), list(clusters), scorer, risk, confidence, signal, name, resamples
    )


def labels_of(rows: Iterable[Row], right_from: float = RIGHT) -> dict[int, bool]:
    """Row number -> whether the answer is wrong; checks rows without a model.

    Raises:
        ValueError: a row that cannot be read, or without an answer or a label; texts and chats.
    """
    labels: dict[int, bool] = {}
    formats: dict[bool, int] = {}
    for row in rows:
        try:
            if row.error is not None:
                raise ValueError(row.error)
            if row.content.get("answer") == "":
                raise ValueError(
                    "the answer is empty; empty answers are never accepted. Remove the row"
                )
            if _request(row).answer is None:
                raise ValueError('expected an "answer" for the label, got none')
            formats.setdefault(isinstance(row.content["prompt"], str), row.number)
            labels[row.number] = is_wrong(row.content, right_from)
        except ValueError as error:
            raise ValueError(f"row {row.number}: {error}") from error
    if len(formats) > 1:
        raise ValueError(
            f"the prompt of row {formats[True]} is a text, that of row {formats[False]} a chat: "
            "expected one kind, since a threshold for one does not hold for the other. Calibrate "
            "each apart, or pass all as chats (--chat)"
        )
    return labels


def scored_again(rows: Iterable[Row], kept: int) -> str:
    """How many rows with saved scores are scored again, and why; empty for none."""
    saved = sum(bool(row.content.get("tokens")) for row in rows)
    if saved <= kept:
        return ""
    return (
        f"Scored {saved - kept} of {saved} rows again: prompt, answer or settings differ from "
        "those of the saved scores, or these are of another model or an older release."
    )


def _saved_scores(rows: Iterable[Row], scorer: "Scorer") -> dict[int, Score]:
    """Row number -> score saved in lines of `score --out`; none if not reproduced.

    Not all lines record weights, so some rows are scored again and must get the same scores.
    """
    saved = {}
    for row in rows if scorer.config.method != "adapt" else ():  # its samples are not saved
        try:
            score = Score.from_dict(row.content)
        except ValueError:  # a plain row, or without tokens
            continue
        if made_from(row.content) and _consistent(score):
            saved[row.number] = score
    if not saved:
        return {}
    first = next(iter(saved.values()))
    rescored = _rescore(first, scorer)  # with the settings that a line of it would have
    alike = {n: score for n, score in saved.items() if _same_settings(score, rescored, scorer)}
    checked = [[*alike.values()][i] for i in _spread(len(alike))]
    pairs = ((score, rescored if score is first else _rescore(score, scorer)) for score in checked)
    return alike if all(_reproduces(new, score.score) for score, new in pairs) else {}


def _spread(n: int) -> list[int]:
    """Positions of `CHECKED_ANSWERS` among n, spread evenly."""
    return sorted({int(i) for i in np.linspace(0, n - 1, CHECKED_ANSWERS).round()}) if n else []


def _consistent(score: Score) -> bool:
    """Whether score and MSP are those of the tokens beside them, up to rounding."""
    tokens = score.tokens[: score.counted]
    expected = {
        "score": aggregate([token.u for token in tokens], score.aggregation),
        "msp": -sum(token.log_likelihood for token in tokens),
    }
    return all(
        math.isclose(getattr(score, name), value, rel_tol=1e-4, abs_tol=1e-6)
        for name, value in expected.items()
    )


def _rescore(saved: Score, scorer: "Scorer") -> Score:
    return scorer.score(saved.prompt, [token.id for token in saved.tokens])


def _reproduces(rescored: Score, saved_score: float) -> bool:
    """Whether an answer scored again has the score it had."""
    return math.isclose(rescored.score, saved_score, rel_tol=TOLERANCE, abs_tol=1e-5)


def _same_settings(saved: Score, rescored: Score, scorer: "Scorer") -> bool:
    """Whether a saved score has the model name and settings of `rescored`."""
    layers = [score.settings.get("layer") for score in (saved, rescored)]
    key = rescored.config.replace(stop=tuple(scorer.stop)).score_key()
    used = rescored.settings | scorer.fingerprints()
    others = {n: v for n, v in saved.settings.items() if n in (*FINGERPRINTS, "attention_in_use")}
    if scorer.as_messages(saved.prompt) != saved.prompt or others != {n: used[n] for n in others}:
        return False
    return (saved.model, layers[0], saved.config.score_key()) == (rescored.model, layers[1], key)


def _scores_by_row(
    rows: list[Row],
    scorer: "Scorer",
    progress: Callable[[int, int], None] | None,
    saved_scores: dict[int, Score],
) -> dict[int, Score]:
    """Row number -> score, saved or computed."""
    scores = dict(saved_scores)
    missing = [row for row in rows if row.number not in saved_scores]
    problem = (
        "row {} cannot be scored: {}. Correct or remove it; the risk guarantee does not cover rows "
        "left out"
    )
    for row in missing:  # before any of them is scored
        try:
            _check_tokens(row, scorer)
        except ValueError as error:
            raise ValueError(problem.format(row.number, error)) from error
    for row, outcome in score_rows(scorer, missing):
        if outcome.score is None:
            raise ValueError(problem.format(row.number, outcome.error))
        scores[row.number] = outcome.score
        if progress is not None:
            progress(len(scores), len(rows))
    return scores


def _request(row: Row) -> "Request":
    from lm_polygraph_asmi.scoring.text import parse_request  # imports torch

    content = row.content
    return parse_request(content["prompt"], content.get("answer"), content.get("samples"))


def _check_tokens(row: Row, scorer: "Scorer") -> None:
    """Raise ValueError unless prompt and answer fit the model's vocabulary and context window."""
    import torch

    from lm_polygraph_asmi.model.unmasked import validate_tokens
    from lm_polygraph_asmi.scoring.text import answer_tokens, prompt_tokens

    prompt, answer, *_ = _request(row)
    prompt = scorer.as_messages(prompt)
    ids = prompt_tokens(scorer.tokenizer, prompt).tolist()
    added = answer_tokens(scorer.tokenizer, prompt, answer) if isinstance(answer, str) else answer
    validate_tokens(scorer.model, torch.tensor([*ids, *(added or ())]), len(ids))


def _calibration(
    answers: Sequence[Score],
    wrong: np.ndarray,
    clusters: list[str],
    scorer: "Scorer",
    risk: float,
    confidence: float,
    signal: str,
    name: str,
    resamples: int,
) -> Calibration:
    columns = {
        kind: np.array([score.signals[kind] for score in answers]) for kind in answers[0].signals
    }
    labelled = Labelled(wrong, clusters, resamples=resamples)
    method = scorer.config.method
    decider = _decider(signal, columns, method, labelled)
    run = Calibration.fitted(
        name,
        columns[method],
        wrong,
        1.0 - wrong,
        clusters,
        columns["msp"],
        name=name,
        method=answers[0].label,
        model=answers[0].model,
        labelled_by="their labels",
        settings=_shared_settings(answers) | scorer.fingerprints() | {"stop": list(scorer.stop)},
        masking_response=float(np.mean([token.mi for score in answers for token in score.tokens])),
    )
    reference_range = {
        "prompt_tokens": sorted(float(score.prompt_tokens or 0) for score in answers),
        "score": run.scores,
        "msp": np.sort(columns["msp"]).tolist(),
    }
    return replace(
        with_decision(run, columns, labelled, risk, confidence, decider),
        reference_range=reference_range,
    )


def with_decision(
    calibration: Calibration,
    columns: Mapping[str, np.ndarray],
    answers: Labelled,
    risk: float,
    confidence: float,
    decider: str,
) -> Calibration:
    """The calibration with a threshold, and with how well each signal ranks errors.

    Args:
        columns: signal -> (n,) values, higher = more uncertain.
        answers: with the quality for PRR.
        decider: signal that decides.
    """
    wrong, clusters = answers.wrong, answers.clusters
    guarantee = risk_threshold(columns[decider], wrong, clusters, risk, confidence)
    by_name = {SIGNALS[kind]: values for kind, values in columns.items()}
    method = SIGNALS[calibration.config.method]
    try:
        features = [columns[calibration.config.method], *(columns[kind] for kind in COMBINES)]
        by_name[COMBINED] = combination(np.log1p(np.column_stack(features)), answers)
    except (ValueError, KeyError):
        pass  # too few wrong or right answers for its folds, or a signal was not saved
    held_out = held_out_probability(columns[calibration.config.method], answers)
    diagram, error = None, None
    if held_out is not None:
        curve = reliability(held_out[0], answers)
        diagram = {
            name: value.tolist() if isinstance(value, np.ndarray) else value
            for name, value in vars(curve).items()
        }
        error = debiased_calibration_error(held_out[0], wrong)
    ranked = rank_signals(by_name, answers)
    same_answers = len(wrong) == calibration.n  # then PRR and interval are the same, too
    other_thresholds = tuple(
        Decision(
            kind, risk_threshold(values, wrong, clusters, other_risk, confidence, estimate=False)
        )
        for kind, values in columns.items()
        for other_risk in sorted({*RISKS, risk})
    )
    return replace(
        calibration,
        prr=ranked[method].prr if same_answers else calibration.prr,
        decision=Decision(decider, guarantee),
        signals=ranked,
        recommendation=recommendation(ranked, by_name, answers, method),
        other_thresholds=other_thresholds,
        reliability=diagram,
        calibration_error=error,
    )


def _shared_settings(scores: Sequence[Score]) -> dict[str, Any]:
    """What all scores share, and how their answers end."""
    described = [score.compared_settings for score in scores]
    shared = dict(described[0])
    for other in described[1:]:
        shared = {
            name: value for name, value in shared.items() if other.get(name, math.nan) == value
        }
    del shared["model"]
    ends = sorted({other["answer_end"] for other in described if "answer_end" in other})
    return parse_json(to_json(shared | {"answer_ends": ends}))


CHECKED_ANSWERS = 3
"""Number of answers scored again, to check that the model is the same."""
TOLERANCE = 0.02
"""Relative difference of such a score that precision and batch size can cause."""


def calibrate_run(
    path: str | Path,
    scorer: "Scorer",
    risk: float,
    confidence: float = 0.95,
    *,
    signal: str = "best",
    metric: str | None = None,
    resamples: int = RESAMPLES,
) -> Calibration:
    """Calibrate on a finished benchmark run; a quality metric is the correctness label.

    A run does not record its weights. So the scorer scores some of its answers again, and must get
    the saved scores.

    Args:
        path: the run's manager file or folder. It is a pickle: load only files you trust.
        scorer, risk, confidence, signal: as for `calibrate_rows`; the scorer needs the run's
            settings.
        metric: metric of the label, right from 0.5 on; None: AlignScore, or the run's first.

    Raises:
        FileNotFoundError, ValueError: as `Calibration.from_run`; or model or settings differ.

    Example:
        >>> calibrate_run("RUN", scorer, risk=0.1)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: settings differ from RUN: num_masks ...
    """
    from lm_polygraph_asmi.results.run_groups import load_run_groups, of_config

    run = Calibration.from_run(
        path,
        metric,
        **{n: getattr(scorer.config, n) for n in ("method", "depth", "aggregation")},
    )
    (group,) = load_run_groups([path], metric, scorer.config.depth)
    group = of_config(group, run.config)
    prompts, ids = group.saved("input_texts"), group.saved("greedy_tokens")
    if prompts is None or ids is None:
        raise ValueError(
            f"{path} has not saved input_texts and greedy_tokens, which the check needs"
        )
    scores = group.score(run.method)
    for row in _spread(len(group)):
        content = {"prompt": prompts[row]}
        prompt = (in_chat(content) if run.settings["prompt_format"] == "chat" else content)[
            "prompt"
        ]
        rescored = scorer.score(prompt, [int(token) for token in ids[row]])
        differences = run.other_settings(rescored.compared_settings)
        if differences:
            raise ValueError(f"settings differ from {path}: {'; '.join(differences)}")
        if not _reproduces(rescored, scores[row]):
            raise ValueError(
                f"Cannot reproduce row {row} of {path}: stored {scores[row]:.5f}, recomputed "
                f"{rescored.score:.5f}. Weights or chat template differ; load the model used for "
                "that run"
            )
    columns = signals_of(group) | {scorer.config.method: scores}
    lengths = group.saved("asmi_prompt_length")
    reference_range = {"score": run.scores}
    if "msp" in columns:
        reference_range["msp"] = np.sort(columns["msp"]).tolist()
    if lengths is not None:
        reference_range["prompt_tokens"] = sorted(map(float, lengths))
    settings = run.settings | scorer.fingerprints()
    settings |= {n: rescored.compared_settings[n] for n in ("attention_in_use", "system")
                 if n in rescored.compared_settings}  # fmt: skip
    limit, closes = run.config.max_new_tokens, scorer.stop_conditions.closes
    if run.config.closing_token:
        ends = {answer_end(closes([*map(int, row)]), len(row), limit) for row in ids}
        settings["answer_ends"] = sorted(ends)
    run = replace(run, settings=settings, reference_range=reference_range)
    stops, texts = scorer.stop_conditions.stop_strings, group.saved("greedy_texts")
    answered = np.arange(len(group))
    if texts is not None:
        answered = np.flatnonzero([says_anything(text, stops) for text in texts])
    columns = {kind: values[answered] for kind, values in columns.items()}
    wrong, clusters = group.wrong[answered], [group.clusters[row] for row in answered]
    answers = Labelled(wrong, clusters, group.quality[answered], resamples)
    decider = _decider(signal, columns, scorer.config.method, answers)
    return with_decision(run, columns, answers, risk, confidence, decider)


def signals_of(group: "RunGroup") -> dict[str, np.ndarray]:
    """Signal -> (n,) values of those a run has saved; keys and units as `Score.signals`."""
    likelihoods, entropies = group.tokens("asmi_log_likelihood"), group.tokens("asmi_entropy")
    columns: dict[str, np.ndarray | None] = {"asmi": group.mi, "sem": group.u_sem}
    if likelihoods is not None:
        columns |= {
            "msp": np.array([-tokens.sum() for tokens in likelihoods]),
            "perplexity": np.array([-tokens.mean() for tokens in likelihoods]),
        }
    if entropies is not None:
        columns["entropy"] = np.array([tokens.mean() for tokens in entropies])
    return {kind: values for kind, values in columns.items() if values is not None}


def says_anything(text: str, stops: Sequence[str]) -> bool:
    """Whether an answer holds more than blanks before its stop string; as `Score.answered`."""
    for stop in stops:
        text = text.partition(stop)[0]
    return bool(text.strip())


def _decider(signal: str, columns: Mapping[str, np.ndarray], method: str, answers: Labelled) -> str:
    """Key of the signal that decides."""
    # The score comes first, so that it wins ties.
    ordered = {method: columns[method], **columns}
    decider = {"best": best_signal(ordered, answers), "score": method}.get(signal, signal)
    if decider not in columns:
        raise ValueError(f"expected a signal of {', '.join(columns)}; got {decider!r}")
    return decider
