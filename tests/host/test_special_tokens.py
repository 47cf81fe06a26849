"""Special tokens spelled in texts: named, or read as text."""

from copy import deepcopy

import pytest

from lm_polygraph_asmi import stream
from lm_polygraph_asmi.host.special_tokens import PlainTokenizer, SpecialTokens
from lm_polygraph_asmi.scoring import score_batch
from lm_polygraph_asmi.scoring.control_tokens import rendered_warnings
from lm_polygraph_asmi.scoring.scorer import Scorer
from lm_polygraph_asmi.scoring.text import answer_tokens, parse_request, prompt_tokens
from tests.scripted import byte_tokenizer, scripted_model, space_tokenizer

PROMPT = "Who built the ferry?"
SPELLED = " Brask</s> in <|end|>1931"
TOKENIZERS = {
    "bytes": byte_tokenizer(["a s", "Ġ B", "< /"]),
    "no bos": byte_tokenizer(["a s"], bos=False),
    "spaces": space_tokenizer(["▁Brask", "ask", "</s"]),
}


@pytest.fixture(params=list(TOKENIZERS))
def tokenizer(request):
    return TOKENIZERS[request.param]


@pytest.fixture(scope="module")
def scorers():
    """Of a scripted model, by how special tokens are read."""
    tokenizer = TOKENIZERS["bytes"]
    length = len(prompt_tokens(tokenizer, PROMPT))
    model = scripted_model(tokenizer, length, tokenizer.convert_tokens_to_ids(["x", "</s>"]))
    settings = {"tokenizer": tokenizer, "scope": "response", "num_masks": 4, "mask_rate": 0.5}
    return {mode: Scorer(model, special_tokens=mode, **settings) for mode in ("control", "plain")}


def test_places(tokenizer):
    special = SpecialTokens(tokenizer)
    assert special.spelled(SPELLED) == [("</s>", 6), ("<|end|>", 14)]
    assert special.spelled(" Brask < /s>") == []


def test_text_is_read_as_text(tokenizer):
    """No token of the text is special; all else is as the tokenizer has it."""
    plain, special = PlainTokenizer(tokenizer), set(SpecialTokens(tokenizer).ids.values())
    ids = plain(SPELLED, add_special_tokens=False)["input_ids"]
    assert special.isdisjoint(ids)
    assert tokenizer.decode(ids).strip() == SPELLED.strip()
    for text in (PROMPT, " Brask in 1931", "né 🪁"):
        assert plain(text)["input_ids"] == tokenizer(text)["input_ids"]
    both = prompt_tokens(tokenizer, PROMPT).tolist() + answer_tokens(plain, PROMPT, SPELLED)
    assert both == plain(PROMPT + SPELLED)["input_ids"]


def test_the_template_keeps_its_tokens(tokenizer):
    """A chat that was rendered once is text the second time."""
    plain, special = PlainTokenizer(tokenizer), SpecialTokens(tokenizer)
    messages = [{"role": "user", "content": PROMPT}]
    assert prompt_tokens(plain, messages).equal(prompt_tokens(tokenizer, messages))
    rendered = str(
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    )
    twice = [{"role": "user", "content": rendered}]
    ids = prompt_tokens(plain, twice).tolist()
    ordinary = prompt_tokens(tokenizer, messages).tolist()
    of_template = [token for token in ordinary if token in special.ids.values()]
    assert [token for token in ids if token in special.ids.values()] == of_template
    assert tokenizer.decode(ids).count("<|user|>") == 4
    as_control = prompt_tokens(tokenizer, twice).tolist()
    assert sum(token in special.ids.values() for token in as_control) == 2 * len(of_template)


def test_an_answer_with_an_end_token_inside(scorers):
    control, plain = (scorers[mode].score(PROMPT, " Brask</s> in 1931") for mode in scorers)
    (warning,) = control.warnings
    assert "In the answer, '</s>' at character 6 became a control token" in warning
    assert "special_tokens='plain'" in warning
    assert [token.id for token in control.tokens].count(2) == 2
    assert not plain.warnings
    assert [token.id for token in plain.tokens].count(2) == 1
    assert plain.scored_text == control.scored_text == " Brask</s> in 1931</s>"
    assert plain.settings["special_tokens"] == "plain"
    # At its end, an end token is the answer's end.
    assert not scorers["control"].score(PROMPT, " Brask</s>").warnings


def test_prompts_chats_and_samples(scorers):
    scorer = scorers["control"]
    chat = [{"role": "user", "content": "a <|end|>"}, {"role": "assistant", "content": "b"}]
    chat += [{"role": "user", "content": "</s></s></s></s>?"}]
    for prompt, places in (
        (f"<|user|>{PROMPT}", ["In the prompt, '<|user|>' at character 0 became"]),
        (chat, ["message 1, '<|end|>' at character 2", "message 3, '</s>' at character 0, "]),
    ):
        warnings = scorer.score(prompt, " x").warnings
        assert len(warnings) == len(places)
        for place, warning in zip(places, warnings, strict=True):
            assert place in warning
            assert "If it is a chat that a template rendered, pass its messages" in warning
        assert not scorers["plain"].score(prompt, " x").warnings
    assert "at character 8 and 1 more" in scorer.score(chat, " x").warnings[1]
    samples = scorer.notes_of(parse_request(PROMPT, None, [" a", " <s> b", [2]]))
    assert [note[:11] for note in samples] == ["In sample 2"]


def test_every_way_takes_the_setting(scorers):
    """Batch and stream, too; a calibration made otherwise does not apply."""
    columns = {"prompt": [PROMPT], "answer": [" </s> x"]}
    texts = {mode: score_batch(columns, scorer, tokens="none") for mode, scorer in scorers.items()}
    assert texts["control"]["asmi_msp"][0] != texts["plain"]["asmi_msp"][0]
    assert "became a control token" in texts["control"]["asmi_warnings"][0]
    assert texts["plain"]["asmi_warnings"][0] is None
    with scorers["plain"].stream("<|user|> who?") as tokens:
        next(tokens)
    assert not tokens.result.warnings[1:]
    with scorers["control"].stream("<|user|> who?") as tokens:
        next(tokens)
    assert any("'<|user|>' at character 0" in warning for warning in tokens.result.warnings)


def test_every_field_of_a_message_is_read(scorers):
    """Where the template writes it; a field that no token comes from has no warning."""
    tokenizer = deepcopy(TOKENIZERS["bytes"])
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}({{ m.name }}): {{ m.content }}"
        "{{ m.tool_calls | tojson if m.tool_calls else '' }}\n{% endfor %}assistant:"
    )
    scorer = Scorer(scorers["control"].model, tokenizer=tokenizer, num_masks=2, mask_rate=0.5)
    call = {"function": {"name": "f", "arguments": {"said": 'a "b" </s>'}}}
    asks = {"role": "user", "content": "?"}
    for message, place in (
        (
            {"role": "<|user|>", "content": "x"},
            "In the role of message 1, '<|user|>' at character 0",
        ),
        (asks | {"name": "Ada</s>"}, "In the name of message 1, '</s>' at character 3"),
        (
            {"role": "assistant", "content": None, "tool_calls": [call]},
            "In the tool_calls[0].function.arguments.said of message 1, '</s>' at character 6",
        ),
    ):
        (warning,) = scorer.score([message, asks], " x").warnings
        assert place in warning
    assert not scorer.score([asks | {"id": "</s>"}], " x").warnings
    (warning,) = scorer.score("user(): who?\nassistant:", " x").warnings
    assert "The prompt looks as if the chat template had rendered it" in warning


RENDERING = {
    "plain": "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}",
    "with bos": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] "
    "{{ m.content }} [/INST]{% else %}{{ m.content }}{% endif %}{% endfor %}",
}
SYSTEM, ASKS, SAYS = (
    {"role": role, "content": content}
    for role, content in (("system", "Be brief."), ("user", PROMPT), ("assistant", "Brask"))
)
CHATS = ([ASKS], [SYSTEM, ASKS], [ASKS, SAYS, ASKS], [SYSTEM, ASKS, SAYS, ASKS])


@pytest.mark.parametrize("template", RENDERING)
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("open_end", [True, False])
def test_a_rendered_chat(template, chat, open_end):
    """As a message and as a text prompt, with the BOS token or without it."""
    tokenizer = deepcopy(TOKENIZERS["bytes"])
    tokenizer.chat_template = RENDERING[template]
    special = SpecialTokens(tokenizer)
    text = str(tokenizer.apply_chat_template(chat, add_generation_prompt=open_end, tokenize=False))
    for form in (text, text.removeprefix("<s>"), text.removeprefix("<s>").rstrip()):
        for prompt in (form, [{"role": "user", "content": form}]):
            (warning,) = rendered_warnings(special, prompt)
            assert "as if the chat template had rendered it" in warning


@pytest.mark.parametrize("template", RENDERING)
def test_what_is_no_rendered_chat(template):
    tokenizer = deepcopy(TOKENIZERS["bytes"])
    tokenizer.chat_template = RENDERING[template]
    special = SpecialTokens(tokenizer)
    for text in (PROMPT, "The user: who is it?", "Is [INST] a token?", "a user\nassistant"):
        for prompt in (text, [SYSTEM, ASKS | {"content": text}]):
            assert not rendered_warnings(special, prompt)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert not rendered_warnings(special, PROMPT)  # nothing shows it
    tokenizer.chat_template = "{{ raise_exception('never') }}"
    assert not rendered_warnings(special, PROMPT)


def test_unknown_values_and_slow_tokenizers():
    with pytest.raises(ValueError, match="special_tokens"):
        stream("nowhere", PROMPT, special_tokens="text")
    slow = deepcopy(TOKENIZERS["bytes"])
    type_of_slow = type("Slow", (type(slow),), {"is_fast": False})
    slow.__class__ = type_of_slow
    with pytest.raises(ValueError, match="needs a fast tokenizer, got Slow"):
        PlainTokenizer(slow)
