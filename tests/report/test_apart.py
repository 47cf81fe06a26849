"""Settings side by side: the same files, and errors that name their setting."""

import os
import time
from unittest.mock import Mock

import pytest
from joblib.externals.loky import get_reusable_executor
from joblib.externals.loky.backend import context

from lm_polygraph_asmi.report import build_report, load_run_groups
from lm_polygraph_asmi.report.apart import compute_apart, processes
from lm_polygraph_asmi.report.items import every_report_item
from lm_polygraph_asmi.report.items.signal import payoff
from tests.report.runs import content, manifest, save

FORMATS = ("csv", "md", "tex", "svg", "pdf")
EVERY = pytest.param(every_report_item(), marks=pytest.mark.slow)


@pytest.fixture(autouse=True, scope="module")
def forked(few_resamples):  # noqa: ARG001
    """Processes have imported what this one has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "_DEFAULT_START_METHOD", "fork")
        yield
        get_reusable_executor().shutdown()


@pytest.fixture
def two(tmp_path):
    for name, shift in (("a", 0.0), ("b", 0.3)):
        save(tmp_path / name, content(40, shift=shift), manifest(40, f"asmi_{name}"))
    return lambda: load_run_groups([tmp_path / "a", tmp_path / "b"])


@pytest.mark.parametrize("items", [[payoff], EVERY])
def test_two_processes_write_what_one_writes(items, two, tmp_path, monkeypatch):
    monkeypatch.setattr("lm_polygraph_asmi.report.writing.every_report_item", lambda: items)
    progress = Mock(side_effect=lambda steps, _: steps)
    for jobs in (1, 2):
        build_report(two(), tmp_path / f"out{jobs}", progress, jobs, True, FORMATS)
    assert [name for (_, name), _ in progress.call_args_list] == [
        "Tables", "Figures", "Settings", "Tables", "Figures"
    ]  # fmt: skip
    one, other = (
        {path.relative_to(out): path.read_bytes() for path in out.rglob("*.*")}
        for out in (tmp_path / "out1", tmp_path / "out2")
    )
    assert {path.suffix for path in one} == {f".{form}" for form in (*FORMATS, "html", "png")}
    assert one == other


def test_values_come_back_to_their_settings(two):
    groups = two()

    def name(chosen):
        time.sleep(0.5 * (chosen[0].dataset == "a"))  # the first ends last
        chosen[0].computed["name"] = chosen[0].dataset

    with processes(2):
        compute_apart(groups, [name], lambda steps, _: steps)
    assert [group.computed["name"] for group in groups] == [group.dataset for group in groups]


def test_an_error_in_a_process_names_its_setting(two):
    def fail(chosen):
        if chosen[0].dataset == "b":
            raise KeyError("of b")

    with processes(2), pytest.raises(RuntimeError, match="tiny model, b: KeyError: 'of b'"):
        compute_apart(two(), [fail], lambda steps, _: steps)
    with pytest.raises(ChildProcessError, match="use fewer jobs"), processes(2):
        compute_apart(two(), [lambda _: os._exit(1)], lambda steps, _: steps)
