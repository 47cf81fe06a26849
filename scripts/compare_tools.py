"""PRR of uqlm's, TruthTorchLM's, LM-Polygraph's and this plugin's scores on the same answers.

    python scripts/compare_tools.py FOLDER

SmolLM2-135M-Instruct answers the demo's questions greedily. Answers and their log-probabilities
are saved in FOLDER, and every tool that is installed here scores them. uqlm and TruthTorchLM may
need environments of their own: run the same command in each of them, and again in the first one.
The table shows all scores in FOLDER and lists the tools without scores.

The scores are those that read one greedy answer. Scores that sample answers, or that need a side
model or an API, are left out.
"""

import json
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click
import numpy as np

MAX_TOKENS, TOP, STOP = 20, 15, "\n"
Rows = list[dict[str, Any]]
Scores = dict[str, list[float]]
"""Uncertainties of all answers by score; higher = more uncertain."""


def answer_question(model: Any, tokenizer: Any, question: Any) -> dict[str, Any]:
    """The greedy answer to a question of the demo, with the values that white-box scores read."""
    import torch

    from lm_polygraph_asmi.host.quality import reference_in_answer
    from lm_polygraph_asmi.runs.squad import prompt_of

    text = prompt_of("demo", False)(question)
    prompt = tokenizer(text, return_tensors="pt").input_ids
    ends = [i for token, i in tokenizer.get_vocab().items() if "\u010a" in token]  # a line break
    generated = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, output_logits=True,
        max_new_tokens=MAX_TOKENS, eos_token_id=[*ends, tokenizer.eos_token_id],
        pad_token_id=tokenizer.pad_token_id, return_dict_in_generate=True,
    )  # fmt: skip
    log_probs = torch.cat(generated.logits).double().log_softmax(-1)  # (tokens, vocabulary)
    ids = generated.sequences[0, prompt.shape[1] :]
    answer = tokenizer.decode(ids, skip_special_tokens=True).strip()
    return {
        "prompt": text,
        "passage": question.passage,
        "question": question.question,
        "answer": answer,
        "correct": reference_in_answer(answer, question.answer),
        "tokens": ids.tolist(),
        "log_probs": log_probs.gather(1, ids[:, None])[:, 0].tolist(),
        "entropy": (-log_probs.exp() * log_probs).sum(-1).tolist(),
        "top": log_probs.topk(TOP).values.tolist(),
    }


def answer_questions(limit: int) -> Rows:
    from tqdm import tqdm

    from lm_polygraph_asmi.host.loading import load_named
    from lm_polygraph_asmi.runs.rows import spread
    from lm_polygraph_asmi.runs.squad import DEMO_DATA, read_squad

    questions = spread(read_squad(DEMO_DATA), limit)
    return [answer_question(*load_named("smollm2"), q) for q in tqdm(questions, desc="answers")]


def lm_polygraph(rows: Rows) -> Scores:
    from lm_polygraph import estimators

    stats = {
        "greedy_log_likelihoods": [row["log_probs"] for row in rows],
        "entropy": [row["entropy"] for row in rows],
    }
    names = ("MaximumSequenceProbability", "Perplexity", "MeanTokenEntropy")
    return {name: list(getattr(estimators, name)()(stats)) for name in names}


def lm_polygraph_asmi(rows: Rows) -> Scores:
    from tqdm import tqdm

    from lm_polygraph_asmi import Scorer

    scorer = Scorer("smollm2", stop=STOP, scope="response")
    scores = [scorer.score(r["prompt"], r["tokens"]).score for r in tqdm(rows, desc="Sem-ASMI")]
    return {"Sem-ASMI, scope response": scores}


def uqlm(rows: Rows) -> Scores:
    import asyncio

    from uqlm import WhiteBoxUQ

    names = ["sequence_probability", "min_probability", "probability_margin"]
    names += ["mean_token_negentropy", "min_token_negentropy"]
    api_logprobs = [
        [
            {"logprob": log_prob, "top_logprobs": [{"logprob": other} for other in top]}
            for log_prob, top in zip(row["log_probs"], row["top"], strict=True)
        ]
        for row in rows
    ]
    scorer = WhiteBoxUQ(scorers=names, top_k_logprobs=TOP)
    results = asyncio.run(scorer.score(logprobs_results=api_logprobs, show_progress_bars=False))
    return {name: [-confidence for confidence in results.data[name]] for name in names}


def TruthTorchLM(rows: Rows) -> Scores:
    from TruthTorchLM import scoring_methods, truth_methods

    methods = {
        "Confidence": truth_methods.Confidence(),
        "Confidence, LogProbScoring": truth_methods.Confidence(scoring_methods.LogProbScoring()),
    }
    return {
        # A model given by name is treated as an API; its log-probabilities are passed in.
        name: [
            -method(model="smollm2", generated_text=row["answer"], logprobs=row["log_probs"])[
                "truth_value"
            ]
            for row in rows
        ]
        for name, method in methods.items()
    }


TOOLS: dict[str, tuple[str, Callable[[Rows], Scores]]] = {
    "LM-Polygraph": ("lm_polygraph", lm_polygraph),
    "this plugin": ("lm_polygraph_asmi", lm_polygraph_asmi),
    "uqlm": ("uqlm", uqlm),
    "TruthTorchLM": ("TruthTorchLM", TruthTorchLM),
}


def print_table(rows: Rows, saved: dict[str, dict[str, Any]]) -> None:
    from lm_polygraph_asmi.analysis import Labelled, normalised_prr, prr_draws
    from lm_polygraph_asmi.analysis.clusters import RESAMPLES, percentile_interval

    correct, passages = [row["correct"] for row in rows], [row["passage"] for row in rows]
    names = [(tool, name) for tool, kept in saved.items() for name in kept["scores"]]
    scores = [saved[tool]["scores"][name] for tool, name in names]
    values = np.array([normalised_prr(score, correct) for score in scores])
    drawn = prr_draws(scores, Labelled(quality=correct, clusters=passages, resamples=RESAMPLES))
    base, clusters = names.index(("LM-Polygraph", "Perplexity")), len(set(passages))
    click.echo(f"{len(rows)} answers, {clusters} passages, {np.mean(correct):.0%} correct\n")
    click.echo("| tool | score | PRR [95 %] | minus Perplexity [95 %] |")
    click.echo("| --- " * 4 + "|")
    for i in range(len(names)):
        tool, name = names[i]
        prr = percentile_interval(values[i], drawn[:, i], clusters)
        gap = percentile_interval(values[i] - values[base], drawn[:, i] - drawn[:, base], clusters)
        shown = "" if i == base else str(gap)
        click.echo(f"| {tool} {saved[tool]['version']} | {name} | {prr} | {shown} |")


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--limit", default=40, show_default=True, help="Questions, evenly spaced.")
def main(folder: Path, limit: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    answers, saved = folder / "answers.json", {}
    if not answers.exists():
        answers.write_text(json.dumps(answer_questions(limit)))
    rows = json.loads(answers.read_text())
    for tool, (package, score) in TOOLS.items():
        file = folder / f"{package}.json"
        if not file.exists() and find_spec(package):
            kept = {"version": version(package), "scores": score(rows)}
            file.write_text(json.dumps(kept, default=float))
        if file.exists():
            saved[tool] = json.loads(file.read_text())
        else:
            click.echo(f"{tool}: not installed here, and no scores in {folder}")
    if find_spec("lm_polygraph_asmi"):
        print_table(rows, saved)


if __name__ == "__main__":
    main()
