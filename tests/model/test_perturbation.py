"""What a perturbation may be; the controls are in tests/experiments/test_perturbations.py."""

import pytest

from lm_polygraph_asmi.model import Perturbation, check_perturbation
from lm_polygraph_asmi.model.perturbation import MLP, OUTPUT, WITHOUT_HEADS


def unchanged(values, _):
    return values


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"edit": unchanged}, "expected another name than 'heads'"),
        ({"site": MLP}, "expected another name than 'heads'"),
        ({"as_heads": True}, "expected another name than 'heads'"),
        ({"name": "new", "site": "attention"}, "site must be one of 'heads', 'mlp', 'output'"),
        ({"name": "no name"}, "perturbation must be a name such as 'heads', got 'no name'"),
        ({"scale": 0.0}, "perturbation_scale must be above 0"),
        ({"scale": float("nan")}, "perturbation_scale"),
    ],
)
def test_what_is_no_perturbation(wrong, said):
    with pytest.raises(ValueError, match=said):
        Perturbation(**wrong)


def test_checked_passes_are_those_of_one_kind():
    """The self-check of one perturbation says nothing of another."""
    several = [
        WITHOUT_HEADS, Perturbation(scale=2.0), Perturbation("new", unchanged),
        Perturbation("other", unchanged, OUTPUT),
    ]  # fmt: skip
    assert len({change.kind for change in several}) == len(several)
    assert Perturbation(scale=2.0).kind == Perturbation(scale=3.0, seed=1).kind


def test_head_outputs_that_are_read_must_be_there(llama):
    change = Perturbation("new", unchanged, reads_heads=True)
    check_perturbation(llama, 2, change)
    with pytest.raises(TypeError, match="'new' needs the head outputs of the unmasked pass"):
        check_perturbation(llama, 2, change, heads=False)
