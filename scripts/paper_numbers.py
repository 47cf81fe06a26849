r"""The paper's published numbers, read from its LaTeX.

    python scripts/paper_numbers.py PAPER.tex           # writes lm_polygraph_asmi/data/paper.csv
    python scripts/paper_numbers.py PAPER.tex --check   # compares it with the file

PAPER.tex is the source on arXiv; this repository does not contain it. Tables are read row by row,
in the order of print, with the `\label` that stands after them; numbers of the text by the sentence
around them, with the label of their section. A sentence that is missing or repeated is an error, as
is a number of the short main table that differs from the long ones.

Values keep the digits that are printed. `error` is a standard error, `low` and `high` an interval
of 95 %, and `n` the rows it is about, where the paper names them; those of tab:topk-highmi follow
from its tokens. Two are divided: tokens an answer, by the 500 answers they are of, and the coverage
at K = 256, by 100. Where the paper names no backbone (app:boundary), its primary one is meant.
"""

import csv
import io
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import click

FILE = Path(__file__).parents[1] / "lm_polygraph_asmi/data/paper.csv"
BACKBONES = ("Qwen3-4B", "Qwen3-8B", "Llama-2-7B", "Mistral-7B")
DATASETS = ("CoQA", "SQuAD", "BabiQA", "TriviaQA")
METHODS = {
    "Maximum Sequence Probability": "MaximumSequenceProbability",
    "Mean Token Entropy": "MeanTokenEntropy",
    "Pointwise Mutual Information": "MeanPointwiseMutualInformation",
    "Conditional Pointwise MI": "MeanConditionalPointwiseMutualInformation",
    "Monte Carlo Sequence Entropy": "MonteCarloSequenceEntropy",
    "MC Sequence Entropy": "MonteCarloSequenceEntropy",
    "MC Normalized Sequence Entropy": "MonteCarloNormalizedSequenceEntropy",
    "Semantic Entropy": "SemanticEntropy",
    "SentenceSAR (max 5)": "SentenceSAR",
    "Kernel Language Entropy": "KernelLanguageEntropy",
    "P(True)": "PTrue",
    "P(True) Sampling": "PTrueSampling",
    "MSP": "MaximumSequenceProbability",
    "SemEnt": "SemanticEntropy",
    "RAUQ-E": "RAUQ (entropy)",
}
"""Names in the paper that this package, after LM-Polygraph, has otherwise."""
ROWS = {"CoQA": "8000", "SQuAD": "5000", "BabiQA": "1000", "TriviaQA": "5000"}
ANALYSED = {"CoQA": "1000", "SQuAD": "5000", "BabiQA": "1000", "TriviaQA": "1500"}
"""Rows of the benchmark (tab:datasets), and of the analyses (app:distinct)."""
PRIMARY = BACKBONES[0]
MAIN = ("tab:main-ours-coqa-squad", "tab:main-ours-babi-trivia")
OPERATING = "0.6"

NUMBER = r"([+-]?\d*\.?\d+)"
INTERVAL = rf"\[{NUMBER}, {NUMBER}\]"


class Row(NamedTuple):
    """A published number; the columns of the file."""

    item: str
    label: str
    model: str
    dataset: str
    method: str
    depth: str
    n: str
    quantity: str
    value: str
    error: str
    low: str
    high: str
    unit: str


def row(
    item: str, label: str, where: str, quantity: str, unit: str, number: Sequence[str], **more: str
) -> Row:
    """A row; `where` is "model / dataset", `number` the value alone or with its interval."""
    model, _, dataset = where.partition(" / ")
    value, *interval = map(normalised, number)
    low, high = interval or ("", "")
    parts = {"method": "", "depth": "", "n": "", "error": ""} | more
    return Row(
        item=item, label=label, model=model, dataset=dataset, quantity=quantity, value=value,
        low=low, high=high, unit=unit, **parts,
    )  # fmt: skip


def normalised(number: str) -> str:
    """`+.046` as `0.046`, `-0.05` and `9.7` as they are."""
    return re.sub(r"^(-?)\.", r"\g<1>0.", number.removeprefix("+"))


def cleaned(latex: str) -> str:
    """Text without markup around numbers, in one line."""
    text = re.sub(r"(?<!\\)%.*", "", latex).replace("{,}", "")
    text = re.sub(r"\\(?:textbf|underline|mathbf|emph|textit|mathrm|text)\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\multirow\{\d+\}\{\*\}\{([^{}]*)\}", r"\1", text)
    # Twice: an underline may be around a bold number.
    text = re.sub(r"\\(?:textbf|underline)\{([^{}]*)\}", r"\1", text)
    for markup, instead in {
        "$": "", r"\%": "%", r"\,": " ", r"\ ": " ", "^{*}": "", r"\pm": "±", "~": " ",
        "{=}": "=",
    }.items():  # fmt: skip
        text = text.replace(markup, instead)
    return re.sub(r"\s+", " ", text)


def table(latex: str, label: str) -> list[list[str]]:
    """Entries of the table with a label, without rules and headings over several columns."""
    end = latex.find(rf"\label{{{label}}}")
    start = latex.rfind(r"\begin{tabular}", 0, end)
    if end < 0 or start < 0:
        raise click.ClickException(f"no table {label} in this file: expected the paper's LaTeX")
    body = re.sub(r"(?<!\\)%.*", "", latex[start : latex.find(r"\end{tabular}", start)])
    body = re.sub(r"\\(?:top|mid|bottom)rule|\\hline|\\cline\{[\d-]*\}", "", body)
    rows = [[cleaned(entry).strip() for entry in line.split("&")] for line in body.split(r"\\")]
    return [entries for entries in rows if len(entries) > 1]


def numbers(entry: str) -> list[str]:
    """The numbers of a entry: a value, or a value with its interval or standard error."""
    return re.findall(r"[+-]?\d*\.?\d+", entry)


def numbers_in(text: str, sentence: str) -> tuple[str, ...]:
    """Numbers of a sentence of the text; ⟨N⟩ stands for a number, ⟨I⟩ for an interval.

    Raises:
        ClickException: the sentence is not there once.
    """
    pattern = re.escape(sentence).replace(r"\ ", " ")
    pattern = pattern.replace("⟨N⟩", NUMBER).replace("⟨I⟩", INTERVAL)
    matches = re.findall(pattern, text)
    if len(matches) != 1:
        raise click.ClickException(f"expected this sentence once, not {len(matches)}: {sentence}")
    return matches[0] if isinstance(matches[0], tuple) else (matches[0],)


def tokens_an_answer(text: str) -> dict[str, float]:
    """By data set, the mean of the 500 answers of the analysis of heads."""
    counts = numbers_in(
        text, "first 500 examples of each split, which yields ⟨N⟩, ⟨N⟩, ⟨N⟩, and ⟨N⟩ generated "
        "tokens on CoQA, SQuAD, BabiQA, and TriviaQA",
    )  # fmt: skip
    return {name: int(count) / 500 for name, count in zip(DATASETS, counts, strict=True)}


def datasets(latex: str, text: str) -> Iterator[Row]:
    for dataset, _, prompt, answer, quality in table(latex, "tab:datasets")[1:]:
        about = "datasets", "tab:datasets", f"{PRIMARY} / {dataset}"
        yield row(*about, "median tokens of the prompt", "tokens", [prompt], n=ROWS[dataset])
        yield row(*about, "median tokens of the answer", "tokens", [answer], n=ROWS[dataset])
        yield row(*about, "mean quality", "quality", [quality], n=ROWS[dataset])
    counts = numbers_in(
        text, "Cluster counts are ⟨N⟩ on CoQA, ⟨N⟩ on SQuAD, ⟨N⟩ on BabiQA, and ⟨N⟩ on TriviaQA"
    )
    for dataset, count in zip(DATASETS, counts, strict=True):
        about = "datasets", "tab:h2h", f" / {dataset}"
        yield row(*about, "clusters", "clusters", [count], n=ROWS[dataset])
    for dataset, each in tokens_an_answer(text).items():
        about = "datasets", "app:mechanism-details", f"{PRIMARY} / {dataset}"
        yield row(*about, "tokens an answer", "tokens", [f"{each:.2f}"], n="500")
    empty, wrong, right, auroc = numbers_in(
        text, "On this task ⟨N⟩% of the greedy generations contain nothing but whitespace and "
        "wrong answers are much shorter than correct ones (⟨N⟩ against ⟨N⟩ tokens on average), "
        "which depresses length-sensitive scores such as MSP in that column, whose error-detection "
        "AUROC falls to ⟨N⟩",
    )  # fmt: skip
    about = "datasets", "app:full-sweep", "Llama-2-7B / SQuAD"
    rows = {"n": ROWS["SQuAD"]}
    yield row(*about, "empty answers", "percent", [empty], **rows)
    yield row(*about, "mean tokens of wrong answers", "tokens", [wrong], **rows)
    yield row(*about, "mean tokens of right answers", "tokens", [right], **rows)
    msp = {"method": "MaximumSequenceProbability"}
    yield row(*about, "AUROC", "AUROC", [auroc], **rows, **msp)


def method_of(printed: str) -> tuple[str, str]:
    """(name, depth) of a method as the tables print it."""
    variant = re.fullmatch(r"((?:Sem-|Adapt-)?ASMI) \((\d+)\\?%(?:, K=64)?\)", printed)
    if variant:
        return variant[1], f"{int(variant[2]) / 100:g}"
    return METHODS.get(printed, printed), ""


def benchmark(latex: str) -> Iterator[Row]:
    settings = {}
    for label, pair in zip(MAIN, (DATASETS[:2], DATASETS[2:]), strict=True):
        columns = [f"{model} / {dataset}" for model in BACKBONES for dataset in pair]
        for printed, *entries in table(latex, label):
            if len(entries) != len(columns) or "±" not in entries[0]:
                continue
            method, depth = method_of(printed)
            for where, entry in zip(columns, entries, strict=True):
                value, error = numbers(entry)
                n = ROWS[where.partition(" / ")[2]]
                settings[method, depth, where] = normalised(value)
                yield row(
                    "benchmark", label, where, "PRR", "PRR", [value], method=method, depth=depth,
                    n=n, error=error,
                )  # fmt: skip
    columns = [f"{model} / {dataset}" for model in BACKBONES for dataset in DATASETS]
    for printed, *entries in table(latex, "tab:bench_main"):
        if len(entries) != len(columns) or not numbers(entries[0]):
            continue
        for where, entry in zip(columns, entries, strict=True):
            key = (*method_of(printed), where)
            if settings.get(key) != normalised(entry):
                raise click.ClickException(
                    f"tab:bench_main has {entry} for {' '.join(key)}, the long table "
                    f"{settings.get(key)}"
                )


def head_to_head(latex: str) -> Iterator[Row]:
    model = ""
    for backbone, dataset, top, best, *differences in table(latex, "tab:h2h")[1:]:
        model = backbone or model
        about = "head_to_head", "tab:h2h", f"{model} / {dataset}"
        rows = {"depth": OPERATING, "n": ROWS[dataset]}
        (top_method, top_prr), (best_method, best_prr) = (
            re.fullmatch(r"(.*) \((.*)\)", entry).groups() for entry in (top, best)
        )
        best_method = METHODS.get(best_method, best_method)
        yield row(*about, "PRR", "PRR", [top_prr], method=top_method, **rows)
        yield row(*about, "PRR", "PRR", [best_prr], method=best_method, n=ROWS[dataset])
        pairs = (
            (top_method, "SemanticEntropy"), (top_method, best_method),
            ("Sem-ASMI", "SemanticEntropy"),
        )  # fmt: skip
        columns = ("top variant", "top variant and best baseline", "Sem-ASMI")
        for (first, second), column, entry in zip(pairs, columns, differences, strict=True):
            yield row(
                *about, f"difference of PRR, {column}", "PRR difference", numbers(entry),
                method=f"{first} − {second}", **rows,
            )  # fmt: skip


def distinct(latex: str, text: str) -> Iterator[Row]:
    for model, printed, residual, added in table(latex, "tab:app-distinct")[1:]:
        dataset, _, draw = printed.partition(", ")
        about = "distinct_signal", "tab:app-distinct", f"{model} / {dataset}"
        rows = {"method": "Sem-ASMI", "depth": OPERATING}
        rows["n"] = ANALYSED[dataset] if model == PRIMARY else ""
        kind = f", {draw}" if draw else ""
        yield row(*about, f"residual AUROC{kind}", "AUROC", numbers(residual), **rows)
        yield row(*about, f"incremental AUROC{kind}", "AUROC difference", numbers(added), **rows)
    rows = {"depth": OPERATING}
    label = "distinct_signal", "app:distinct"
    raw, _ = numbers_in(
        text, "on BabiQA at Qwen3-8B it exceeds the weighted score (⟨N⟩ against ⟨N⟩)"
    )
    where = "Qwen3-8B / BabiQA"
    yield row(*label, where, "residual AUROC", "AUROC", [raw], method="ASMI", **rows)
    _, quartile, maximum = numbers_in(
        text, "from ⟨N⟩ for the mean to ⟨N⟩ for the top-quartile mean and ⟨N⟩ for the max"
    )
    where, rows["n"] = f"{PRIMARY} / SQuAD", ANALYSED["SQuAD"]
    for name, value in (("top-quartile mean", quartile), ("max", maximum)):
        quantity = f"residual AUROC, {name}"
        yield row(*label, where, quantity, "AUROC", [value], method="Sem-ASMI", **rows)
    (alike,) = numbers_in(
        text, "draws of the same estimator, correlating at ⟨N⟩ at the sequence level"
    )
    quantity = "correlation of two draws"
    yield row(*label, where, quantity, "correlation", [alike], method="Sem-ASMI", **rows)
    numbers_of_kernel = numbers_in(
        text, "beyond the masking disagreement on synthetic BabiQA (⟨N⟩ ⟨I⟩) and little on real "
        "CoQA (⟨N⟩ ⟨I⟩)",
    )  # fmt: skip
    for dataset, at in (("BabiQA", 0), ("CoQA", 3)):
        yield row(
            "distinct_signal", "app:distinct", f"{PRIMARY} / {dataset}",
            "residual AUROC over both entropies", "AUROC", numbers_of_kernel[at : at + 3],
            method="Sem-ASMI", depth=OPERATING, n=ANALYSED[dataset],
        )  # fmt: skip


def entropies(text: str) -> Iterator[Row]:
    lowest, highest = numbers_in(text, "with Spearman rank correlations from ⟨N⟩ to ⟨N⟩")
    about = "ensemble_mean", "app:distinct"
    for end, value in (("lowest", lowest), ("highest", highest)):
        yield row(
            *about, f"{PRIMARY} / ", f"Spearman with H, {end} of three data sets", "correlation",
            [value], method="H(p̄)", depth=OPERATING,
        )  # fmt: skip
    gains = numbers_in(
        text, "u^{sem} does, by ⟨N⟩ PRR on BabiQA (95% CI ⟨I⟩) and ⟨N⟩ on CoQA (⟨I⟩) under the same"
    )
    for dataset, at in (("BabiQA", 0), ("CoQA", 3)):
        yield row(
            *about, f"{PRIMARY} / {dataset}", "difference of PRR", "PRR difference",
            gains[at : at + 3], method="Sem-ASMI − H(p̄)", depth=OPERATING, n=ANALYSED[dataset],
        )  # fmt: skip
    (p_value,) = numbers_in(text, "entropy flag balanced disjoint error sets (McNemar p = ⟨N⟩)")
    yield row(
        "matched_flags", "app:distinct", f"{PRIMARY} / BabiQA", "McNemar p", "p", [p_value],
        method="Sem-ASMI − MeanTokenEntropy", depth=OPERATING, n=ANALYSED["BabiQA"],
    )  # fmt: skip


def quadrants(text: str) -> Iterator[Row]:
    rates = numbers_in(
        text, "confident-but-fragile predictions fail ⟨N⟩% against ⟨N⟩% for confident-robust"
    )
    rows = {"method": "Sem-ASMI", "depth": OPERATING}
    about = "confident_fragile", "fig:confident-fragile", f"{PRIMARY} / BabiQA"
    for name, value in zip(("fragile", "robust"), rates, strict=True):
        quantity = f"error rate, confident and {name}"
        yield row(*about, quantity, "percent", [value], **rows, n=ANALYSED["BabiQA"])
    babi = numbers_in(text, "carries an error gap of ⟨N⟩ ⟨I⟩ over the confident-robust")
    others = numbers_in(text, "The gap is ⟨N⟩ ⟨I⟩ on CoQA and ⟨N⟩ ⟨I⟩ on TriviaQA")
    for dataset, gap in (("BabiQA", babi), ("CoQA", others[:3]), ("TriviaQA", others[3:])):
        yield row(
            "confident_fragile", "app:distinct", f"{PRIMARY} / {dataset}", "gap of error rates",
            "rate difference", gap, **rows, n=ANALYSED[dataset],
        )  # fmt: skip
    tokens = numbers_in(text, "the gap is not resolvable at the token level (⟨N⟩ ⟨I⟩)")
    yield row(
        "confident_fragile", "app:distinct", f"{PRIMARY} / ", "gap of error rates, tokens",
        "rate difference", tokens, **rows,
    )  # fmt: skip


def payoff(latex: str) -> Iterator[Row]:
    names = ("confident error", "filter by u_sem", "filter by entropy")
    for dataset, *entries in table(latex, "tab:payoff")[1:]:
        about = "payoff", "tab:payoff", f"{PRIMARY} / {dataset}"
        for name, entry in zip(names, entries, strict=True):
            rows = {"depth": OPERATING if name == names[1] else "", "n": ANALYSED[dataset]}
            yield row(*about, name, "rate", [entry], **rows)
    for printed, *entries in table(latex, "tab:payoff-aurc")[1:]:
        dataset = printed.partition(" ")[0]
        about = "aurc", "tab:payoff-aurc", f"{PRIMARY} / {dataset}"
        names = ("MaximumSequenceProbability", "MeanTokenEntropy", "Sem-ASMI")
        for name, entry in zip(names, entries, strict=True):
            rows = {"depth": OPERATING if name == names[2] else "", "n": ANALYSED[dataset]}
            yield row(*about, "AURC", "rate", [entry], method=name, **rows)


def boundary(text: str) -> Iterator[Row]:
    rows = {"method": "Sem-ASMI − MaximumSequenceProbability", "depth": OPERATING, "n": "5000"}
    opened = numbers_in(text, "statistical tie in the open-book condition (⟨N⟩, 95% CI ⟨I⟩)")
    closed = numbers_in(text, "significantly negative once the passage is removed (⟨N⟩, CI ⟨I⟩)")
    qualities = numbers_in(text, "raises the base error rate sharply (mean AlignScore ⟨N⟩ to ⟨N⟩)")
    datasets = ("SQuAD", "SQuAD without passage")
    for dataset, gap, quality in zip(datasets, (opened, closed), qualities, strict=True):
        about = "boundary", "app:boundary", f"{PRIMARY} / {dataset}"
        yield row(*about, "difference of PRR", "PRR difference", gap, **rows)
        yield row(*about, "mean quality", "quality", [quality], n="5000")
    about = "larger_k", "app:boundary", f"{PRIMARY} / TriviaQA"
    (coverage,) = numbers_in(text, "Mean token coverage rises to ⟨N⟩, where")
    yield row(*about, "mean coverage, K = 256", "coverage", [coverage], depth=OPERATING, n="5000")
    below = numbers_in(text, "significantly below MSP, a paired gap of ⟨N⟩ PRR (95% CI ⟨I⟩)")
    yield row(*about, "difference of PRR, K = 256", "PRR difference", below, **rows)
    larger = numbers_in(
        text, "slightly negative (⟨N⟩, CI ⟨I⟩ for Sem-ASMI and ⟨N⟩, CI ⟨I⟩ for raw MI)"
    )
    for method, gap in (("Sem-ASMI", larger[:3]), ("ASMI", larger[3:])):
        quantity = "difference of PRR, K = 256 − K = 64"
        yield row(*about, quantity, "PRR difference", gap, method=method, depth=OPERATING)


def coverage(latex: str, text: str) -> Iterator[Row]:
    heading, *lines = table(latex, "tab:topk-highmi")
    sizes = [entry.removeprefix("K=") for entry in heading[2:]]
    each = tokens_an_answer(text)
    rows = {}
    for dataset, tokens, *entries in lines:
        about = "top_k_coverage", "tab:topk-highmi", f"{PRIMARY} / {dataset}"
        # A tenth of all tokens has high MI: these are of 979 to 1,020 answers.
        answers = round(10 * int(tokens) / each[dataset], -3)
        rows[dataset] = {"depth": OPERATING, "n": f"{answers:.0f}"}
        for size, entry in zip(sizes, entries, strict=True):
            quantity = f"coverage of high MI, K = {size}"
            yield row(*about, quantity, "coverage", [entry], **rows[dataset])
    (percent,) = numbers_in(text, "TriviaQA reaches 77.3% and remains at ⟨N⟩% even at K = 256")
    about = "top_k_coverage", "app:topk-coverage", f"{PRIMARY} / TriviaQA"
    quantity = "coverage of high MI, K = 256"
    yield row(*about, quantity, "coverage", [f"{float(percent) / 100:.3f}"], **rows["TriviaQA"])


def mechanism(latex: str, text: str) -> Iterator[Row]:
    names = ("mean MI_t", "mean MI_t of right answers", "mean MI_t of wrong answers")
    for model, *entries in table(latex, "tab:babiqa-mechanism")[1:]:
        about = "error_separation", "tab:babiqa-mechanism", f"{model} / BabiQA"
        rows = {"depth": OPERATING, "n": ROWS["BabiQA"]}
        for name, entry in zip(names, entries[:3], strict=True):
            yield row(*about, name, "nats", [entry], **rows)
        yield row(*about, "AUROC", "AUROC", [entries[3]], method="ASMI", **rows)
        yield row(*about, "AUROC", "AUROC", [entries[4]], method="MaximumSequenceProbability",
                  n=ROWS["BabiQA"])  # fmt: skip
    median, *_ = numbers_in(
        text, "The token-level MI_t has median ⟨N⟩ and mean ⟨N⟩, against ⟨N⟩ on"
    )
    about = "error_separation", "app:full-sweep", "Llama-2-7B / BabiQA"
    yield row(*about, "median MI_t", "nats", [median], depth=OPERATING, n=ROWS["BabiQA"])
    (pearson,) = numbers_in(text, "Joint distribution of MI_t and A_t (Pearson r = ⟨N⟩)")
    about = "mechanism", "fig:mechanism", " / CoQA"
    yield row(*about, "Pearson r of MI_t and A_t", "correlation", [pearson], depth=OPERATING)


def heads(latex: str, text: str) -> Iterator[Row]:
    rows = {"depth": OPERATING, "n": "500"}
    for dataset, information, entropy, count in table(latex, "tab:op-coupling")[1:]:
        about = "head_coupling", "tab:op-coupling", f"{PRIMARY} / {dataset}"
        yield row(*about, "ρ(MI_t, z_t)", "correlation", numbers(information), **rows)
        yield row(*about, "ρ(H_t, z_t)", "correlation", numbers(entropy), **rows)
        yield row(*about, "n_eff of high MI", "heads", [count], **rows)
    _, deep = numbers_in(
        text, "the coupling sharpens with depth, from ⟨N⟩ at the operating layer to ⟨N⟩"
    )
    about = "head_coupling", "app:mechanism-details", f"{PRIMARY} / CoQA"
    quantity = "ρ(MI_t, z_t), four layers from the top"
    yield row(*about, quantity, "correlation", [deep], n="500")
    heading, *lines = table(latex, "tab:causal-flip")
    sizes = [entry.removeprefix("k=") for entry in heading[1:]]
    for dataset, *entries in lines:
        about = "causal_probe", "tab:causal-flip", f"{PRIMARY} / {dataset}"
        for size, entry in zip(sizes, entries, strict=True):
            yield row(*about, f"flips of high MI, k = {size}", "percent", [entry], **rows)
    (most,) = numbers_in(text, "The 200 lowest-MI tokens flip at most ⟨N⟩% throughout")
    about = "causal_probe", "tab:causal-flip", f"{PRIMARY} / "
    yield row(*about, "flips of low MI, at most", "percent", [most], **rows)


def depths(text: str) -> Iterator[Row]:
    about = "depth_selection", "app:full-sweep", " / "
    aggregate = numbers_in(
        text, "normalized PRR is highest at 60% (⟨N⟩) against ⟨N⟩, ⟨N⟩, and ⟨N⟩ at the deeper"
    )
    for depth, value in zip(("0.6", "0.7", "0.8", "0.9"), aggregate, strict=True):
        quantity = "mean PRR of sixteen settings"
        yield row(*about, quantity, "PRR", [value], method="Adapt-ASMI", depth=depth)
    chosen, next_depth, lost_nothing, regret = numbers_in(
        text, "60% is selected in ⟨N⟩% of the splits, the remaining ⟨N⟩% go to 70%, and 80% and "
        "90% are never selected, with zero out-of-half regret in ⟨N⟩% of splits and a mean regret "
        "of ⟨N⟩ PRR",
    )  # fmt: skip
    of = {"method": "Adapt-ASMI"}
    yield row(*about, "selected on halves", "percent", [chosen], depth="0.6", **of)
    yield row(*about, "selected on halves", "percent", [next_depth], depth="0.7", **of)
    yield row(*about, "no regret", "percent", [lost_nothing], **of)
    yield row(*about, "mean regret", "PRR difference", [regret], **of)
    (other,) = numbers_in(text, "The selection reproduces for Sem-ASMI at ⟨N⟩%")
    yield row(*about, "selected on halves", "percent", [other], method="Sem-ASMI", depth="0.6")


def stability(latex: str) -> Iterator[Row]:
    for printed, mean, sd, ends, rho in table(latex, "tab:stability")[1:]:
        method = METHODS.get(printed, printed)
        about = "stability", "tab:stability", " / CoQA"
        rows = {"method": method, "depth": "", "n": "500"}
        low, high = numbers(ends)
        yield row(*about, "mean PRR", "PRR", [mean], **rows)
        yield row(*about, "sd of PRR", "PRR difference", [sd], **rows)
        yield row(*about, "lowest PRR", "PRR", [low], **rows)
        yield row(*about, "highest PRR", "PRR", [high], **rows)
        yield row(*about, "rank ρ", "correlation", [rho], **rows)


def cost(latex: str, text: str) -> Iterator[Row]:
    methods = ("MSP", "Semantic Entropy", "Sem-ASMI", "Adapt-ASMI", "Sem-ASMI, marginal")
    for method, (_, *entries) in zip(methods, table(latex, "tab:cost")[1:], strict=True):
        for dataset, entry in zip(DATASETS, entries, strict=False):
            about = "cost", "tab:cost", f"{PRIMARY} / {dataset}"
            yield row(*about, method, "seconds", [entry], n="200")
    phases = {
        "greedy answer": "greedy response ⟨N⟩ and ⟨N⟩ seconds",
        "ten samples": "drawn as one batch ⟨N⟩ and ⟨N⟩",
        "NLI": "NLI clustering for Semantic Entropy ⟨N⟩ and ⟨N⟩",
        "masked passes, batched": "mask-batched ASMI scoring ⟨N⟩ and ⟨N⟩",
        "masked passes, one at a time": "sequential ASMI scoring ⟨N⟩ and ⟨N⟩",
    }
    for phase, sentence in phases.items():
        for dataset, value in zip(DATASETS, numbers_in(text, sentence), strict=False):
            about = "cost", "app:cost", f"{PRIMARY} / {dataset}"
            yield row(*about, phase, "seconds", [value], n="200")
    ends = numbers_in(text, "Peak memory spans ⟨N⟩ to ⟨N⟩ GB across all methods")
    for end, value in zip(("lowest", "highest"), ends, strict=True):
        about = "cost", "app:cost", f"{PRIMARY} / "
        yield row(*about, f"peak memory, {end}", "GB", [value], n="200")


def paper_rows(latex: str) -> list[Row]:
    """Every number, in the order of the functions above, and within them of print."""
    text = cleaned(latex)
    rows = [
        *datasets(latex, text), *benchmark(latex), *head_to_head(latex), *distinct(latex, text),
        *entropies(text), *quadrants(text), *payoff(latex), *boundary(text),
        *coverage(latex, text), *mechanism(latex, text), *heads(latex, text), *depths(text),
        *stability(latex), *cost(latex, text),
    ]  # fmt: skip
    for number in rows:
        for name in ("value", "error", "low", "high"):
            text = getattr(number, name)
            if not re.fullmatch(r"-?\d+(\.\d+)?", text) and (text or name == "value"):
                raise click.ClickException(f"{name} is {text!r}, not a number: {number}")
    return rows


@click.command()
@click.argument("paper", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=FILE)
@click.option("--check", is_flag=True, help="Compare with the file instead of writing it.")
def main(paper: Path, out: Path, check: bool) -> None:
    """Write the numbers of PAPER, a LaTeX file, as a table."""
    rows = paper_rows(paper.read_text(encoding="utf-8"))
    written = io.StringIO()
    writer = csv.writer(written, lineterminator="\n")
    writer.writerows([Row._fields, *rows])
    if not check:
        out.write_text(written.getvalue(), encoding="utf-8")
        click.echo(f"{len(rows)} numbers in {out}")
        return
    new, old = (text.splitlines() for text in (written.getvalue(), out.read_text(encoding="utf-8")))
    changed = [line for line in new if line not in old] + [line for line in old if line not in new]
    if new != old:
        print("\n".join(changed or ["the order of rows"]), file=sys.stderr)
        raise click.ClickException(f"{out} differs from {paper}")
    click.echo(f"{len(rows)} numbers as in {paper}")


if __name__ == "__main__":
    main()
