"""A server of the toy model for the tests of a module, and a client of it."""

import pytest
from serving_cases import client_of, serving


@pytest.fixture(scope="module")
def running():
    with serving() as server:
        yield server


@pytest.fixture(scope="module")
def client(running):
    with client_of(running) as made:
        yield made
