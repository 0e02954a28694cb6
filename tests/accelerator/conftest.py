import pytest

from tests.accelerator import device


@pytest.fixture(scope="session", autouse=True)
def compiled_device():
    """Once a test run, and not in each rank."""
    if reason := device.why_not():
        pytest.skip(reason)
    device.build()
