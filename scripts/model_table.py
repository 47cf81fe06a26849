"""Which models ASMI supports: tests every class of transformers' registry of causal models.

    python scripts/model_table.py --out docs/reference/models.csv     # every class
    python scripts/model_table.py --check docs/reference/models.csv   # compare with the file
    python scripts/model_table.py LlamaForCausalLM --full             # one class in detail

Each class is built tiny and random from its configuration and scored with the public
`subnetwork_log_probs` in both scopes, with eager attention and SDPA: short sequences before long
ones and long before short, two splits of one length in either order, one, two, five and ten masks,
in one chunk and in uneven ones; and again with rotary angles that change with the length, if the
configuration supports them. The ground truth is a full forward pass over a copy of the model in
which the masked heads have weight zero in the output projection; the script finds this projection
and its number of heads by name, independently of the package. A class is "right" if all numbers
agree, "unsupported" if ASMI raises an error, and "wrong" if any differs: then the script fails.
"""

import copy
import csv
import io
import json
import logging
import sys
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
import transformers
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from lm_polygraph_asmi.config import SCOPES
from lm_polygraph_asmi.model import (
    layer_at,
    num_heads,
    plain_model,
    scoring_session,
    structure_of,
    subnetwork_log_probs,
)
from lm_polygraph_asmi.model.check import strategies_seen_right
from lm_polygraph_asmi.model.memory import batch_bytes, packed_bytes
from lm_polygraph_asmi.model.model_cache import model_cache
from lm_polygraph_asmi.model.structure import NAME_THEM
from lm_polygraph_asmi.model.suffix import STRATEGIES

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.registry import classes, tiny, with_longrope

COLUMNS = ("class", "all", "response", "note")
DEPTH = 0.4
TOLERANCE = 1e-3
"""Total variation at the worst position: rounding in recurrences makes 2e-4, errors make 0.01."""
MASKS = torch.tensor(
    [[1, 0, 1, 1], [0, 1, 1, 0], [1, 1, 1, 0], [0, 0, 0, 0], [1, 0, 0, 1],
     [1, 1, 1, 1], [0, 1, 0, 1], [0, 0, 1, 1], [0, 1, 1, 0], [1, 0, 0, 0]]
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A test case: prompt and response tokens, number of masks, and masks per batch."""

    prompt: int
    response: int
    masks: int = 2
    batch: int | None = None

    def __str__(self) -> str:
        batches = f" in batches of {self.batch}" if self.batch else ""
        return f"{self.prompt} + {self.response} tokens, {self.masks} masks{batches}"


def cases(*shapes: tuple[int, int], masks: int = 2) -> list[Case]:
    return [Case(*shape, masks) for shape in shapes]


SERIES = {
    # Below, at and beyond every tiny window.
    "rising": cases((1, 4), (11, 6), (12, 1), (3, 40), (70, 12), (24, 9), masks=3),
    # Including as many positions as heads, as the width of a head, and as that of the model.
    "falling": cases(
        (70, 12), (12, 30), (20, 13), (10, 7), (2, 9), (5, 4), (3, 2), (2, 1), (1, 2), (1, 1)
    ),
    "split early": cases((3, 9), (9, 3)),
    "split late": cases((9, 3), (3, 9)),
    "masks": [
        Case(9, 4, 1), Case(9, 4, 2), Case(9, 4, 5), Case(9, 4, 10, 3),
        Case(9, 4, 5, 2),
    ],
}  # fmt: skip
"""Cases for each model; every series starts with an empty cache, with eager and SDPA in turn."""
SWITCHING = cases((24, 4), (8, 20), (4, 6), (14, 2), (13, 9))
"""Cases for angles that switch at 16 tokens: around that length, in the prompt and after it."""
PROJECTIONS = (
    "o_proj", "out_proj", "wo", "Wo", "c_proj", "dense", "output_linear", "linear_out", "o",
    "o_b_proj", "attention_output", "project_o", "out_lin", "output_proj",
)  # fmt: skip
"""Names of the output projection of an attention module."""
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


class NotTestable(Exception):
    """The output projection or the heads of a model were not found by name."""


class ByPosition(nn.Module):
    """A projection with masked heads at some positions of a sequence, without masks at the rest."""

    def __init__(self, masked: nn.Module, unmasked: nn.Module) -> None:
        super().__init__()
        self.masked, self.unmasked, self.positions = masked, unmasked, slice(None)

    @property
    def weight(self) -> Tensor:
        return self.unmasked.weight

    def forward(self, heads: Tensor) -> Tensor:
        projected = self.unmasked(heads).clone()
        flat = projected.ndim == 2  # one sequence, its batch axis dropped
        where = self.positions if flat else (slice(None), self.positions)
        projected[where] = self.masked(heads)[where]
        return projected


def projection_by_name(layer: nn.Module) -> str:
    """Path of the attention's output projection, found by name."""
    paths = [
        path
        for path, module in layer.named_modules()
        if path.removesuffix(".linear").rpartition(".")[2] in PROJECTIONS
        and isinstance(getattr(module, "weight", None), Tensor)
        and module.weight.ndim == 2
        and not any(part in path for part in NOT_HEADS)
    ]  # fmt: skip
    if len(paths) > 1:
        attention = [path for path in paths if "att" in path]
        paths = attention or paths
    if len(paths) != 1:
        raise NotTestable(f"no single output projection by name: {paths}")
    return paths[0]


class GroundTruth:
    """Full forward passes over copies with weight zero for masked heads in one projection."""

    def __init__(self, model: PreTrainedModel, layer: int) -> None:
        self.model, self.layer = model, layer
        self.copies: list[tuple[PreTrainedModel, ByPosition]] = []
        self.cached: dict[Any, list[Tensor]] = {}  # a text may come again with more masks

    def _copy(self, mask: Tensor) -> tuple[PreTrainedModel, ByPosition]:
        copied = copy.deepcopy(self.model)
        layers = copied.get_submodule(structure_of(self.model).layers)
        layers[self.layer] = copy.deepcopy(layers[self.layer])  # unshare modules that layers share
        layer = layers[self.layer]
        name = projection_by_name(layer)
        parent, _, last = name.rpartition(".")
        projection = layer.get_submodule(name)
        masked = copy.deepcopy(projection)
        axis = 0 if type(projection).__name__ == "Conv1D" else 1
        width = masked.weight.shape[axis] // len(mask)
        with torch.no_grad():
            for head, keep in enumerate(mask.tolist()):
                if not keep:
                    masked.weight.narrow(axis, head * width, width).zero_()
        switch = ByPosition(masked, projection)
        setattr(layer.get_submodule(parent), last, switch)
        return copied, switch

    def log_probs(self, ids: Tensor, case: Case, scope: str, attention: str) -> Tensor:
        """(S, T, V) by one full forward pass per mask."""
        predicting = slice(case.prompt - 1, len(ids) - 1)
        self.copies += [self._copy(mask) for mask in MASKS[len(self.copies) : case.masks]]
        rows = self.cached.setdefault((tuple(ids.tolist()), case.prompt, scope, attention), [])
        for copied, switch in self.copies[len(rows) : case.masks]:
            switch.positions = predicting if scope == "response" else slice(None)
            with torch.no_grad(), scoring_session(copied, attention):
                logits = copied(input_ids=ids[None, :-1], use_cache=False).logits[0, predicting]
            rows.append(logits.float().log_softmax(-1))
        return torch.stack(rows[: case.masks])


@dataclass
class Verdict:
    """Result of one class.

    Attributes:
        scopes: by scope, "right", "unsupported: why" or "WRONG: by how much".
        strategies: by scope, how the passes were run.
        note: layers with heads, if not all have them; or why nothing could be tested.
        compared: every comparison with its result.
        switching: whether it was also tested with angles that change with the length.
    """

    name: str
    scopes: dict[str, str] = field(default_factory=dict)
    strategies: dict[str, str] = field(default_factory=dict)
    note: str = ""
    compared: list[str] = field(default_factory=list)
    switching: bool = False


UNSUPPORTED = (TypeError, ValueError, RuntimeError)


def _short(error: Exception) -> str:
    reason = str(error).splitlines()[0].replace(NAME_THEM, "")
    return f"unsupported: {reason}"


class ModelTest:
    """Test cases for one model, and its results."""

    def __init__(self, model: PreTrainedModel, verdict: Verdict) -> None:
        self.model, self.verdict = model, verdict
        self.layer = layer_at(model, DEPTH).layer
        self.truth = GroundTruth(model, self.layer)
        if num_heads(model, self.layer) != MASKS.shape[1]:
            raise NotTestable(f"{num_heads(model, self.layer)} heads found, built with four")
        self.attentions = ["eager"]
        try:
            with scoring_session(model, "sdpa"):
                self.attentions.append("sdpa")
        except ValueError:
            pass

    def _budget(self, case: Case, scope: str) -> int | None:
        """Memory budget for the batch size of a case, from the model's configuration."""
        if case.batch is None:
            return None
        positions = case.prompt + case.response - 1
        if scope == "all":
            return batch_bytes(self.model, case.batch, positions)
        cached = case.prompt - 1
        return packed_bytes(self.model, case.batch, case.response, cached)

    def _wrong(self, case: Case, scope: str, attention: str) -> str | None:
        """How wrong the distributions are; None if they are right."""
        length = case.prompt + case.response
        ids = torch.randint(3, 61, (length,), generator=torch.Generator().manual_seed(length))
        with scoring_session(self.model, attention):
            budget = self._budget(case, scope)
        log_probs = subnetwork_log_probs(
            self.model, ids, case.prompt, self.layer, MASKS[: case.masks],
            scope=scope, attention=attention, memory_budget=budget,
        )  # fmt: skip
        expected = self.truth.log_probs(ids, case, scope, attention)
        distance = (log_probs.exp() - expected.exp()).abs().sum(-1).max().item() / 2
        self.verdict.compared.append(f"{scope}, {attention}, {case}: {distance:.1g}")
        if not distance <= TOLERANCE:
            return f"WRONG: {distance:.2g} at {case}, {attention}"
        if case.masks > 1 and not (expected.exp() - expected[:1].exp()).abs().max() > 1e-4:
            return f"WRONG: masks change nothing at {case}"
        return None

    def outcome(self, scope: str, series: Mapping[str, Sequence[Case]]) -> str:
        """ "right", "unsupported: why" or "WRONG: by how much"."""
        for index, series_cases in enumerate(series.values()):
            model_cache(self.model).pop("checks", None)
            for case in series_cases:
                try:
                    wrong = self._wrong(case, scope, self.attentions[index % len(self.attentions)])
                except UNSUPPORTED as error:
                    return _short(error)
                if wrong is not None:
                    return wrong
            self._note_strategy(scope)
        return "right"

    def _note_strategy(self, scope: str) -> None:
        """Record the most expensive strategy that was needed."""
        order = [strategy.name for strategy in STRATEGIES if strategy.scope == scope]
        needed = strategies_seen_right(self.model, scope) | {
            self.verdict.strategies.get(scope, order[0])
        }
        self.verdict.strategies[scope] = max(needed, key=order.index)


def check_model(name: str, model: PreTrainedModel) -> Verdict:
    """Score a model with all cases and compare every number."""
    verdict = Verdict(name)
    try:
        structure = structure_of(plain_model(model))
    except UNSUPPORTED as error:
        verdict.scopes = dict.fromkeys(SCOPES, _short(error))
        return verdict
    if len(structure.sites) < structure.num_layers:
        verdict.note = (
            f"heads in layers {', '.join(map(str, structure.sites))} of {structure.num_layers}"
        )
    test = ModelTest(model, verdict)
    verdict.scopes = {scope: test.outcome(scope, SERIES) for scope in SCOPES}
    return verdict


def check_switching(verdict: Verdict, config: type, model: type) -> None:
    """Test a class again with rotary angles that switch with the length, if it supports them."""
    try:
        switching = tiny(config, model, amend=lambda made: with_longrope(made) or _no_longrope())
        long, short = (torch.arange(3, 3 + length)[None] for length in (20, 10))
        structure_of(plain_model(switching))
        with torch.no_grad():
            long_logits, short_logits = (
                switching(input_ids=ids).logits[0, 9] for ids in (long, short)
            )
    except Exception:  # unsupported
        return
    if torch.allclose(long_logits, short_logits, atol=1e-3):
        return
    test = ModelTest(switching, Verdict(verdict.name))
    for scope in [scope for scope, outcome in verdict.scopes.items() if outcome == "right"]:
        outcome = test.outcome(scope, {"eager": SWITCHING, "sdpa": SWITCHING[::-1]})
        if outcome.startswith("WRONG"):
            verdict.scopes[scope] = f"{outcome}, LongRoPE"
        elif outcome != "right":
            verdict.note += f" LongRoPE in `{scope}`: {outcome}"
    verdict.compared += test.verdict.compared
    verdict.switching = True


def _no_longrope() -> None:
    raise ValueError("the configuration has no rotary angles")


def verdict_of(name: str, config: type, model: type) -> Verdict:
    """Build a class and test it; report why it cannot be built or tested."""
    try:
        built = tiny(config, model)
    except Exception as error:
        why = textwrap.shorten(str(error), 200)  # the cause is often in its second line
        return Verdict(name, note=f"not built: {type(error).__name__}: {why}")
    try:
        verdict = check_model(name, built)
        check_switching(verdict, config, model)
    except NotTestable as error:
        return Verdict(name, note=f"not testable: {error}")
    return verdict


def table(verdicts: Sequence[Verdict]) -> list[dict[str, str]]:
    """The rows of docs/reference/models.csv: right classes first, untested ones last."""

    def order(verdict: Verdict) -> tuple[bool, bool, str]:
        return not verdict.scopes, verdict.scopes.get("all") != "right", verdict.name

    rows = []
    for v in sorted(verdicts, key=order):
        columns = (
            [_column(v, scope) for scope in SCOPES] if v.scopes else ["not tested"] * len(SCOPES)
        )
        if columns[0] == columns[1] and v.scopes.get("all") != "right":  # one reason for both
            columns[1] = "the same"
        rows.append(dict(zip(COLUMNS, (v.name, *columns, v.note), strict=True)))
    return rows


def as_csv(rows: Sequence[dict[str, str]]) -> str:
    """The rows as the text of a CSV file."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def different(rows: Sequence[dict[str, str]], file: Path) -> list[str]:
    """Classes whose row in a CSV file is missing or different."""
    with file.open(newline="") as lines:
        saved = {row["class"]: row for row in csv.DictReader(lines)}
    return [row["class"] for row in rows if saved.get(row["class"]) != row]


def summary(verdicts: Sequence[Verdict]) -> str:
    """Counts and releases, for the page."""
    right = {scope: sum(v.scopes.get(scope) == "right" for v in verdicts) for scope in SCOPES}
    return (
        f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}: "
        f"{len(verdicts)} classes, {sum(bool(v.scopes) for v in verdicts)} tested, "
        f"{sum(v.switching for v in verdicts)} also with rotary angles that switch with the "
        f"length. Right: {right['all']} in the scope all, {right['response']} in response"
    )


def _column(verdict: Verdict, scope: str) -> str:
    outcome = verdict.scopes[scope].replace(f"{verdict.name} ", "", 1)
    strategy = verdict.strategies.get(scope, "")
    defaults = ("suffix replay", "packed sequence", "")
    return outcome if outcome != "right" or strategy in defaults else f"right ({strategy})"


@click.command(help=__doc__)
@click.argument("names", nargs=-1)
@click.option("--out", type=click.Path(path_type=Path), help="Write a CSV file.")
@click.option(
    "--check", type=click.Path(path_type=Path, exists=True), help="Compare with a CSV file."
)
@click.option(
    "--result-cache",
    type=click.Path(path_type=Path),
    help="File of verdicts, one line each; classes already in it are not tested again.",
)
@click.option("--full", is_flag=True, help="Also print what was compared.")
@click.option("--threads", default=1, show_default=True, help="Threads of torch.")
def main(
    names: tuple[str, ...],
    out: Path | None,
    check: Path | None,
    result_cache: Path | None,
    full: bool,
    threads: int,
) -> None:
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    logging.getLogger("lm_polygraph").setLevel(logging.CRITICAL)
    torch.set_num_threads(threads)
    chosen = [row for row in classes() if not names or row[0] in names]
    lines = result_cache.read_text().splitlines() if result_cache and result_cache.exists() else []
    cached = {verdict.name: verdict for verdict in (Verdict(**json.loads(line)) for line in lines)}
    verdicts = []
    for row in tqdm(chosen, disable=not sys.stderr.isatty()):
        verdict = cached.get(row[0]) or verdict_of(*row)
        verdicts.append(verdict)
        print(
            row[0], verdict.scopes or verdict.note, verdict.strategies, file=sys.stderr, flush=True
        )
        if result_cache and row[0] not in cached:
            with result_cache.open("a") as file:
                file.write(json.dumps(asdict(verdict)) + "\n")
    if full:
        for v in verdicts:
            print(v.name, v.scopes, v.strategies, v.note, *v.compared, sep="\n  ")
    elif out:
        out.write_text(as_csv(table(verdicts)))
    elif not check:
        print(as_csv(table(verdicts)), end="")
    print(summary(verdicts), file=sys.stderr)
    wrong = [v.name for v in verdicts if any("WRONG" in outcome for outcome in v.scopes.values())]
    if wrong:
        raise click.ClickException(f"wrong numbers: {', '.join(wrong)}")
    changed = different(table(verdicts), check) if check else []
    if changed:
        raise click.ClickException(f"other rows than in {check}: {', '.join(changed)}")


if __name__ == "__main__":
    main()
