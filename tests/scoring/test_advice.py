"""Warnings about a prompt and its answer: what would silently give another number is named."""

import pytest

from lm_polygraph_asmi import Scorer
from lm_polygraph_asmi.host.prompts import rendered
from lm_polygraph_asmi.inputs import parse_request
from lm_polygraph_asmi.scoring import advice
from lm_polygraph_asmi.scoring.text import answer_tokens, prompt_tokens
from tests.hostile import user
from tests.scoring.conftest import PROMPT, templated

pytestmark = pytest.mark.usefixtures("unseen")

ALL = "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }}\n{% endfor %}"
CALLS = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] or '' }}"
    "{% for call in m['tool_calls'] or [] %}{{ call['function'] | tojson }}{% endfor %}"
    "{% endfor %}"
)
THINK = ALL + "{% if add_generation_prompt %}<assistant>\n<think>\n{% endif %}"
CHAT = [
    {"role": "system", "content": "The ferry sailed\nfrom Brask."},
    {"role": "user", "content": "  Who built it? "},
    {"role": "assistant", "content": "Who?"},
    {"role": "tool", "content": '{"built": "in 1931"}'},
    {"role": "user", "content": PROMPT},
]


def changed(content):
    return ALL.replace("m['content']", content)


def called(arguments):
    sail = {"type": "function", "id": "c-77", "function": {"name": "sail", "arguments": arguments}}
    return [CHAT[0], {"role": "assistant", "content": None, "tool_calls": [sail]}, CHAT[-1]]


SAYS_ALL = [
    (ALL, CHAT),
    (changed("m['content'] | trim"), CHAT),
    (changed("m['content'] | tojson"), CHAT),
    (CALLS, called({"to": "Brask"})),
    (CALLS, called('{"to":  "Brask\\n"}')),
    (ALL, [user("Who <s>built</s> it?")]),
    (ALL, [user("Who?"), CHAT[2], user("Who?")]),  # the same text twice
]
LEAVES_OUT = [
    (ALL.replace("messages", "messages[-1:]"), CHAT,
     [f"content of message {number}" for number in (1, 2, 3, 4)]),
    (changed("m['content'][:10]"), CHAT,
     [f"content of message {number}" for number in (1, 2, 4, 5)]),
    ("{# nothing #}", [*CHAT, *CHAT[:-1]],
     [*(f"content of message {number}" for number in range(1, 6)), "and 4 more:"]),
    # The same text elsewhere does not hide a message that is left out.
    (ALL.replace("messages", "messages[1:]"), [user("Who?"), *CHAT[2:]],
     ["content of message 1 (user)"]),
    (changed("m['content'] or ''"), called({"to": "Brask"}),
     ["tool_calls[0].function.name of message 2", "tool_calls[0].function.arguments.to of"]),
    (ALL, [CHAT[1], CHAT[2] | {"reasoning_content": "Brask so"}, CHAT[4]],
     ["reasoning_content of message 2 (assistant)"]),
]  # fmt: skip


def warned(tokenizer, template, chat):
    """The warnings about a template, each by its kind."""
    tokenizer, request = templated(tokenizer, template), parse_request(chat)
    written = rendered(tokenizer, request.prompt)
    kinds = ("leaves out", "clock", "random", "add_generation_prompt", "in quotes")
    return {
        next(kind for kind in kinds if kind in said): said
        for said in advice.template_warnings(tokenizer, request, written)
    }


@pytest.mark.parametrize(
    ("template", "chat", "missing"), [*((*case, []) for case in SAYS_ALL), *LEAVES_OUT]
)
def test_text_that_a_template_leaves_out_is_named(tokenizer, template, chat, missing):
    said = warned(tokenizer, template, chat).get("leaves out", "")
    assert [name for name in missing if name not in said] == []
    assert said.count(" of message ") + said.count(" more:") == len(missing)


HEADS = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
AS_TEXT = CALLS.replace("call['function'] | tojson", "call.function.arguments")
WARNED = {
    "clock": [
        ("{{ strftime_now('%d %b %Y') }}", "'strftime_now'"),
        ("{%- if not date is defined %}{% set date = strftime_now('%d') %}{% endif %}", "now"),
        ("{% set clock = strftime_now %}{{ clock('%Y') }}", "now"),
        ("{% if datetime is defined %}{{ datetime.now() }}{% endif %}", "'datetime'"),
        ("{{ ['Hello.'] | random }}", "'random'"),
        ("Say strftime_now or datetime. ", None),
        ("{# strftime_now() #}{{ 'now() datetime' }}", None),
        ("{% set today = '26 Jul 2024' %}{{ today }}", None),
        ("{{ 'random' }}{# | random #} at random", None),
    ],
    "add_generation_prompt": [
        (ALL, "'<assistant>'"),
        (HEADS, "'assistant:'"),
        ("<s>" + HEADS + "{% if false and add_generation_prompt %}assistant:{% endif %}", "assist"),
        (HEADS + "{% if add_generation_prompt %}assistant: {% endif %}", None),
        (THINK, None),
        (HEADS.replace("{{ m['role'] }}: ", ""), None),  # nothing begins an answer
        (HEADS.replace("{{ m['role'] }}:", "{% if m.role == 'user' %}Q:{% endif %}"), None),
        ("{% if messages[-1].role == 'assistant' %}{{ raise_exception('no') }}{% endif %}", None),
    ],
}
IN_QUOTES = [
    ('{"to": "Brask"}', CALLS, "tool_calls[0].function.arguments of message 2"),
    ('{"to":  "Brask\\n"}', CALLS, "tool_calls[0].function.arguments of message 2"),
    ({"to": "Brask"}, CALLS, None),
    ('{"to": "Brask"}', AS_TEXT, None),
    ("Brask", CALLS, None),  # without quotes of its own
    ('{"to": "Brask"}', ALL, None),  # left out, which is said
]


@pytest.mark.parametrize(
    ("chat", "kind", "template", "word"),
    [
        *((CHAT[-1:], kind, *case) for kind, cases in WARNED.items() for case in cases),
        *((called(arguments), "in quotes", *case) for arguments, *case in IN_QUOTES),
    ],
)
def test_what_a_template_makes_of_messages(tokenizer, chat, kind, template, word):
    said = warned(tokenizer, template, chat).get(kind)
    assert (said is None) == (word is None)
    assert said is None or word in said


LONG = "The ferry Ondine was built in Brask by Edda Holm. Who built it?"


@pytest.mark.parametrize(
    ("template", "prompt", "answer", "part"),
    [
        (THINK, CHAT[-1:], "\n<think> Brask", "<think>"),
        (THINK, CHAT[-1:], "<assistant>\n<think>\n Brask", "<assistant>\n<think>"),
        (ALL + "<s>assistant\n", CHAT[-1:], "assistant\nBrask", "assistant"),
        ("", "Question: Who built it? Answer:", "Answer: Brask", "Answer:"),
        ("", "Who built it?\nA:", " A: Brask", "A:"),
        ("", PROMPT, PROMPT + " Brask", PROMPT),
        ("", LONG, f"You ask: {LONG} Edda", "contains the end of the prompt"),
        (THINK, CHAT[-1:], "The ferry <think>", None),
        ("", "The blue kites of Brask", " Brask", None),
        ("", "The", " The ferry", None),
    ],
)
def test_an_answer_that_repeats_the_end_of_the_prompt(tokenizer, template, prompt, answer, part):
    tokenizer = templated(tokenizer, template)
    before = prompt_tokens(tokenizer, prompt).tolist()
    found = list(advice.repeated_prompt(tokenizer, before, answer))
    assert [repr(part)[1:-1] in one for one in found] == [True] * (part is not None)


@pytest.mark.parametrize(
    ("prompt", "answer", "said"),
    [
        ("3 + 5 =", "8", "without a space, '3 + 5 =8'"),
        ("Who?", "Guests", "without a space, 'Who?Guests'"),
        ("3 + 5 =", " 8", None),
        ("Who?\n", "Guests", None),
        ("谁?", "客人", None),
        *((f"Who? {mark}", "Guests", None) for mark in "([{<'\"`/-_@#$€«„"),
        ("Who", ", then?", None),
        ("Who is it? ", "Brask", "End the prompt where a word ends"),
    ],
)
def test_the_border_of_prompt_and_answer(tokenizer, prompt, answer, said):
    follows = answer_tokens(tokenizer, prompt, tokenizer(prompt)["input_ids"], answer)[1]
    found = list(advice.border_warnings(prompt, answer, follows))
    assert [str(said) in one for one in found] == [True] * (said is not None)


def test_a_score_carries_them(model, tokenizer):
    """Those of a template, and of an answer that was given; a template says nothing of a text."""
    template = "{{ strftime_now('%d') }}" + THINK.replace("messages", "messages[1:]")
    scorer = Scorer(model, tokenizer=templated(tokenizer, template), num_masks=2, max_new_tokens=3)
    chat, answer = [CHAT[0], CHAT[-1]], "<think>\n Brask"
    ids = tokenizer(answer, add_special_tokens=False)["input_ids"]
    of_template = ["the clock or chance", "leaves out or changes the content of message 1"]
    for prompt, given, expected in (
        (chat, answer, [*of_template, "repeats"]),
        (chat, ids, [*of_template, "repeats"]),
        (chat, None, [*of_template, "cut off"]),
        ("3 + 5 =", " 8", []),
        ("3 + 5 =", "8", ["gives other tokens"]),
        ("Where do the blue ki", "tes start?", ["would merge the end of the prompt"]),
    ):
        found = scorer.score(prompt, given)
        assert all(word in said for word, said in zip(expected, found.warnings, strict=True))
        assert set(found.warnings) <= set(found.explanation)
        assert given is None or scorer.read(prompt, given).warnings == found.warnings


@pytest.mark.parametrize(
    ("template", "word"),
    [(ALL + 3 * "{{ range(99999) | random }} ", "random"),
     *((broken, "does not support") for broken in ("{{ 1 + 'a' }}", "{% for", "{{ 1 / 0 }}"))],
)  # fmt: skip
def test_a_template_of_chance_or_that_fails_is_refused(tokenizer, template, word):
    """But not for a prompt that is a text."""
    with pytest.raises(ValueError, match=word):
        warned(tokenizer, template, CHAT[-1:])
    assert warned(tokenizer, template, PROMPT) == {}
