"""`polygraph_asmi check`: what it says of models that are right, wrong, or cannot be masked."""

import csv
from unittest.mock import Mock

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from lm_polygraph_asmi.commands import main
from lm_polygraph_asmi.core.model import choice, comparison, subnetworks
from tests import tiny_lm


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_lm.save(tmp_path_factory.mktemp("check") / "tiny")


def checked(folder, *options):
    found = CliRunner().invoke(main, ["check", str(folder), *options])
    *table, line = found.stdout.splitlines() or [""]
    return found, "\n".join(table), next(csv.reader([line]), [])


def test_every_way_is_compared_with_full_passes(folder):
    found, table, row = checked(folder)
    assert found.exit_code == 0, found.output
    assert row[:4] == ["LlamaForCausalLM", "by name", "suffix", "packed"]
    assert "float32 on cpu; eager, sdpa; layers 2, 3; differs by" in row[4]
    assert "torch 2." in row[4]
    counted = {name: table.count(name) for name in ("eager", "sdpa", "not on this machine")}
    assert counted == {"eager": 4, "sdpa": 4, "not on this machine": 1}


@pytest.mark.parametrize(("scope", "prompt"), [("all", 12), ("response", 70)])
def test_a_pass_that_the_self_check_did_not_see_is_wrong(folder, monkeypatch, scope, prompt):
    """One that keeps all heads, after one of the prompts; the pass of the other scope is right."""
    fastest = next(iter(choice.PASSES[scope]))
    plain = choice.PASSES[scope][fastest]

    def broken(f, unmasked, layer, masks):
        kept = masks * 0 + 1 if unmasked.prompt_length == prompt else masks
        return plain(f, unmasked, layer, kept)

    monkeypatch.setitem(choice.PASSES[scope], fastest, broken)
    monkeypatch.setattr(subnetworks, "self_check", lambda *_: None)
    monkeypatch.setattr(comparison, "MASKABLE", ("eager",))
    monkeypatch.setattr(comparison, "DEPTHS", (0.6,))
    found, table, row = checked(folder)
    wrong = [line for line in table.splitlines() if "WRONG" in line]
    assert (found.exit_code, len(wrong), "WRONG" in row[4]) == (1, 1, True)
    assert all(scope in line for line in wrong)


def test_models_that_cannot_be_compared(folder, monkeypatch):
    """And passes that fail the self-check, which are named by the slower one."""
    found, *_ = checked(folder, "--structure", "projection=self_attn.q_proj")
    assert (found.exit_code, "projection" in found.stderr) == (1, True)
    assert checked(folder / "none")[0].exit_code == 1
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(comparison, "MASKABLE", ("none", "eager"))
    failing = Mock(side_effect=NotImplementedError("no such layer"))
    monkeypatch.setitem(choice.PASSES["response"], "packed", failing)
    found, table, row = checked(folder)
    assert (found.exit_code, "cannot use" in table) == (0, True)
    assert row[1:4] == ["by name", "suffix", "rows after the prompt"]
    # It keeps its own.
    monkeypatch.setattr(LlamaForCausalLM, "set_attn_implementation", lambda *_: None)
    assert "nothing could be compared" in checked(folder)[0].stderr


def test_a_model_that_was_changed_meanwhile_is_no_attention_that_is_missing(folder, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(folder)
    monkeypatch.setattr(comparison, "_compared", lambda f, *_: f.lm_head.weight.mul_(2))
    with pytest.raises(comparison.ModelChanged):
        comparison.compare_all(model, torch.arange(2, 2 + comparison.LONGEST))


def test_flash_attention_takes_no_float32(folder, monkeypatch):
    model = AutoModelForCausalLM.from_pretrained(folder)
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    monkeypatch.setattr(comparison, "is_flash_attn_2_available", lambda: True)
    monkeypatch.setattr(comparison, "MASKABLE", ())
    with pytest.raises(ValueError, match=r"^nothing could be compared: cannot use torch.float32$"):
        comparison.compare_all(model, torch.arange(2, 2 + comparison.LONGEST))
