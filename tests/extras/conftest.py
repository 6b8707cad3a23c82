"""What the tests of extras share."""

from tests.tinker_api.sdk import tinker_sdk as tinker_sdk
