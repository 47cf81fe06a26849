"""What a chat template makes of messages: text left out, the clock, and its last words."""

from copy import deepcopy

import pytest

from lm_polygraph_asmi.scoring.scorer import Scorer
from lm_polygraph_asmi.scoring.unmasked import read
from tests.scoring.conftest import PROMPT

pytestmark = pytest.mark.usefixtures("unseen")

TURN = "<{{ m['role'] }}> {{ m['content'] }}\n"
ALL = "{% for m in messages %}" + TURN + "{% endfor %}"
CALLS = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] or '' }}"
    "{% for call in m['tool_calls'] or [] %}{{ call['function'] | tojson }}{% endfor %}"
    "{% endfor %}"
)
END = "{% if add_generation_prompt %}<assistant>{% endif %}"
CHAT = [
    {"role": "system", "content": "The ferry sailed\nfrom Brask."},
    {"role": "user", "content": "  Who built it? "},
    {"role": "assistant", "content": "Who?"},
    {"role": "tool", "content": '{"built": "in 1931"}'},
    {"role": "user", "content": PROMPT},
]
CALL = {
    "type": "function",
    "id": "c-77",
    "function": {"name": "sail", "arguments": {"to": "Brask"}},
}
CALLED = [
    CHAT[0],
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "user", "content": PROMPT},
]
IN_JSON = [
    CALLED[0],
    {"role": "assistant", "content": None, "tool_calls": [
        CALL | {"function": {"name": "sail", "arguments": '{"to":  "Brask\\n"}'}}]},
    CALLED[2],
]  # fmt: skip


@pytest.fixture
def scorer_of(model, tokenizer):
    """A scorer whose tokenizer has this template."""

    def with_template(template, model=model, **settings):
        chat = deepcopy(tokenizer)
        chat.chat_template = template
        return Scorer(model, tokenizer=chat, num_masks=2, scope="response", **settings)

    return with_template


def about_template(result):
    return [warning for warning in result.warnings if "template" in warning]


@pytest.mark.parametrize(
    ("template", "chat"),
    [
        (ALL, CHAT),
        (ALL.replace("m['content']", "m['content'] | trim"), CHAT),
        (ALL.replace("m['content']", "m['content'] | tojson"), CHAT),
        (ALL.replace("m['content']", "m['content'].split() | join(' ')"), CHAT),
        (CALLS, CALLED),
        (CALLS, IN_JSON),
        (ALL, [{"role": "user", "content": [{"type": "text", "text": "Who "}, "built it?"]}]),
        (ALL, [{"role": "user", "content": "Who <s>built</s> it?"}]),
    ],
)
def test_a_template_that_says_all_gives_no_warning(scorer_of, template, chat):
    scorer = scorer_of(template + END)
    found = [text for text in scorer.score(chat, " Brask").warnings if "leaves out" in text]
    assert found == []


@pytest.mark.parametrize(
    ("template", "chat", "missing"),
    [
        (ALL.replace("messages", "messages if m['role'] != 'system'"), CHAT,
         ["content of message 1 (system)"]),
        (ALL.replace("messages", "messages if m['role'] != 'tool'"), CHAT,
         ["content of message 4 (tool)"]),
        (ALL.replace("messages", "messages[-1:]"), CHAT,
         [f"content of message {number}" for number in (1, 2, 3, 4)]),
        (ALL.replace("m['content']", "m['content'][:10]"), CHAT,
         [f"content of message {number}" for number in (1, 2, 4, 5)]),
        (ALL.replace("m['content']", "m['content'].split('and')[-1]"),
         [{"role": "user", "content": f"The kites and {PROMPT}"}], ["content of message 1 (user)"]),
        # The same text elsewhere does not hide a message that is left out.
        (ALL.replace("messages", "messages[1:]"),
         [{"role": "user", "content": "Who?"}, *CHAT[2:]], ["content of message 1 (user)"]),
        (ALL.replace("m['content']", "m['content'] or ''"), CALLED,
         ["tool_calls[0].function.name of message 2", "tool_calls[0].function.arguments.to of"]),
        (ALL, [CHAT[1], {"role": "assistant", "content": "Edda", "reasoning_content": "Brask so"},
               CHAT[4]], ["reasoning_content of message 2 (assistant)"]),
        (ALL.replace("m['content']", "m['content'].upper()"), CHAT[4:],
         ["content of message 1 (user)"]),
    ],
)  # fmt: skip
def test_text_that_a_template_leaves_out_is_named(scorer_of, template, chat, missing):
    result = scorer_of(template + END).score(chat, " Brask")
    found = [text for text in result.warnings if "leaves out" in text]
    assert len(found) == 1
    for name in missing:
        assert name in found[0]
    assert found[0].count(" of message ") == len(missing)


@pytest.mark.parametrize(
    "clock",
    [
        "{{ strftime_now('%d %b %Y') }}",
        "{%- if not date is defined %}{% set date = strftime_now('%d') %}{% endif %}{{ date }}",
        "{% set clock = strftime_now %}{{ clock('%Y') }}",
        "{% if now is defined %}{{ now() }}{% endif %}",
        "{% if datetime is defined %}{{ datetime.now() }}{% endif %}",
    ],
)
def test_a_template_that_reads_the_clock_is_named(scorer_of, clock):
    scorer = scorer_of(clock + ALL + END)
    (found,) = about_template(scorer.score(CHAT[-1:], " Brask"))
    assert "The chat template reads the clock" in found
    assert about_template(read(scorer, CHAT[-1:], " Brask")) == [found]
    assert about_template(scorer.score(PROMPT, " Brask")) == []


@pytest.mark.parametrize(
    "said",
    [
        "Say strftime_now or datetime. ",
        "{# strftime_now() #}",
        "{{ 'now() datetime' }}",
        "{% set today = '26 Jul 2024' %}{{ today }}",
    ],
)
def test_words_of_a_template_are_no_clock(scorer_of, said):
    assert about_template(scorer_of(said + ALL + END).score(CHAT[-1:], " Brask")) == []


THINK = ALL + "{% if add_generation_prompt %}<assistant>\n<think>\n{% endif %}"


@pytest.mark.parametrize(
    ("template", "prompt", "answer", "repeated"),
    [
        (THINK, CHAT[-1:], "<think>\nThe ferry</think> Brask", "<think>"),
        (THINK, CHAT[-1:], "\n<think> Brask", "<think>"),
        (THINK, CHAT[-1:], "<assistant>\n<think>\n Brask", "<assistant>\n<think>"),
        (ALL + "{% if add_generation_prompt %}<s>assistant\n{% endif %}", CHAT[-1:],
         "assistant\nBrask", "assistant"),
        ("", "Question: Who built it? Answer:", "Answer: Brask", "Answer:"),
        ("", "Who built it?\n### Response", "### Response\nBrask", "### Response"),
        ("", "Who built it?\nA:", " A: Brask", "A:"),
        (THINK, CHAT[-1:], "The ferry <think>", None),
        (THINK, CHAT[-1:], "think about it", None),
        ("", "The blue kites of Brask", " Brask", None),
        ("", "1, 2, 2,", " 2, 3", None),
        ("", "Who built it? Answer:", ": Brask", None),
    ],
)  # fmt: skip
def test_an_answer_that_repeats_the_end_of_the_prompt_is_named(
    scorer_of, template, prompt, answer, repeated
):
    scorer = scorer_of(template)
    ids = scorer.tokenizer(answer, add_special_tokens=False)["input_ids"]
    for given in (answer, ids):
        found = [text for text in scorer.score(prompt, given).warnings if "repeats" in text]
        expected = f"The answer repeats the end of the prompt, {repeated!r}: "
        assert [text[: len(expected)] for text in found] == [expected] * (repeated is not None)


def test_the_models_own_answer_repeats_what_it_likes(scorer_of):
    warnings = scorer_of(THINK).score(CHAT[-1:]).warnings
    assert not [text for text in warnings if "repeats" in text]
