"""What the tests of extras share."""

import os

import pytest

from tests.tinker_api.sdk import tinker_sdk as tinker_sdk

# huggingface_hub reads these when it is imported: the tests' hub has no Xet storage, and nobody a token.
os.environ.update(HF_HUB_DISABLE_XET="1", HF_TOKEN_PATH=os.devnull)
LONGEST = ("test_tinker_probe",)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Have the longest file first: of two processes that take file after file, one would end late."""
    items.sort(key=lambda item: item.path.stem not in LONGEST)
