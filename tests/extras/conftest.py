"""What the tests of extras share."""

import os

from tests.tinker_api.sdk import tinker_sdk as tinker_sdk

# huggingface_hub reads these when it is imported: the tests' hub has no Xet storage, and nobody a token.
os.environ.update(HF_HUB_DISABLE_XET="1", HF_TOKEN_PATH=os.devnull)
