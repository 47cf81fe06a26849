"""How an answer passed as text may end."""

from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lm_polygraph_asmi.host.stopping import StopConditions
from lm_polygraph_asmi.scoring.text import Prompt, answer_tokens, decoded


def with_ends(
    tokenizer: PreTrainedTokenizerBase,
    conditions: StopConditions,
    prompt: Prompt,
    prompt_ids: Int[Tensor, " P"],
    text: str,
) -> tuple[list[int], list[list[int]]]:
    """Token ids of an answer, and of each end that generation may give it: end tokens and stop
    strings, of which `Engine.score` takes the most probable; none if the text has one."""
    ids = answer_tokens(tokenizer, prompt, text)
    if not ids or conditions.closes(ids):
        return ids, []
    ends, before = [[token] for token in sorted(conditions.end_ids)], prompt_ids.tolist()
    for stop in conditions.stop_strings:
        whole = answer_tokens(tokenizer, prompt, text + stop)
        end = whole[len(ids) :]
        if whole[: len(ids)] != ids:  # the stop string merges with the text
            end = tokenizer(stop, add_special_tokens=False)["input_ids"]
        if end not in ends and decoded(tokenizer, before, [*ids, *end]).endswith(stop):
            ends.append(end)
    return ids, ends
