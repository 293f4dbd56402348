"""The commands' tests run commands in their own process."""

import jax
import pytest


@pytest.fixture(scope="session", autouse=True)
def eight_devices():
    """JAX starts with the devices of the test session, and not with as many as a command asks
    for."""
    assert len(jax.devices()) == 8
