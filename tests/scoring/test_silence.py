"""Inputs that could silently give a wrong number: an error, the right number, or a warning."""

from copy import deepcopy

import pytest
import torch
from tokenizers.processors import TemplateProcessing

from lm_polygraph_asmi import score
from lm_polygraph_asmi.scoring.advice import border_warning
from lm_polygraph_asmi.scoring.engine import Engine
from lm_polygraph_asmi.scoring.text import answer_tokens, parse_request
from tests import tiny_lm
from tests.families import tiny_model
from tests.peak_memory import PeakMemory
from tests.scoring.conftest import PROMPT
from tests.scoring.test_text import CHAT, MESSAGES

ANSWERED = [*MESSAGES, {"role": "assistant", "content": " Brask"}]


@pytest.fixture(scope="module")
def chat(tokenizer):
    chat = deepcopy(tokenizer)
    chat.chat_template = CHAT
    return chat


class TestAnotherTokenizer:
    """One that is not the model's gives numbers, and they mean nothing."""

    @pytest.mark.parametrize("vocabulary", [200, 3000])
    def test_by_the_size_of_its_vocabulary(self, tokenizer, vocabulary):
        model = tiny_lm.whitebox(vocab_size=vocabulary).model
        with pytest.raises(ValueError, match=f"it has {len(tokenizer)} tokens, the model"):
            score(model, PROMPT, [7, 8], tokenizer=tokenizer)

    def test_padded_embeddings_and_added_tokens_are_no_matter(self, tokenizer):
        for vocabulary in (len(tokenizer) - 5, len(tokenizer) + 30):
            model = tiny_lm.whitebox(vocab_size=vocabulary).model
            assert not score(model, PROMPT, [7, 8], tokenizer=tokenizer).warnings

    def test_by_the_tokens_that_begin_and_end_a_text(self, tokenizer):
        model = tiny_lm.whitebox().model
        model.config.bos_token_id, model.config.eos_token_id = 70, [71, 72]
        model.generation_config.eos_token_id = 73
        with pytest.raises(ValueError, match=r"\[70, 71, 72, 73\], which .* are ordinary in it"):
            score(model, PROMPT, [7, 8], tokenizer=tokenizer)
        model.generation_config.eos_token_id = tokenizer.eos_token_id  # one that is its own
        assert not score(model, PROMPT, [7, 8], tokenizer=tokenizer).warnings


class TestChats:
    def test_the_last_message_of_the_assistant_is_the_answer(self, model, chat):
        found = score(model, ANSWERED, tokenizer=chat)
        expected = score(model, MESSAGES, " Brask", tokenizer=chat)
        assert float(found) == float(expected)
        assert (found.answer, found.prompt) == (" Brask", MESSAGES)
        (warning,) = found.warnings
        assert warning == "The chat's last message, the assistant's, was scored."
        assert warning in found.explanation

    def test_calls_of_tools_have_no_text(self):
        called = {"role": "assistant", "content": None, "tool_calls": [{"name": "find"}]}
        assert parse_request([*MESSAGES, called, *MESSAGES]).prompt[1] == called

    def test_content_in_parts(self, model, chat):
        parts = [{"type": "text", "text": PROMPT[:7]}, {"type": "text", "text": PROMPT[7:]}]
        messages = [{"role": "user", "content": parts}]
        answered = [*messages, {"role": "assistant", "content": [{"type": "text", "text": " Br"}]}]
        expected = score(model, MESSAGES, " Br", tokenizer=chat)
        assert float(score(model, messages, " Br", tokenizer=chat)) == float(expected)
        assert float(score(model, answered, tokenizer=chat)) == float(expected)


class TestNothing:
    """An answer that is nothing but what ends it."""

    @pytest.mark.parametrize(
        ("answer", "stop"), [([2], None), ("</s>", None), ("\n", "\n"), (" \n", "\n"), ("  ", None)]
    )
    def test_an_empty_answer_is_named(self, model, tokenizer, answer, stop):
        found = score(model, PROMPT, answer, tokenizer=tokenizer, stop=stop)
        assert found.answered is False
        assert found.explanation[2].startswith("The model's answer is empty: the number is the")
        assert found.to_dict()["answered"] is False


class TestBorders:
    """Where prompt and answer meet: another token is another score."""

    @pytest.mark.parametrize(
        ("prompt", "answer", "said"),
        [
            ("3 + 5 =", "8", "without a space, '3 + 5 =8'"),
            ("Who?", "Guests", "without a space, 'Who?Guests'"),
            ("Кто?", "Гости", "without a space, 'Кто?Гости'"),
            ("3 + 5 =", " 8", None),
            ("Who?\n", "Guests", None),
            ("print(", "x", None),
            ("He said “", "yes", None),
            ("谁?", "客人", None),
            ("谁建造了渡轮", "客人", None),
            ("Who", ", then?", None),
            ("The blue kites", "\n", None),
            ("Who is it? ", "Brask", "end the prompt where a word ends"),
        ],
    )
    def test_what_is_said(self, tokenizer, prompt, answer, said):
        before = tokenizer(prompt)["input_ids"]
        found = border_warning(prompt, answer, answer_tokens(tokenizer, prompt, before, answer)[1])
        assert (found is None) == (said is None)
        assert said is None or said in found

    def test_with_the_score(self, model, tokenizer):
        spaced, bare = (score(model, "3 + 5 =", text, tokenizer=tokenizer) for text in (" 8", "8"))
        assert float(spaced) != float(bare)
        assert not spaced.warnings
        (warning,) = bare.warnings
        assert "its token differs" in warning
        assert warning in bare.explanation


class TestWhatIsThereTwice:
    def test_a_first_token_that_the_text_has_already(self, model, tokenizer):
        """As a chat template that was applied by hand has it."""
        (warning,) = score(model, "<s>" + PROMPT, " Brask", tokenizer=tokenizer).warnings
        assert "In the prompt, '<s>' at character 0 became a control token" in warning

    def test_an_answer_that_holds_its_prompt(self, model, tokenizer):
        ids = tokenizer(PROMPT + " Brask")["input_ids"]
        for answer in (ids, torch.tensor(ids), PROMPT + " Brask"):
            found = score(model, PROMPT, answer, tokenizer=tokenizer).warnings
            assert any("The answer repeats the end of the prompt" in w for w in found)
        assert not score(model, "The", " The ferry", tokenizer=tokenizer).warnings

    def test_a_tokenizer_that_ends_the_prompt(self, model, tokenizer):
        ending = deepcopy(tokenizer)
        ending._tokenizer.post_processor = TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
        with pytest.raises(ValueError, match="appends its end token"):
            score(model, PROMPT, " Brask", tokenizer=ending)


def test_an_answer_that_nothing_ended_is_said_to_be_cut_off(model, tokenizer):
    found = score(model, PROMPT, tokenizer=tokenizer, max_new_tokens=3)
    (warning,) = found.warnings
    assert "cut off after 3 tokens without an end: increase max_new_tokens" in warning
    assert warning in found.explanation
    assert "pass a `stop`" in warning
    (warning,) = score(model, PROMPT, tokenizer=tokenizer, max_new_tokens=3, stop="never").warnings
    assert "pass a `stop`" not in warning
    stop = found.tokens[2].text
    assert not score(model, PROMPT, tokenizer=tokenizer, max_new_tokens=3, stop=stop).warnings
    assert not score(
        model, PROMPT, [token.id for token in found.tokens], tokenizer=tokenizer
    ).warnings


class TestMemory:
    def test_a_k_beyond_the_vocabulary(self, model, tokenizer):
        for top_k in (10**9, len(tokenizer) + 1):
            message = f"at most {len(tokenizer)}, the size of the model's vocabulary, got {top_k}"
            with pytest.raises(ValueError, match=message):
                score(model, PROMPT, " Brask", tokenizer=tokenizer, top_k=top_k)
        score(model, PROMPT, " Brask", tokenizer=tokenizer, top_k=len(tokenizer))

    @pytest.mark.parametrize(("top_k", "budget"), [(500, 5e6), (1500, 9e6)])
    def test_the_budget_holds_for_the_reductions(self, top_k, budget):
        """Without it the kernel of 1,500 tokens alone is 36 MB for each position."""
        model = tiny_model("llama", vocab_size=1500)
        prompt, response = torch.arange(3, 15), list(range(20, 30))
        settings = {"num_masks": 8, "mask_rate": 0.3, "top_k": top_k}
        loose = Engine(**settings, memory_budget=2**40)
        tight = Engine(**settings, memory_budget=int(budget))
        for engine in (loose, tight):
            engine.score(model, prompt, response[:1])  # the check of the model's layers
        with PeakMemory() as prefix_cache:
            (found,) = tight.score(model, prompt, response)
        assert prefix_cache.peak < budget
        if top_k == 500:
            (expected,) = loose.score(model, prompt, response)
            for name in ("mi", "agreement", "entropy"):
                assert getattr(found, name) == pytest.approx(getattr(expected, name), abs=1e-6)
