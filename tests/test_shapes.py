"""Types and shapes in signatures are checked whenever a test calls what has them."""

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from jaxtyping import TypeCheckError

from lm_polygraph_asmi.analysis.clusters import Medians
from lm_polygraph_asmi.analysis.comparison import BootstrapAUROC
from lm_polygraph_asmi.analysis.prr import Rejection
from lm_polygraph_asmi.core.maths.information import mask_weights
from lm_polygraph_asmi.core.model import Subnetworks, rounding
from lm_polygraph_asmi.core.model.unmasked import running
from lm_polygraph_asmi.core.scores import discount
from lm_polygraph_asmi.scoring.generation import Generation
from tests.conftest import EVERY_PASS

ROOT = Path(__file__).parents[1]
ROW, MATRIX = torch.ones(2), torch.ones(2, 2)


@pytest.mark.parametrize(
    "call",
    [
        lambda: mask_weights(MATRIX, 2),
        lambda: mask_weights(ROW.long(), 2),
        lambda: rounding.variation(MATRIX, torch.ones(2, 3)),
        lambda: Subnetworks(MATRIX, ROW, ROW.long()),
        lambda: discount("sem"),
        lambda: Generation(None, None).greedy(MATRIX.long(), 3),
        lambda: Medians(np.ones(3))(np.ones(3, dtype=int)),
        lambda: BootstrapAUROC(np.ones(3), np.ones(3)),
        lambda: Rejection([1.0, 2.0], np.ones(2)).area(np.eye(2), np.ones(2)),
    ],
)
def test_another_shape_or_type_is_told(call):
    with pytest.raises(TypeCheckError):
        call()


def test_every_module_with_shapes_is_checked(pytestconfig):
    *checked, checker = pytestconfig.getoption("--jaxtyping-packages").split(",")
    assert (checker, {name for name in checked if not find_spec(name)}) == ("tests.check", set())
    files = [
        f for f in ROOT.rglob("lm_polygraph_asmi/**/*.py") if "jaxtyping" in f.read_text("utf-8")
    ]
    modules = [".".join((*file.relative_to(ROOT).with_suffix("").parts, "")) for file in files]
    unchecked = {of for of in modules if not of.startswith(tuple(f"{name}." for name in checked))}
    assert unchecked == {f"{name}." for name in EVERY_PASS}


@pytest.mark.slow
def test_what_is_made_for_every_pass_is_checked_too():
    with pytest.raises(TypeCheckError):
        running(None, MATRIX.long())
