import pytest

from tests.tiny_lm import whitebox


@pytest.fixture(scope="module")
def model():
    return whitebox()


@pytest.fixture(autouse=True)
def all_numbers_are_compared(unseen):
    """By the tests themselves."""
