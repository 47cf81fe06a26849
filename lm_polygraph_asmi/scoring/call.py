"""`score`: one call for one answer."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.scoring.result import Score
from lm_polygraph_asmi.scoring.scorer import Scorer
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
    **settings: Any,
) -> Score:
    """Score how fragile an answer is under random attention-head masking.

    If `answer` is omitted, the model's greedy answer is scored. A benchmark run with the same
    token ids and settings gives the same scores. Many rows: `Scorer.score_many`, `score_batch`.

    Args:
        model: decoder-only transformers model, LM-Polygraph `WhiteboxModel`, or a local path, hub
            ID or "smollm2" (loaded on CPU). Its state is restored.
        prompt: a text, or chat messages (list of dictionaries), to which the tokenizer's chat
            template is applied. If the last message is the assistant's, it is the answer.
        answer: text with its leading space, or token ids. To text, an end is added: of the end
            tokens and stop strings, the most probable by its first token (`Score.ending`). Token
            ids are scored unchanged.
        tokenizer: required with a transformers model; not allowed with a name.
        config: settings; None: the defaults.
        samples: method "adapt" only: sampled answers (texts or token ids). None: `num_samples` are
            sampled at temperature 0.5; they depend only on prompt and `seed`.
        **settings: of `ASMIConfig`; they override `config`. Also `dtype`, `device_map` and
            `gguf_file` of a model passed by name, and `result_cache`, as for `Scorer`.

    Returns:
        A `Score`: nats, 0 to ln S, higher = more fragile.

    Raises:
        OSError: no model of that name.
        TypeError: heads of the model cannot be masked, or a setting is unknown.
        ValueError: empty prompt or answer, text longer than the context window, settings out of
            range, or another model's tokenizer.

    Source: the paper's Sem-ASMI by default; `method` selects ASMI or Adapt-ASMI.

    Example:
        >>> prompt = "The ferry was built by Edda Holm. Question: Who built it? Answer:"
        >>> result = score("smollm2", prompt, " Edda Holm")
        >>> 0 <= result.score <= result.highest  # nats, 0 to ln S
        True
        >>> "".join(token.text for token in result.tokens).startswith(" Edda Holm")
        True
    """
    request = parse_request(prompt, answer, samples)  # errors are raised before a model is loaded
    scorer = Scorer(model, config, tokenizer=tokenizer, **settings)
    return scorer.score_request(request)
