"""Where the context of a prompt is: by regular expression, and in tokens."""

import pytest
from hydra import compose, initialize

from lm_polygraph_asmi.host.context import (
    context_span,
    matched,
    place_of,
    token_spans,
    unmatched,
)
from lm_polygraph_asmi.runs.squad import prompt_of
from tests.benchmarks import STORIES, babi_prompt, coqa_prompt
from tests.runs.test_squad import QUESTION
from tests.tiny_lm import tokenizer, whitebox

PASSAGE = "Edda Holm built a ferry.\nPassage: none. Question: none.\n\nIt was red."
MOVES = "Mary went to the garden. John moved to the office."
PROMPTS = {
    ("asmi_coqa", "data.source=x"): (
        coqa_prompt(STORIES[0], [("Where?", "by the river")], "What was red?"), STORIES[0],
    ),
    ("asmi_squad", "data.source=x"): (
        prompt_of("paper", False)(QUESTION._replace(passage=PASSAGE)), PASSAGE,
    ),
    ("asmi_squad", "data.source=x", "data.prompt_style=demo"): (
        prompt_of("demo", False)(QUESTION._replace(passage=PASSAGE)), PASSAGE,
    ),
    ("asmi_demo",): (prompt_of("demo", False)(QUESTION._replace(passage=PASSAGE)), PASSAGE),
    ("asmi_coqa", "benchmark=asmi_babiqa"): (babi_prompt(MOVES, "Where is Mary?"), MOVES),
}  # fmt: skip


def regex_of(name, *overrides):
    with initialize(version_base=None, config_path=None):
        config = compose(name, overrides=list(overrides))
    assert config.asmi.context_regex == config.data.context_regex
    return config.data.context_regex


@pytest.mark.parametrize("config", PROMPTS, ids=lambda config: config[-1])
def test_shipped_configs_find_the_context(config):
    """The last passage, not that of a worked example, line breaks and all."""
    prompt, context = PROMPTS[config]
    start, end = matched(regex_of(*config), prompt)
    assert prompt[start:end] == context
    # The story of CoQA ends where the first question begins; the others stand last.
    assert prompt.count(context) == 1


def test_prompts_without_a_context_are_named():
    regex = regex_of("asmi_demo")
    closed = prompt_of("demo", True)(QUESTION)
    rows = [("7", PROMPTS["asmi_demo",][0]), ("8", closed), ("9", "")]
    assert unmatched(regex, rows) == ["8", "9"]
    assert matched("Passage:(.*)Q", "Passage:Q") is None  # nothing there to come from


@pytest.mark.parametrize(
    ("regex", "message"), [("Passage: .*", "has no group"), ("(", "is not a valid Python regular")]
)
def test_expressions_that_are_none(regex, message):
    with pytest.raises(ValueError, match=message):
        matched(regex, "Passage: a")


def text_of(ids):
    return tokenizer().decode(ids)


def test_tokens_that_overlap_the_place():
    text = "The ferry Ondine was built in Brask. Who built it?"
    ids = tokenizer()(text)["input_ids"]
    place = text.index("Ondine"), text.index(" Who")
    ((start, end),) = token_spans(tokenizer(), text, ids, [place])
    assert text_of(ids[start:end]) == " Ondine was built in Brask."
    # From within a word to within another: both words' tokens, whole.
    inside = place[0] + 1, text.index("Brask") + 1
    assert token_spans(tokenizer(), text, ids, [inside]) == [(start, end - 1)]
    whole = token_spans(tokenizer(), text, ids, [(0, len(text))])
    assert whole == [(1, len(ids))]  # all but BOS


def test_tokens_that_are_not_known():
    text = "The ferry"
    ids = tokenizer()(text)["input_ids"]
    with pytest.raises(ValueError, match="other ids than the prompt"):
        token_spans(tokenizer(), text, [*ids, 5], [(0, 3)])
    with pytest.raises(ValueError, match="no token covers"):
        token_spans(tokenizer(), text, ids, [(3, 3)])


def test_a_part_must_stand_once():
    assert place_of("a b c", "b") == 2
    for part, where in (("d", "nowhere"), ("", "nowhere"), (" ", "in several places")):
        with pytest.raises(ValueError, match=f"found it {where}"):
            place_of("a b c", part)


def test_questions_put_as_chats():
    model = whitebox()
    model.instruct = True
    chat = model.tokenizer.__class__(
        tokenizer_object=model.tokenizer.backend_tokenizer, pad_token="<pad>"
    )
    chat.chat_template = (
        "{% for m in messages %}Question: {{ m.content | trim }}\n{% endfor %}Answer:"
    )
    model.tokenizer = chat
    prompt = "  The ferry was built in Brask. Who built it? "
    ids = model.tokenize([prompt])["input_ids"][0].tolist()
    start, end = context_span(model, prompt, ids, r"(The ferry .*) Who")
    assert chat.decode(ids[start:end]) == " The ferry was built in Brask."
    with pytest.raises(ValueError, match="finds no context in the prompt"):
        context_span(model, "Who built it?", ids, r"(The ferry .*) Who")
