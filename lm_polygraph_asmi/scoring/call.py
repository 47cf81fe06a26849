"""`score` and `stream`: one call for one answer."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lm_polygraph_asmi.config import STREAMED, ASMIConfig, check_streamed
from lm_polygraph_asmi.scoring.calibration import Given
from lm_polygraph_asmi.scoring.result import Score
from lm_polygraph_asmi.scoring.scorer import Scorer
from lm_polygraph_asmi.scoring.streaming import Stream
from lm_polygraph_asmi.scoring.text import Answer, Prompt, parse_request

if TYPE_CHECKING:
    from lm_polygraph.utils.model import Model


def score(
    model: "PreTrainedModel | Model | str | Path",
    prompt: Prompt,
    answer: Answer | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    config: ASMIConfig | None = None,
    samples: Sequence[Answer] | None = None,
    context: Any = None,
    calibration: Given = None,
    **settings: Any,
) -> Score:
    """How fragile an answer is: score, tokens, and what the score means.

    Without `answer` the model's greedy answer is scored. The scores are those of a benchmark run on
    the same token ids with the same settings. Many rows: `Scorer.score_many`, `score_batch`.

    Args:
        model: a decoder-only transformers model; or LM-Polygraph's `WhiteboxModel`; or the name of
            a model: a folder, one of a hub's, or "smollm2". It is left as it was found.
        prompt: a text; or chat messages (a list of dictionaries), which go through the tokenizer's
            chat template. The last message of a chat, if it is the assistant's, is the answer.
        answer: text as it follows the prompt, its leading space included, or token ids. Text is
            closed as the model would have: with the first stop string, else what ends a turn of the
            chat template, else the end token. Token ids are scored as they are.
        tokenizer: of a transformers model, its own. LM-Polygraph's models and names bring theirs.
        config: settings; None: those of the calibration run, or the defaults.
        samples: for the method "adapt", sampled answers (texts or token ids) in place of drawing
            `num_samples` at temperature 0.5, which follow from prompt and `seed`.
        context: what in the prompt the answer should come from: a passage or a list of them; the
            result then says which of them the answer hangs on (`Score.sources`). A passage is a
            text that stands in the prompt once, or its characters (start, end); in a chat also the
            number of a message, or (message, part).
        calibration: what gives the number a meaning: a `Calibration`, a saved one, or a finished
            run (manager file or folder); or labelled rows, which give one to the numbers of `spans`
            (`Calibration.from_spans`); or a list of one and the other. Settings that are not given
            are the calibration run's.
        **settings: of `ASMIConfig`, in place of those of the config.

    Returns:
        A `Score`.

    Raises:
        OSError: no model of that name.
        TypeError: a model whose heads cannot be masked, or a quantised output projection; a
            setting there is not.
        ValueError: an empty prompt or answer, one beyond the context window, settings out of range,
            or other ones than the calibration run's; a tokenizer that is not the model's.

    Example:
        >>> prompt = "The ferry was built by Edda Holm. Question: Who built it? Answer:"
        >>> result = score("smollm2", prompt, " Edda Holm")
        >>> 0 <= result.score <= result.highest  # nats, of 0 to ln S
        True
        >>> "".join(token.text for token in result.tokens).startswith(" Edda Holm")
        True
        >>> result.calibration is None, result.verdict[1][:11]  # the number has no scale of its own
        (True, 'No verdict:')
    """
    parse_request(prompt, answer)  # what is wrong is told before a model is loaded
    scorer = Scorer(model, config, tokenizer=tokenizer, calibration=calibration, **settings)
    return scorer.score(prompt, answer, samples, context)


def stream(
    model: "PreTrainedModel | Model | str | Path",
    prompt: Prompt,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    config: ASMIConfig | None = None,
    calibration: Given = None,
    **settings: Any,
) -> Stream:
    """Score the model's own answer while it is written: its tokens, one after the other.

        for token in stream(model, prompt, tokenizer=tokenizer):
            print(token.text, token.u, token.alternative)

    At each step the masked subnetworks go on by one position behind the prompt that they share:
    the scope "response". An answer that is not there yet cannot choose its masks, so they follow
    from the prompt: the tokens are those of `score(model, prompt, scope="response",
    seeded_by="prompt", **settings)`.

    Args:
        model, prompt, tokenizer, config, calibration: as for `score`.
        **settings: as for `score`. `scope` and `seeded_by` are settled, and there is no `source`,
            since parts of heads need the finished answer.

    Returns:
        A `Stream` of `Token`; its `result` is the `Score` of what has been written.

    Raises:
        RuntimeError: the model cannot be scored step by step.
        TypeError, ValueError, OSError: as `score`.

    Example:
        >>> tokens = stream("smollm2", "The ferry was built by Edda Holm. Who?", max_new_tokens=3)
        >>> for token in tokens:
        ...     assert token.u >= 0  # nats
        >>> tokens.result.settings["seeded_by"]
        'prompt'
    """
    check_streamed(({} if config is None else config.to_dict()) | settings)
    settings |= STREAMED
    parse_request(prompt)  # what is wrong is told before a model is loaded
    scorer = Scorer(model, config, tokenizer=tokenizer, calibration=calibration, **settings)
    return scorer.stream(prompt)
