"""The LM-Polygraph model of a run: prepares stop strings once, and ignores shipped settings."""

from functools import lru_cache
from typing import Any

from lm_polygraph.utils.model import WhiteboxModel
from transformers import PreTrainedTokenizerBase, StoppingCriteriaList, StopStringCriteria

from lm_polygraph_asmi.host.generation import plain_generation


class StopsOnceModel(WhiteboxModel):
    """LM-Polygraph's `WhiteboxModel` with two changes.

    Of the model's own generation config, only the special tokens are kept. Otherwise LM-Polygraph
    would let settings such as `bad_words_ids` change answers and probabilities.

    The criterion for stop strings is built once for each tokenizer and set of stop strings.
    LM-Polygraph builds transformers' `StopStringCriteria` for each answer, which reads the whole
    vocabulary: with 150,000 tokens this takes most of a second. Answers are the same.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model.generation_config = plain_generation(self.model.generation_config)

    def generate(self, **args: Any) -> Any:
        """Generate as LM-Polygraph does. Arguments are those of transformers' `generate`."""
        stops = args.pop("stop_strings", getattr(self.generation_parameters, "stop_strings", None))
        if stops:
            strings = (stops,) if isinstance(stops, str) else tuple(stops)
            passed = args.get("stopping_criteria") or ()
            criterion = _criterion(self.tokenizer, strings)
            args["stopping_criteria"] = StoppingCriteriaList([*passed, criterion])
        return super().generate(**args, stop_strings=None)


@lru_cache(maxsize=4)
def _criterion(tokenizer: PreTrainedTokenizerBase, strings: tuple[str, ...]) -> StopStringCriteria:
    return StopStringCriteria(tokenizer, list(strings))
