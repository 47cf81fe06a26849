"""A tiny model whose greedy answer to a prompt is fixed, tokenizers with chosen merges, and a slow
way to see what a model would write."""

from collections.abc import Callable, Sequence

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, PreTrainedTokenizerFast

from tests.families import share_structure

SPECIAL = ("<pad>", "<s>", "</s>", "<|end|>", "<|user|>")
CHAT = (
    "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|user|>:{% endif %}"
)
POSITIONS = 128


def byte_tokenizer(
    merges: Sequence[str] = (), bos: bool = True, words: bool = True
) -> PreTrainedTokenizerFast:
    """Byte-level BPE: `SPECIAL`, every byte, and `merges`, pairs such as "a s" in their order.

    `bos`: whether texts begin with <s>; `words`: only parts of a word are merged, as in GPT-2.
    """
    pairs = [tuple(merge.split(" ")) for merge in merges]
    tokenizer = _merging(sorted(pre_tokenizers.ByteLevel.alphabet()), pairs)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    tokenizer.decoder = decoders.ByteLevel()
    return _finished(tokenizer, bos)


def space_tokenizer(pieces: Sequence[str], bos: bool = True) -> PreTrainedTokenizerFast:
    """As Llama 2's: spaces are ▁, a text gets one in front, and the decoder drops the first.

    Tokens are `SPECIAL`, characters, bytes, and `pieces`, each merged from left to right.
    """
    pairs = [(piece[:end], piece[end]) for piece in pieces for end in range(1, len(piece))]
    letters = {letter for piece in pieces for letter in piece} | {chr(n) for n in range(33, 127)}
    names = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", *sorted(letters - {"▁"})]
    tokenizer = _merging(names, list(dict.fromkeys(pairs)), byte_fallback=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    return _finished(tokenizer, bos)


def _merging(names: Sequence[str], pairs: list[tuple[str, str]], **how: bool) -> Tokenizer:
    pieces = dict.fromkeys([*SPECIAL, *names, *map("".join, pairs)])
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    return Tokenizer(models.BPE(vocabulary, pairs, **how))


def _finished(tokenizer: Tokenizer, bos: bool) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens(list(SPECIAL))
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        additional_special_tokens=list(SPECIAL[3:]), chat_template=CHAT,
    )  # fmt: skip


def scripted_model(
    tokenizer: PreTrainedTokenizerFast, prompt_length: int, script: Sequence[int],
    end_ids: Sequence[int] = (2,),
) -> PreTrainedModel:  # fmt: skip
    """A model whose greedy answer after `prompt_length` tokens is `script`, whatever the prompt.

    A position's vector decides the next token; tokens and attention change it slightly, so masks
    have an effect. After the script follow its last token and random ones.
    """
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=POSITIONS, n_embd=POSITIONS, n_layer=2, n_head=4,
        bos_token_id=1, eos_token_id=list(end_ids), tie_word_embeddings=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).eval()
    directions = torch.linalg.qr(torch.randn(POSITIONS, POSITIONS))[0]
    with torch.no_grad():
        for parameter in model.transformer.h.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.05)
        model.transformer.wte.weight.normal_(std=0.02)
        model.transformer.wpe.weight.copy_(8 * directions)
        model.lm_head.weight.normal_(std=0.02)
        for position, token in enumerate(script, start=prompt_length - 1):
            model.lm_head.weight[token] += 1.5 * directions[position]
    model.generation_config.eos_token_id = list(end_ids)
    share_structure(model, f"scripted {len(tokenizer)} {end_ids}")
    return model


def likeliest(
    model: PreTrainedModel, prompt: Sequence[int], ended: Callable[[list[int]], bool],
    ways: Sequence[list[int]] = (),
) -> list[int]:  # fmt: skip
    """The most probable token, one after the other by full passes, until the answer has `ended`.

    `ways`: the only answers that may be written, if any.
    """
    answer: list[int] = []
    while not ended(answer):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *answer]])).logits[0, -1].tolist()
        allowed = {way[len(answer)] for way in ways if way[: len(answer)] == answer}
        answer.append(max(allowed or range(len(logits)), key=logits.__getitem__))
    return answer
