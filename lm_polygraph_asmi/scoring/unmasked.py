"""What decisions need of a scorer besides scores: unmasked answers, and its identity."""

import hashlib
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from lm_polygraph_asmi.analysis.features import free_features
from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.inputs import Answer, Prompt, Request, parse_request
from lm_polygraph_asmi.model import scoring_session
from lm_polygraph_asmi.results.cache import model_key, tokenizer_key
from lm_polygraph_asmi.scoring.answer import UnmaskedAnswer
from lm_polygraph_asmi.scoring.own_tokenizer import found_of
from lm_polygraph_asmi.scoring.provenance import HASHES, names_that_count
from lm_polygraph_asmi.scoring.scorer import Scorer
from lm_polygraph_asmi.scoring.signals import unmasked_signals


def read(
    scorer: Scorer,
    prompt: Prompt,
    answer: Answer | None = None,
    states: bool = False,
    **template: Any,
) -> UnmaskedAnswer:
    """An answer under the unmasked model alone, at the cost of one unmasked pass.

    `states`: also `features`, which need hidden states. Others and errors are those of `score`.

    Example:
        >>> read(scorer, prompt, " Edda Holm").answered
        True
    """
    request, engine = parse_request(prompt, answer, **template), scorer._engine
    model = scorer.model
    # One session: the model's state is read once, which takes longer than a short answer's last
    # layer.
    with scoring_session(model):
        given = scorer._given(request)
        stats = engine.read(model, given.prompt_ids, *given.answers)
        settings = engine.settings(model).to_dict()
    ids = stats.pop("tokens").tolist()
    counted = scorer._counted(ids)
    described, _ = scorer._described(given, ids, settings, stats.pop("likeliest"))
    tokens = {name: values[:counted] for name, values in stats.items()}
    hidden, features = tokens.pop("hidden"), {}
    if states:
        features = {
            "free": free_features(**tokens, prompt_tokens=len(given.prompt_ids)),
            "hidden mean": hidden.mean(0),
            "hidden last": hidden[-1],
        }
    signals = unmasked_signals(**tokens)
    return UnmaskedAnswer(
        signals=signals, ids=tuple(ids), counted=counted, features=features, **described
    )


def fingerprints(scorer: Scorer) -> dict[str, str]:
    """Hashes of the current weights; and of tokenizer, chat template and end tokens.

    Reads all weights on first use, and again if they change. Raises ValueError: the model has
    foreign hooks, which cannot be hashed.
    """
    weights = model_key(scorer.model)["revision"]
    if weights is None:
        raise ValueError(
            "the model has forward hooks or a replaced forward method, so a calibration cannot "
            "identify it. Remove them"
        )
    template = str(getattr(scorer.tokenizer, "chat_template", None))
    ends = sorted(scorer._conditions.end_ids)
    described = f"{found_of(tokenizer_key, scorer.tokenizer)} {template} {ends}"
    return {
        "weights": weights[:16],
        "tokenizer": hashlib.sha256(described.encode()).hexdigest()[:16],
    }


def known_fingerprints(scorer: Scorer) -> dict[str, str]:
    """`fingerprints`; empty for a model that cannot be identified."""
    with suppress(ValueError, TypeError):
        return fingerprints(scorer)
    return {}


def other_settings(scorer: Scorer, row: Mapping[str, Any]) -> list[str]:
    """In what the model and settings of a row that `score_file` wrote differ, in words."""
    if scorer._instruct and isinstance(row["prompt"], str):
        return ["the prompt is a text there, a chat here"]
    settings = scorer._engine.settings(scorer.model).to_dict()
    settings |= scorer._score_settings(Request("")) | known_fingerprints(scorer)
    names = ("layer", "attention_in_use", *HASHES)
    here, there = (
        ASMIConfig.key_of(each) | {name: each.get(name) for name in names}
        for each in (settings, row["settings"])
    )
    if names_that_count(there, here):
        here["model"], there["model"] = str(scorer.model.config.name_or_path or ""), row["model"]
    return [
        f"{name} {value!r} there, {here.get(name)!r} here"
        for name, value in there.items()
        if value != here.get(name)
    ]
