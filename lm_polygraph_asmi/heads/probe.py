"""The causal probe: do predictions depend on their critical heads?

The probe takes tokens of a finished run, ablates their critical heads, and compares the most likely
token with and without the ablation. Tokens of high MI_t flip under random masks by construction, so
random heads are ablated as a control.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lm_polygraph_asmi.config import ASMIConfig
from lm_polygraph_asmi.core.maths.masks import example_seed
from lm_polygraph_asmi.core.model import (
    MaskedModel,
    UnmaskedPass,
    masked_model,
    readout,
    run_subnetworks,
    run_unmasked,
)
from lm_polygraph_asmi.core.model.memory import in_chunks
from lm_polygraph_asmi.heads.analysis.heads import head_criticality
from lm_polygraph_asmi.heads.analysis.probe import COUNT, NUMBERS, ablations, extremes
from lm_polygraph_asmi.host.loading import load_named
from lm_polygraph_asmi.inputs import as_chat
from lm_polygraph_asmi.results.runs import Run, load_run
from lm_polygraph_asmi.scoring.text import prompt_tokens

DRAWS = 10
"""Number of random draws of heads, for each token and each number of heads."""
MASKS = 64
"""Number of masks whose final states and distributions are in memory at the same time."""
SAME_MODEL, SAME_MODEL_16_BITS = 0.05, 0.2
"""Largest median difference, over an answer's tokens, of its log-likelihood from the saved one.

They differ a little, in nats, since other devices sum in another order. With SmolLM2-135M-Instruct
on 24 answers of the demo in bfloat16, the median difference of an answer is at most .06 with SDPA
instead of eager attention (mostly .01), .06 with other rows in the batch, and .05 with float32
weights. If everything is in float32, it is below .0001.
"""


class Answer(NamedTuple):
    """One answer of a run.

    It has the token ids of prompt and response, and the saved log-likelihood (T,) of each response
    token, nats.
    """

    input_ids: Int[Tensor, " N"]
    prompt_length: int
    log_likelihood: np.ndarray

    @property
    def response(self) -> Int[Tensor, " T"]:
        return self.input_ids[self.prompt_length :]

    def check_model(self, f: MaskedModel, unmasked: UnmaskedPass) -> None:
        """Raise ValueError unless the model reproduces the answer's saved log-likelihood."""
        log_probs = readout(f, unmasked.final_hidden)
        tokens = self.response[:, None].to(log_probs.device)
        recomputed = log_probs.gather(-1, tokens)[:, 0].cpu().numpy()
        difference = float(np.median(np.abs(recomputed - self.log_likelihood)))
        most = SAME_MODEL if f.model.dtype.itemsize > 2 else SAME_MODEL_16_BITS
        if not difference <= most:
            raise ValueError(
                "an answer has another likelihood with this model than in the run (median "
                f"difference per token {difference:.2g} nats): load the run's model, with its dtype"
            )


def answers_of(run: Run, tokenizer: PreTrainedTokenizerBase) -> list[Answer]:
    """All answers of a run. ValueError unless each prompt has as many tokens as in the run."""
    names = ("input_texts", "asmi_tokens", "asmi_prompt_length", "asmi_log_likelihood")
    if missing := run.lacks(names):
        raise ValueError(f"{run.path} lacks {', '.join(missing)}: expected a run of ASMI")
    chat = bool(run.recorded("config").get("instruct"))
    answers = []
    for row, (text, tokens, length, likelihood) in enumerate(
        zip(*(run.stats[name] for name in names), strict=True)
    ):
        prompt = prompt_tokens(tokenizer, as_chat(text) if chat else text)
        if len(prompt) != length:
            raise ValueError(
                f"prompt {row} of {run.path} has {length} tokens in the run, but {len(prompt)} "
                "with this tokenizer: load the run's model"
            )
        ids = torch.cat([prompt, torch.as_tensor(np.asarray(tokens), dtype=prompt.dtype)])
        answers.append(Answer(ids, int(length), np.asarray(likelihood, dtype=float)))
    return answers


def tokens_of(saved: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """All tokens of a run, from what it saved for the masks of each answer.

    Columns: row (in the run), position (in its answer), mi, and criticality (H,).
    """
    parts = [
        pd.DataFrame(
            {
                "position": np.arange(len(masked["mi"])),
                "mi": np.asarray(masked["mi"]),
                "criticality": list(head_criticality(masked["kl"], masked["masks"])),
                "row": row,
            }
        )
        for row, masked in enumerate(saved)
    ]
    return pd.concat(parts, ignore_index=True)


def probe_tokens(
    model: PreTrainedModel,
    used: Mapping[str, Any],
    tokens: pd.DataFrame,
    answers: Sequence[Answer],
    count: int = COUNT,
    draws: int = DRAWS,
    seed: int = 0,
) -> dict[str, Any]:
    """Content of a probe's file (`heads.probe_file`). ValueError if the model is not the run's.

    Args:
        model, answers: the run's.
        used: the run's settings of ASMI. Heads are ablated at the layer and positions of its
            masks.
        tokens: the result of `tokens_of`.
        count: number of tokens of high MI_t, and of tokens of low MI_t.
        draws, seed: number of random draws of heads for each token, and their seed.
    """
    numbers = [k for k in NUMBERS if k <= used["num_heads"]]
    groups = dict(zip(("high", "low"), extremes(tokens["mi"], count), strict=True))
    chosen = tokens.loc[np.unique(np.concatenate(list(groups.values())))]
    if chosen.empty:
        raise ValueError("the run has no two tokens with different MI_t")
    ids, answer_tokens = [], []
    shown = Console(stderr=True)
    for row, few in track(
        list(chosen.groupby("row")), "Probing", console=shown, disable=not shown.is_terminal
    ):
        answer, positions = answers[row], few["position"].tolist()
        masks = [
            token_masks(
                [used["layer"], *answer.input_ids.tolist(), position], heads, numbers, draws, seed
            )
            for position, heads in zip(positions, few["criticality"], strict=True)
        ]
        ids.append(predictions(model, used, answer, positions, masks))
        answer_tokens += answer.response[positions].tolist()
    argmax, replayed, *ablated = np.concatenate(ids).T.tolist()
    predicted = np.reshape(ablated, (1 + draws, len(numbers), len(chosen))).transpose(2, 1, 0)
    columns = {name: chosen[name].tolist() for name in ("row", "position", "mi")}
    return {
        "settings": dict(used),
        "k": numbers,
        "draws": draws,
        "seed": seed,
        "tokens": columns | {"token": answer_tokens, "argmax": argmax, "replayed": replayed},
        "criticality": [
            [None if np.isnan(b) else float(b) for b in heads] for heads in chosen["criticality"]
        ],
        "groups": {
            name: np.searchsorted(chosen.index, places).tolist() for name, places in groups.items()
        },
        "predicted": {
            "critical": predicted[..., 0].tolist(),
            "random": predicted[..., 1:].tolist(),
        },
    }


def token_masks(
    ids: Sequence[int], criticality: np.ndarray, numbers: Sequence[int], draws: int, seed: int
) -> Tensor:
    """(1 + (1 + draws) K, H) masks of one token.

    They ablate: no head; its critical heads; and random heads. Flips are counted against the pass
    without an ablation. This pass runs together with the others, so that rounding causes no flips.
    `ids` identify the token, so that each token has its own random heads.
    """
    drawn = np.random.default_rng(example_seed(seed, ids))
    heads = np.tile(np.arange(len(criticality)), (draws, 1))
    critical = np.argsort(-criticality, kind="stable")  # of either sign; undefined ones last
    orders = np.vstack([critical, drawn.permuted(heads, axis=1)])
    masks = ablations(orders, numbers).reshape(-1, len(criticality))
    return torch.from_numpy(np.vstack([np.ones(len(criticality)), masks])).float()


def predictions(
    model: PreTrainedModel,
    used: Mapping[str, Any],
    answer: Answer,
    positions: Sequence[int],
    masks: Sequence[Tensor],
) -> np.ndarray:
    """(m, 1 + M) most likely tokens at m positions of an answer.

    The first column is of the unmasked model, the others of the M masks of the position.
    """
    layer = used["layer"]

    def predict(position: int, some: Tensor) -> Tensor:
        masked = run_subnetworks(f, unmasked, layer, some, shortcut=False)
        return readout(f, masked.hidden[masked.index, position]).argmax(-1).cpu()

    with masked_model(model, used["attention"], used.get("structure")) as f:
        unmasked = run_unmasked(f, answer.input_ids, answer.prompt_length, [layer], used["scope"])
        answer.check_model(f, unmasked)
        best = readout(f, unmasked.final_hidden[list(positions)]).argmax(-1).cpu()
        rows = [
            torch.cat(in_chunks(partial(predict, position), of_token, MASKS))
            for position, of_token in zip(positions, masks, strict=True)
        ]
    return torch.column_stack([best, torch.stack(rows)]).numpy()


def probe_run(
    run: str | Path,
    model: str,
    gguf_file: str | None = None,
    dtype: str = "auto",
    device_map: str | None = None,
    depth: float = ASMIConfig.depth,
    **settings: Any,
) -> dict[str, Any]:
    """`probe_tokens` on a finished run.

    Args:
        run: run folder or manager file of the config asmi_heads.
        model, gguf_file, dtype, device_map: see `host.loading.load_named`.
        depth: relative depth of the masked layer.
        **settings: `count`, `draws` and `seed`.
    """
    finished = load_run(run)
    saved = finished.at(depth, "masks", "kl")
    if not saved:
        depths = ", ".join(f"{used['depth']:g}" for used in finished.settings()) or "none"
        raise ValueError(
            f"{run} lacks masks at depth {depth:g} (its depths: {depths}): the probe needs "
            "a run of the config asmi_heads (asmi.details=true)"
        )
    loaded, tokenizer = load_named(model, gguf_file, dtype, device_map)
    answers = answers_of(finished, tokenizer)
    return probe_tokens(loaded, saved[0]["settings"], tokens_of(saved), answers, **settings)
