import pytest

from tests.stand_ins import StandIns, make_stand_ins


@pytest.fixture(scope="session")
def stand_ins(tmp_path_factory) -> StandIns:
    return make_stand_ins(tmp_path_factory.mktemp("stand-ins"))
