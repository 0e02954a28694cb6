import pytest

from tests.accelerator import device


@pytest.fixture(scope="session", autouse=True)
def compiled_device():
    """Compile the device once in a test run, before any rank needs it."""
    if reason := device.why_not():
        pytest.skip(reason)
    device.build()
