"""The arms of the falsifier: each equals whole passes with plain hooks, and is what it says."""

import pytest
import torch

from lm_polygraph_asmi.model import (
    subnetwork_log_probs,
)
from lm_polygraph_asmi.model.perturbation import ARMS
from lm_polygraph_asmi.validation import PERTURBATIONS, SCOPES
from tests import arms
from tests.conftest import PROMPT_LENGTH
from tests.families import LLAMA_LIKE, PROJECTIONS

LAYER = 2
OTHERS = [name for name in PERTURBATIONS if name != "heads"]


def masks() -> torch.Tensor:
    return torch.tensor([[1.0, 0, 1, 1], [0, 1, 1, 0], [0, 0, 0, 0]])


def sequence(length: int = 17) -> torch.Tensor:
    return torch.randint(3, 61, (length,), generator=torch.Generator().manual_seed(7))


def test_every_arm_has_a_name():
    assert tuple(ARMS) == PERTURBATIONS


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("arm", PERTURBATIONS)
def test_arms_equal_whole_passes(family_model, input_ids, arm, scope):
    projection, _ = PROJECTIONS.get(family_model.tiny_name, LLAMA_LIKE)
    projection = projection.format(layer=LAYER)
    down = arms.DOWN.get(family_model.tiny_name, arms.LLAMA_DOWN).format(layer=LAYER)
    block = ".".join(projection.split(".")[:3])
    for dose in (None, 1.7):
        how = {"scope": scope, "dose": dose, "seed": 3}
        fast = subnetwork_log_probs(
            family_model, input_ids, PROMPT_LENGTH, LAYER, masks(), perturbation=arm, **how
        )
        slow = arms.subnetwork_log_probs(
            family_model, projection, down, block, LAYER, input_ids, PROMPT_LENGTH, masks(),
            arm=arm, **how,
        )  # fmt: skip
        torch.testing.assert_close(fast, slow, atol=2e-5, rtol=0)
        # The test could not fail if masking changed nothing.
        assert (slow - slow[:1]).abs().max() > 1e-2
