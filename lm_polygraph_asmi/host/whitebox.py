"""The LM-Polygraph model of a run: stop strings prepared once, nothing a model ships followed."""

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
        self._criteria: dict[
            tuple[str, ...], tuple[PreTrainedTokenizerBase, StopStringCriteria]
        ] = {}

    def generate(self, **args: Any) -> Any:
        """As in LM-Polygraph: arguments of transformers' `generate`."""
        stops = args.pop("stop_strings", getattr(self.generation_parameters, "stop_strings", None))
        if stops:
            passed = args.get("stopping_criteria") or ()
            args["stopping_criteria"] = StoppingCriteriaList([*passed, self._criterion(stops)])
        return super().generate(**args, stop_strings=None)

    def _criterion(self, stops: Any) -> StopStringCriteria:
        strings = (stops,) if isinstance(stops, str) else tuple(stops)
        tokenizer, criterion = self._criteria.get(strings, (None, None))
        if tokenizer is not self.tokenizer or criterion is None:
            criterion = StopStringCriteria(self.tokenizer, list(strings))
            self._criteria[strings] = self.tokenizer, criterion
        return criterion
