"""Shared fixtures. Nothing here, nor in any test, reaches a model hub."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

from tests.families import CONFIGS, VOCABULARY, tiny_model


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests that take minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--slow"):
        for item in items:
            if "slow" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs --slow"))


@pytest.fixture(scope="session", params=list(CONFIGS))
def family_model(request: pytest.FixtureRequest):
    """Every known family in turn."""
    model = tiny_model(request.param)
    model.tiny_name = request.param
    return model


@pytest.fixture(scope="session")
def llama():
    return tiny_model("llama")


@pytest.fixture
def input_ids() -> torch.Tensor:
    """Prompt of 11 tokens and response of 6: longer than the sliding windows of 5."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(3, VOCABULARY, (17,), generator=generator)


PROMPT_LENGTH = 11
