"""Which models ASMI scores: every class of transformers' registry of causal models, asked.

    python scripts/model_table.py                           # the table of docs/models-table.md
    python scripts/model_table.py LlamaForCausalLM --full   # one class, what was compared

Each class is built tiny and random from its configuration and scored through the public
`subnetwork_log_probs` in both scopes, with short and long prompts and answers, under eager
attention and SDPA. The judge is a whole forward pass over a copy of the model in which the masked
heads have no weight in the output projection; where that projection is, and how many heads it
takes, is looked up here by name, not taken from the package. A class is right if everything agrees,
refused if ASMI says so by itself, and wrong if any number differs: then the script fails.
"""

import copy
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import click
import torch
import transformers
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from lm_polygraph_asmi.model import (
    layer_at,
    num_heads,
    plain_model,
    scoring_session,
    structure_of,
    subnetwork_log_probs,
)
from lm_polygraph_asmi.model.notes import known

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.registry import classes, tiny

DEPTH = 0.4
TOLERANCE = 1e-3
"""Total variation at the worst position: rounding in recurrences makes 2e-4, errors make 0.01."""
SHAPES = ((1, 4), (11, 6), (12, 1), (3, 40), (70, 12), (24, 9))
"""Prompt and response tokens, short before long: below, at and beyond every tiny window."""
MASKS = torch.tensor([[1, 0, 1, 1], [0, 1, 1, 0], [1, 1, 1, 0], [0, 0, 0, 0], [1, 0, 0, 1]])
PROJECTIONS = (
    "o_proj", "out_proj", "wo", "Wo", "c_proj", "dense", "output_linear", "linear_out", "o",
    "o_b_proj", "attention_output", "project_o", "out_lin", "output_proj",
)  # fmt: skip
"""What authors call an attention's output projection."""
NOT_HEADS = (
    "mlp",
    "expert",
    "cross",
    "encoder_attn",
    "mamba",
    "feed_forward",
    "linear_attn",
    "ffn",
)


class NotJudged(Exception):
    """The judge does not know where a model keeps its heads."""


class ByPosition(nn.Module):
    """One projection at some positions of a sequence, another at the rest."""

    def __init__(self, inside: nn.Module, outside: nn.Module) -> None:
        super().__init__()
        self.inside, self.outside, self.positions = inside, outside, slice(None)

    @property
    def weight(self) -> Tensor:
        return self.outside.weight

    def forward(self, heads: Tensor) -> Tensor:
        projected = self.outside(heads).clone()
        flat = projected.ndim == 2  # one sequence, its batch axis dropped
        where = self.positions if flat else (slice(None), self.positions)
        projected[where] = self.inside(heads)[where]
        return projected


def projection_by_name(layer: nn.Module) -> str:
    """Path of the attention's output projection, as its authors call it."""
    found = [
        path
        for path, module in layer.named_modules()
        if path.removesuffix(".linear").rpartition(".")[2] in PROJECTIONS
        and isinstance(getattr(module, "weight", None), Tensor)
        and module.weight.ndim == 2
        and not any(part in path for part in NOT_HEADS)
    ]  # fmt: skip
    if len(found) > 1:
        attention = [path for path in found if "att" in path]
        found = attention or found
    if len(found) != 1:
        raise NotJudged(f"no single output projection by name: {found}")
    return found[0]


class Judge:
    """Whole passes over copies whose masked heads have no weight in one layer's projection."""

    def __init__(self, model: PreTrainedModel, layer: int) -> None:
        self.copies = []
        path = structure_of(model).layers
        for mask in MASKS:
            copied = copy.deepcopy(model)
            layers = copied.get_submodule(path)
            layers[layer] = copy.deepcopy(layers[layer])  # what layers share is shared no more
            name = projection_by_name(layers[layer])
            parent, _, last = name.rpartition(".")
            whole = layers[layer].get_submodule(name)
            masked = copy.deepcopy(whole)
            axis = 0 if type(whole).__name__ == "Conv1D" else 1
            width = masked.weight.shape[axis] // MASKS.shape[1]
            with torch.no_grad():
                for head, keep in enumerate(mask.tolist()):
                    if not keep:
                        masked.weight.narrow(axis, head * width, width).zero_()
            switch = ByPosition(masked, whole)
            setattr(layers[layer].get_submodule(parent), last, switch)
            self.copies.append((copied, switch))

    def log_probs(self, ids: Tensor, prompt: int, scope: str, attention: str) -> Tensor:
        """(S, T, V) by one whole pass a mask."""
        predicting = slice(prompt - 1, len(ids) - 1)
        rows = []
        for copied, switch in self.copies:
            switch.positions = predicting if scope == "response" else slice(None)
            with torch.no_grad(), scoring_session(copied, attention):
                logits = copied(input_ids=ids[None, :-1], use_cache=False).logits[0, predicting]
            rows.append(logits.float().log_softmax(-1))
        return torch.stack(rows)


@dataclass
class Verdict:
    """What became of one class.

    Attributes:
        scopes: by scope, "right", "refused: why" or "WRONG: by how much".
        ways: by scope, how the passes were run in the end.
        note: which layers have heads, where not all do; or why nothing could be asked.
    """

    name: str
    scopes: dict[str, str] = field(default_factory=dict)
    ways: dict[str, str] = field(default_factory=dict)
    note: str = ""
    compared: list[str] = field(default_factory=list)


REFUSALS = (TypeError, ValueError, RuntimeError)


def _short(error: Exception) -> str:
    return f"refused: {str(error).splitlines()[0]}"


def ask(name: str, model: PreTrainedModel) -> Verdict:
    """Score a model every way and judge every number."""
    verdict = Verdict(name)
    try:
        found = structure_of(plain_model(model))
    except REFUSALS as error:
        verdict.scopes = dict.fromkeys(("all", "response"), _short(error))
        return verdict
    depth = layer_at(model, DEPTH)
    if len(found.sites) < found.num_layers:
        verdict.note = f"heads in layers {', '.join(map(str, found.sites))} of {found.num_layers}"
    judge = Judge(model, depth.layer)
    if num_heads(model, depth.layer) != MASKS.shape[1]:
        raise NotJudged(f"{num_heads(model, depth.layer)} heads found, built with four")
    generator = torch.Generator().manual_seed(1)
    attentions = ["eager"]
    try:
        with scoring_session(model, "sdpa"):
            attentions.append("sdpa")
    except ValueError:
        pass
    for scope in ("all", "response"):
        outcome = "right"
        for attention in attentions:
            for prompt, response in SHAPES if attention == "eager" else SHAPES[1::2]:
                ids = torch.randint(3, 61, (prompt + response,), generator=generator)
                try:
                    ours = subnetwork_log_probs(
                        model, ids, prompt, depth.layer, MASKS, scope=scope, attention=attention
                    )
                except REFUSALS as error:
                    outcome = _short(error)
                    break
                theirs = judge.log_probs(ids, prompt, scope, attention)
                apart = (ours.exp() - theirs.exp()).abs().sum(-1).max().item() / 2
                verdict.compared.append(f"{scope}, {attention}, {prompt} + {response}: {apart:.1g}")
                if not apart <= TOLERANCE:
                    outcome = f"WRONG: {apart:.2g} at {prompt} + {response} tokens, {attention}"
                    break
                with_effect = (theirs.exp() - theirs[:1].exp()).abs().max()
                if not with_effect > 1e-4:
                    outcome = f"WRONG: masks change nothing at {prompt} + {response} tokens"
            if outcome != "right":
                break
        verdict.scopes[scope] = outcome
        refused = {
            key[2] for key in known(model).get("checks", {}) if len(key) == 3 and key[0] == scope
        }
        used = [
            key[3] for key in known(model).get("checks", {}) if len(key) == 5 and key[1] == scope
        ]
        verdict.ways[scope] = next((way for way in dict.fromkeys(used) if way not in refused), "")
    return verdict


def verdict_of(name: str, config: type, model: type) -> Verdict:
    """Build a class and ask it; what cannot be built or judged is said."""
    try:
        built = tiny(config, model)
    except Exception as error:
        return Verdict(
            name, note=f"not built: {type(error).__name__}: {str(error).splitlines()[0]}"
        )
    try:
        return ask(name, built)
    except NotJudged as error:
        return Verdict(name, note=f"not judged: {error}")


def markdown(verdicts: Sequence[Verdict]) -> str:
    """The table of models."""
    counts = {
        scope: sum(v.scopes.get(scope) == "right" for v in verdicts)
        for scope in ("all", "response")
    }
    asked = [v for v in verdicts if v.scopes]
    lines = [
        "# Models, class by class",
        "",
        f"Written by `scripts/model_table.py` with transformers {transformers.__version__} and "
        f"torch {torch.__version__.partition('+')[0]}: {len(verdicts)} classes of its registry of "
        f"causal language models, {len(asked)} of them built tiny from a configuration and asked. "
        f"**Right: {counts['all']} in the scope `all`, {counts['response']} in `response`**; every "
        "other is refused by name, and the reason stands here. Right means: equal to whole passes "
        "over a copy whose masked heads have no weight, at several lengths, under eager attention "
        "and SDPA. Real weights bring sizes and settings that no tiny model has, so the same "
        "comparison is made whenever a model is scored. In brackets: how the passes are run where "
        "the cheapest way does not serve. [What is looked for and checked](models.md).",
        "",
        "| class | all | response | |",
        "| --- | --- | --- | --- |",
    ]
    for v in sorted(asked, key=lambda v: (v.scopes["all"] != "right", v.name)):
        cells = [_cell(v, scope) for scope in ("all", "response")]
        if cells[0] == cells[1] and cells[0] != "right":
            cells[1] = "the same"
        lines.append(f"| `{v.name}` | {cells[0]} | {cells[1]} | {v.note} |")
    left = [v for v in verdicts if not v.scopes]
    if left:
        lines += ["", "Not asked:", ""]
        lines += [f"- `{v.name}`: {v.note}" for v in left]
    return "\n".join(lines) + "\n"


def _cell(verdict: Verdict, scope: str) -> str:
    said = verdict.scopes[scope].replace("|", "\\|").replace(f"{verdict.name} ", "", 1)
    way = verdict.ways.get(scope, "")
    plain = ("the layers above again", "one sequence", "")
    return said if said != "right" or way in plain else f"right ({way})"


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
@click.option("--out", type=click.Path(path_type=Path), help="Where the table goes.")
@click.option("--full", is_flag=True, help="Say what was compared.")
def main(names: tuple[str, ...], out: Path | None, full: bool) -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    torch.set_num_threads(1)
    chosen = [row for row in classes() if not names or row[0] in names]
    verdicts = []
    for row in tqdm(chosen, disable=not sys.stderr.isatty()):
        verdicts.append(verdict_of(*row))
        print(
            row[0],
            verdicts[-1].scopes or verdicts[-1].note,
            verdicts[-1].ways,
            file=sys.stderr,
            flush=True,
        )
    if full:
        for v in verdicts:
            print(v.name, v.scopes, v.ways, v.note, *v.compared, sep="\n  ")
    elif out:
        out.write_text(markdown(verdicts))
    else:
        print(markdown(verdicts))
    wrong = [v.name for v in verdicts if any("WRONG" in said for said in v.scopes.values())]
    if wrong:
        raise click.ClickException(f"wrong numbers: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
