"""The LM-Polygraph model of a run: stop strings prepared once, nothing a model ships followed."""

from functools import lru_cache
from typing import Any

from lm_polygraph.utils.model import WhiteboxModel
from transformers import PreTrainedTokenizerBase, StoppingCriteriaList, StopStringCriteria

from lm_polygraph_asmi.host.generation import plain_generation


class StopsOnceModel(WhiteboxModel):
    """LM-Polygraph's `WhiteboxModel`, equal in its answers but for what a model ships.

    Of the model's own generation config only the special tokens are kept: LM-Polygraph would let
    its processors, such as `bad_words_ids`, change answers and probabilities.

    For each answer LM-Polygraph builds transformers' `StopStringCriteria`, which reads the whole
    vocabulary: most of a second with 150,000 tokens. Here, one serves all answers with the same
    stop strings and tokenizer.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model.generation_config = plain_generation(self.model.generation_config)

    def generate(self, **args: Any) -> Any:
        """As in LM-Polygraph: arguments of transformers' `generate`."""
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
