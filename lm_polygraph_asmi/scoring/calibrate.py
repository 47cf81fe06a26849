"""From labelled answers to a calibration run that decides: by which signal, and with what
promise."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice, pairwise
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lm_polygraph_asmi.analysis.calibration import (
    debiased_calibration_error,
    held_out_probability,
    reliability,
)
from lm_polygraph_asmi.analysis.clusters import RESAMPLES, check_rows, text_clusters
from lm_polygraph_asmi.analysis.risk_control import risk_threshold
from lm_polygraph_asmi.analysis.signals import (
    best_signal,
    combination,
    rank_signals,
    recommendation,
)
from lm_polygraph_asmi.results.runs import RIGHT
from lm_polygraph_asmi.scoring.calibration import Calibration
from lm_polygraph_asmi.scoring.decision import SIGNALS, Decision
from lm_polygraph_asmi.scoring.result import Score
from lm_polygraph_asmi.scoring.rows import RESERVED, Row, rows_done, rows_left, score_rows
from lm_polygraph_asmi.validation import check_number, describe_fields

if TYPE_CHECKING:
    from lm_polygraph_asmi.results.run_groups import RunGroup
    from lm_polygraph_asmi.scoring.scorer import Scorer

RISKS = (0.05, 0.1, 0.2)
"""Promises of the table for people."""
COMBINED = "combination"
COMBINES = ("perplexity", "msp")
"""What is put together with the score itself: few features, so that few answers do."""
SHARED = 80
"""Characters at the start of two prompts that may be a passage."""


def is_wrong(content: Mapping[str, Any], right_from: float = RIGHT) -> bool:
    """The label of a row: `correct`, or `quality`, right from a threshold on.

    Raises:
        ValueError: neither of them, both, or something else than a truth value or a number.
    """
    given = [name for name in ("correct", "quality") if content.get(name) is not None]
    if len(given) != 1:
        raise ValueError(
            'expected "correct" (true or false) or "quality" (a number), got '
            f"{given or f'neither: {describe_fields(content)}'}"
        )
    value = content[given[0]]
    if given == ["correct"]:
        if value not in (True, False):  # 1 and 0 are these, too
            raise ValueError(f"correct must be true or false, got {value!r}")
        return not value
    check_number("quality", value)
    return bool(value < right_from)


def context_clusters(prompts: Sequence[Any]) -> list[str]:
    """Keys of prompts that share a passage: alike from the start for more than half of the longer.

    What all prompts begin with is instruction and counts for nothing. Prompts in a form of the
    paper's are read as such; of chat messages counts their text.
    """
    texts = [_text_of(prompt) for prompt in prompts]
    known = text_clusters(texts)
    if known != texts:
        return known
    distinct = sorted(set(texts))
    if len(distinct) < 2:
        return texts
    start = len(commonprefix([distinct[0], distinct[-1]]))
    key = {distinct[0]: distinct[0]}
    for before, text in pairwise(distinct):
        shared = len(commonprefix([before, text])) - start
        longer = max(len(before), len(text)) - start
        same = shared >= SHARED and 2 * shared > longer
        key[text] = key[before] if same else text
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
    out: str | Path | None = None,
    resamples: int = RESAMPLES,
    progress: Callable[[int, int], None] | None = None,
) -> Calibration:
    """A calibration run from labelled answers, with a threshold that keeps a promise.

    Args:
        rows: of `read_rows`, or plain dictionaries: `prompt` (text or messages), `answer`, and
            `correct` or `quality`; `cluster` if prompts that look different share something
            (default: `context_clusters`, unless every row has one). Lines of `score --out` with a
            label keep their scores, if the scorer gives some of them again.
        scorer: model and settings; the calibration run refuses other ones.
        risk: promised share of wrong answers among the accepted ones.
        confidence: of the promise.
        signal: a key of `SIGNALS` that the scorer gives; "score" is the scorer's own variant;
            "best" the one with the highest AUROC on the fifth of the clusters that fix the
            thresholds, which costs the promise nothing. Looking at the results and then choosing
            does.
        right_from: lowest quality of a right answer.
        name: of the calibration run.
        out: JSON lines of the scores, taken up again if there are any.
        progress: called after each row that was scored, with how many are and how many there are.

    Answers of nothing, such as a blank, are left out: `Score.accept` never accepts them.

    Raises:
        ValueError: rows without an answer or a label, or that cannot be scored; nothing but right,
            or wrong, answers; a signal that there is not.

    Example:
        >>> rows = [
        ...     {"prompt": prompt, "answer": answer, "correct": right, "cluster": passage}
        ...     for passage in range(4)
        ...     for answer, right in ((" Edda Holm", True), (" Brask", False))
        ... ]
        >>> found = calibrate_rows(rows, scorer, risk=0.1, resamples=50)
        >>> found.n, found.errors, found.decision.found.threshold  # far too few for any promise
        (8, 4, None)
    """
    if signal not in ("best", "score", *SIGNALS):
        raise ValueError(f"signal must be best, score or one of {', '.join(SIGNALS)}: {signal!r}")
    numbered = [
        row if isinstance(row, Row) else Row(number, dict(row))
        for number, row in enumerate(rows, start=1)
    ]
    given = [
        Row(row.number, {name: row.content[name] for name in row.content if name not in RESERVED})
        for row in numbered
    ]
    if not given:
        raise ValueError("there is no row: at least two labelled answers are wanted")
    labels = labels_of(given, right_from)
    brought = _brought(numbered, scorer)
    found = _scored(given, scorer, None if out is None else Path(out), progress, brought)
    prompts = [row.content.get("context") or row.content["prompt"] for row in given]
    own: Sequence[Any] = [row.content.get("cluster") for row in given]
    if any(key is None for key in own):
        if not all(key is None for key in own):
            raise ValueError('some rows have a "cluster", some have none: give all of them one')
        own = context_clusters(prompts)
    tested = [
        (found[row.number], labels[row.number], str(key))
        for row, key in zip(given, own, strict=True)
        if found[row.number].answered
    ]
    if not tested:
        raise ValueError("no row holds an answer: blanks, and what ends an answer, are none")
    scores, wrong, clusters = zip(*tested, strict=True)
    return _calibration(
        scores, np.array(wrong), list(clusters), scorer, risk, confidence, signal, name, resamples
    )


def labels_of(rows: Iterable[Row], right_from: float = RIGHT) -> dict[int, bool]:
    """Whether the answer is wrong, by number of the row; looks at all that needs no model.

    Raises:
        ValueError: a row that cannot be read, or without an answer or a label.
    """
    from lm_polygraph_asmi.scoring.text import parse_request  # brings torch

    labels = {}
    for row in rows:
        try:
            if "error" in row.content:
                raise ValueError(row.content["error"])
            if row.content.get("answer") == "":
                raise ValueError("the answer is empty: such answers are never accepted. Remove it")
            if parse_request(row.content["prompt"], row.content.get("answer")).answer is None:
                raise ValueError('no "answer": a label is of an answer')
            labels[row.number] = is_wrong(row.content, right_from)
        except ValueError as error:
            raise ValueError(f"row {row.number}: {error}") from error
    return labels


def _brought(rows: Iterable[Row], scorer: "Scorer") -> dict[int, Score]:
    """Scores by number of the row that lines of `score --out` bring along; none in doubt.

    Weights do not stand in a line. So some are scored anew, and must get the scores they have.
    """
    found = {}
    for row in rows if scorer.config.method != "adapt" else ():  # whose samples stand in no line
        try:
            score = Score.from_dict(row.content)
        except ValueError:  # a plain row, or without its tokens
            continue
        if score.answer == score.scored_text[: score.content_end]:  # else somebody edited it
            found[row.number] = score
    if not found:
        return {}
    first = next(iter(found.values()))
    made = _anew(first, scorer)  # has the scorer's settings as a line has them
    alike = {number: kept for number, kept in found.items() if _made_alike(kept, made, scorer)}
    tried = islice(alike.values(), TRIED)
    again = ((kept, made if kept is first else _anew(kept, scorer)) for kept in tried)
    return alike if all(_same(anew, kept.score) for kept, anew in again) else {}


def _anew(kept: Score, scorer: "Scorer") -> Score:
    return scorer.score(kept.prompt, [token.id for token in kept.tokens])


def _same(again: Score, score: float) -> bool:
    """Whether an answer scored anew has the score it had."""
    return math.isclose(again.score, score, rel_tol=TOLERANCE, abs_tol=1e-5)


def _made_alike(score: Score, again: Score, scorer: "Scorer") -> bool:
    """Whether a saved score is of the model, by its name, and of the settings of another."""
    layers = [one.settings.get("layer") for one in (score, again)]
    wanted = again.config.replace(stop=tuple(scorer.stop)).score_key()
    return (score.model, layers[0], score.config.score_key()) == (again.model, layers[1], wanted)


def _scored(
    rows: list[Row],
    scorer: "Scorer",
    out: Path | None,
    progress: Callable[[int, int], None] | None,
    found: dict[int, Score],
) -> dict[int, Score]:
    """Scores by number of the row, those that were `found` before and that `out` had among them."""
    rows_left(scorer, rows, out)  # refuses a file of something else
    done = {} if out is None else rows_done(out)
    left = [row for row in rows if row.number in done or row.number not in found]
    found = found | {number: Score.from_dict(line) for number, line in done.items()}
    for row, score, problem in score_rows(scorer, left, out):
        if score is None:
            raise ValueError(
                f"row {row.number} cannot be scored: {problem}. Leaving out what cannot be scored "
                "would leave it out of the promise: mend or remove it"
            )
        found[row.number] = score
        if progress is not None:
            progress(len(found), len(rows))
    return found


def _calibration(
    found: Sequence[Score],
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
        kind: np.array([score.signals[kind] for score in found]) for kind in found[0].signals
    }
    check_rows(clusters, wrong=wrong, **columns)
    variant = scorer.config.method
    scores = columns[variant]
    chosen = _chosen(signal, columns, variant, wrong, clusters)
    made = Calibration.fitted(
        name,
        scores,
        wrong,
        1.0 - wrong,
        clusters,
        columns["msp"],
        name=name,
        method=found[0].label,
        model=found[0].model,
        labelled_by="their labels",
        settings=_shared_settings(found) | scorer.fingerprints(),
        masking_response=float(np.mean([token.mi for score in found for token in score.tokens])),
    )
    reference_range = {
        "prompt_tokens": sorted(float(score.prompt_tokens or 0) for score in found),
        "score": made.scores,
        "msp": np.sort(columns["msp"]).tolist(),
    }
    return replace(
        with_decision(made, columns, wrong, clusters, risk, confidence, chosen, resamples),
        reference_range=reference_range,
    )


def with_decision(
    calibration: Calibration,
    columns: Mapping[str, np.ndarray],
    wrong: np.ndarray,
    clusters: Sequence[str],
    risk: float,
    confidence: float,
    chosen: str,
    resamples: int = RESAMPLES,
) -> Calibration:
    """The same with a threshold, and with what its signals are worth.

    Args:
        columns: signal -> (n,).
        wrong, clusters: (n,).
        chosen: signal of the threshold.
    """
    decision = Decision(chosen, risk_threshold(columns[chosen], wrong, clusters, risk, confidence))
    named = {SIGNALS[kind]: values for kind, values in columns.items()}
    own = SIGNALS[calibration.config.method]
    try:
        features = [columns[calibration.config.method], *(columns[k] for k in COMBINES)]
        named[COMBINED] = combination(np.log1p(np.column_stack(features)), wrong, clusters)
    except (ValueError, KeyError):
        pass  # too few errors, or right answers, for its folds; or a run that saved too little
    held_out = held_out_probability(columns[calibration.config.method], wrong, clusters)
    diagram, error = None, None
    if held_out is not None:
        found = reliability(held_out[0], wrong, clusters)
        diagram = {
            name: value.tolist() if isinstance(value, np.ndarray) else value
            for name, value in vars(found).items()
        }
        error = debiased_calibration_error(held_out[0], wrong)
    ranked = rank_signals(named, wrong, clusters, resamples=resamples)
    other_thresholds = tuple(
        Decision(kind, risk_threshold(values, wrong, clusters, of, confidence))
        for kind, values in columns.items()
        for of in sorted({*RISKS, risk})
    )
    return replace(
        calibration,
        decision=decision,
        signals=ranked,
        recommendation=recommendation(ranked, named, wrong, clusters, own, resamples=resamples),
        other_thresholds=other_thresholds,
        reliability=diagram,
        calibration_error=error,
    )


def _shared_settings(found: Sequence[Score]) -> dict[str, Any]:
    """Settings in force, those that all scores share; stop strings only texts have."""
    shared = dict(found[0].settings)
    for score in found[1:]:
        shared = {
            name: value
            for name, value in shared.items()
            if score.settings.get(name, math.nan) == value
        }
    return json.loads(json.dumps(shared))


TRIED = 3
"""Answers of a run, or of scored lines, that are scored anew, to see that they are the model's."""
TOLERANCE = 0.02
"""Relative difference of such a score that precision and batches explain."""


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
    """The same from a finished benchmark run, whose quality metric is the label.

    A run does not record its weights. So some of its answers are scored anew: they must get the
    scores they have, and the weights are then those of the scorer.

    Args:
        path: the run's manager file or folder; a pickle, so only one you trust.
        scorer, risk, confidence, signal: as of `calibrate_rows`; the scorer with the settings of
            the run.
        metric: quality metric that is the label, right from 0.5 on; None: AlignScore, or the first
            one the run has.

    Raises:
        FileNotFoundError, ValueError: as `Calibration.from_run`; or the run is of another model or
            other settings.

    Example:
        >>> calibrate_run("RUN", scorer, risk=0.1)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: RUN is of another score: num_masks ...
    """
    from lm_polygraph_asmi.results.run_groups import load_run_groups, of_config

    made = Calibration.from_run(
        path,
        metric,
        **{n: getattr(scorer.config, n) for n in ("method", "depth", "source", "aggregation")},
    )
    (group,) = load_run_groups([path], metric, scorer.config.depth)
    group = of_config(group, made.config)
    prompts, ids = group.saved("input_texts"), group.saved("greedy_tokens")
    if prompts is None or ids is None:
        raise ValueError(
            f"{path} has saved no input_texts and greedy_tokens: no score can be tried"
        )
    scores = group.score(made.method)
    for row in range(min(TRIED, len(group))):
        again = scorer.score(prompts[row], [int(token) for token in ids[row]])
        other = made.other_settings(again.settings | {"model": again.model})
        if other:
            raise ValueError(f"{path} is of another score: {'; '.join(other)}")
        if not _same(again, scores[row]):
            raise ValueError(
                f"row {row} of {path} has the score {scores[row]:.5f}, and {again.score:.5f} when "
                "scored anew: the run is of other weights, or its prompts went through another "
                "template. Give the model as the run had it"
            )
    known = signals_of(group) | {scorer.config.method: scores}
    lengths = group.saved("asmi_prompt_length")
    reference_range = {"score": made.scores}
    if "msp" in known:
        reference_range["msp"] = np.sort(known["msp"]).tolist()
    if lengths is not None:
        reference_range["prompt_tokens"] = sorted(map(float, lengths))
    made = replace(
        made, settings=made.settings | scorer.fingerprints(), reference_range=reference_range
    )
    stops, texts = scorer.stop_conditions.stop_strings, group.saved("greedy_texts")
    tested = np.arange(len(group))
    if texts is not None:
        tested = np.flatnonzero([says_anything(text, stops) for text in texts])
    known = {kind: values[tested] for kind, values in known.items()}
    wrong, clusters = group.wrong[tested], [group.clusters[row] for row in tested]
    chosen = _chosen(signal, known, scorer.config.method, wrong, clusters)
    return with_decision(made, known, wrong, clusters, risk, confidence, chosen, resamples)


def signals_of(group: "RunGroup") -> dict[str, np.ndarray]:
    """(n,) of each signal that a run has saved, by its key in `SIGNALS`; as `Score.signals`."""
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
    """Whether a generated answer holds more than blanks and what ended it, as `Score.answered`."""
    for stop in stops:
        text = text.partition(stop)[0]
    return bool(text.strip())


def _chosen(
    signal: str,
    columns: Mapping[str, np.ndarray],
    variant: str,
    wrong: np.ndarray,
    clusters: Sequence[str],
) -> str:
    """Name of the signal that decides."""
    # The score itself comes first: where nothing can be told, that is what was asked for.
    ordered = {variant: columns[variant], **columns}
    chosen = {"best": best_signal(ordered, wrong, clusters), "score": variant}.get(signal, signal)
    if chosen not in columns:
        raise ValueError(f"these scores have no signal {chosen!r}, but {', '.join(columns)}")
    return chosen
