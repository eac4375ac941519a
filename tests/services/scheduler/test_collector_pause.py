"""The collector is put back as it was."""

import gc

import pytest

from services.scheduler.collector_pause import collector_paused


@pytest.fixture(params=[True, False])
def enabled(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def test_it_is_as_before_after_the_block_and_after_an_error(enabled: bool) -> None:
    was_enabled = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with collector_paused():
            assert not gc.isenabled()
        assert gc.isenabled() is enabled
        with pytest.raises(ValueError), collector_paused():
            raise ValueError
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()
