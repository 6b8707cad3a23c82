"""What the tests of long files share."""

from tests.tinker_api.sdk import tinker_sdk as tinker_sdk
