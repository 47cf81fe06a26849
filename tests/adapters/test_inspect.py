"""The scorer of Inspect, in Inspect's own evaluations."""
# ruff: noqa: E402 - what follows needs the extra, and skips without it

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import anyio
import pytest

from lm_polygraph_asmi.adapters.contract import open_scorer

inspect_ai = pytest.importorskip("inspect_ai")
adapter = pytest.importorskip("lm_polygraph_asmi.adapters.inspect")

from inspect_ai.dataset import Sample
from inspect_ai.log import read_eval_log
from inspect_ai.model import (
    ChatMessageAssistant,
    ChatMessageTool,
    ChatMessageUser,
    ContentText,
    get_model,
)
from inspect_ai.solver import generate

from tests.pages import DOCS, blocks, section


def evaluated(folder, tmp_path, number=10, **how):
    task = inspect_ai.Task(
        dataset=[Sample(input=f"Who was captain {n}?", target="Holm") for n in range(number)],
        solver=generate(max_tokens=6),
        scorer=adapter.asmi(scope="response"),
    )
    model = get_model(
        "hf/tiny",
        model_path=str(folder),
        tokenizer_path=str(folder),
        do_sample=False,
        memoize=False,
    )
    (log,) = inspect_ai.eval(task, model=model, log_dir=str(tmp_path), display="none", **how)
    return read_eval_log(log.location)


def test_ten_questions(folder, tmp_path):
    log = evaluated(folder, tmp_path, max_connections=3)  # answers and scores side by side
    assert log.status == "success", log.error
    scorer = open_scorer(str(folder), scope="response")
    assert len(log.samples) == 10
    for sample in log.samples:
        found = sample.scores["asmi"]
        prompt = f"user: {sample.input}\nassistant:"  # what the template makes of it
        expected = scorer.score(prompt, sample.output.completion)
        assert found.value == pytest.approx(expected.score, abs=1e-5)
        assert found.metadata["perplexity"] == pytest.approx(
            expected.signals["perplexity"], abs=1e-5
        )
        assert found.metadata["decision"] is None
        assert found.explanation == "No decision: there is no calibration."
        assert found.answer == sample.output.completion
    mean = log.results.scores[0].metrics["mean"].value
    assert mean == pytest.approx(sum(s.scores["asmi"].value for s in log.samples) / 10)


def test_only_models_with_weights_at_hand(monkeypatch):
    model = SimpleNamespace(api=SimpleNamespace(model_name="gpt"))
    monkeypatch.setattr(adapter, "get_model", lambda: model)
    state = SimpleNamespace(model="openai/gpt", messages=[], tools=[])
    with pytest.raises(TypeError, match="expected a model of Inspect's provider hf/, got openai"):
        anyio.run(adapter.asmi(), state, None)


USER, ANSWER = ChatMessageUser(content="Who?"), ChatMessageAssistant(content=" Holm")


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([USER, USER, ANSWER], "no two user messages in a row"),
        ([USER, ChatMessageTool(content="7"), ANSWER], "without tools"),
        ([USER], "expected the last message to be the model's answer"),
        ([USER, ChatMessageAssistant(content="")], "expected the last message"),
    ],
)
def test_what_cannot_be_told_is_an_error(messages, said):
    with pytest.raises(ValueError, match=said):
        adapter._messages_and_answer(SimpleNamespace(messages=messages, tools=[]))
    assert adapter._messages_and_answer(SimpleNamespace(messages=[USER, ANSWER], tools=[])) == (
        [USER],
        " Holm",
    )
    parts = ChatMessageAssistant(content=[ContentText(text=" Edda"), ContentText(text=" Holm")])
    state = SimpleNamespace(messages=[USER, parts], tools=[])
    assert adapter._messages_and_answer(state) == ([USER], " Edda Holm")


def test_inspect_finds_it_by_name():
    """The entry point is that of this project's metadata, where it is installed with it."""
    found = [one for one in entry_points(group="inspect_ai") if one.name == "lm_polygraph_asmi"]
    if not found:
        pytest.skip("the project was installed before it had the entry point")
    assert found[0].load().asmi is adapter.asmi


@pytest.fixture(params=["tiny", pytest.param("smollm2", marks=pytest.mark.slow)])
def weights(request, folder, tmp_path):
    """How Inspect finds the weights of the model in the page's FOLDER."""
    from lm_polygraph_asmi.host.loading import load_named
    from lm_polygraph_asmi.host.smollm2 import GGUF_FILE, weights_folder

    if request.param == "tiny":
        (tmp_path / "FOLDER").symlink_to(folder)
        return "model_path=FOLDER"
    load_named("smollm2")[1].save_pretrained(tmp_path / "FOLDER")  # a tokenizer; weights are GGUF
    return f"model_path={weights_folder()} -M gguf_file={GGUF_FILE}"


def test_the_page_as_a_user_types_it(weights, tmp_path):
    """`inspect eval` of three questions, and `inspect score` of its log by name."""
    page = tmp_path / "page.md"
    page.write_text(section(DOCS / "how-to/integrations.md", "Inspect"))
    (code,) = blocks("python", page)
    (tmp_path / "ferries.py").write_text(code.parsed)
    evaluate, score = (block.parsed for block in blocks("bash", page))
    program = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

    def run(command):
        done = subprocess.run(
            ["bash", "-euc", command], cwd=tmp_path, capture_output=True, text=True,
            env=os.environ | {"PATH": program, "INSPECT_DISPLAY": "plain"},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]

    run(evaluate.replace("inspect view", "").replace("model_path=FOLDER", weights))
    (file,) = (tmp_path / "logs").glob("*.eval")
    log = read_eval_log(str(file))
    assert (log.status, len(log.samples)) == ("success", 3)
    values = [sample.scores["asmi"].value for sample in log.samples]
    assert min(values) > 0
    if not [one for one in entry_points(group="inspect_ai") if one.name == "lm_polygraph_asmi"]:
        return
    run(score.replace("logs/EVAL.eval", f"'{file}' --action overwrite --overwrite"))
    again = read_eval_log(str(file))
    assert [s.scores["asmi"].value for s in again.samples] == pytest.approx(values, abs=1e-5)
