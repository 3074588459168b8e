"""The tiny model on disk and the oracle on it, for tests that need no other."""

import pytest
from verl_cases import Oracle, save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(str(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def oracle(model):
    return Oracle(model)
