"""A backend of a user's whose policies others can load: numpy's, as if it had adapters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from retrain.backends import Exported
from retrain.backends.numpy import connect as connect
from retrain.backends.squeeze import CONFIG, WEIGHTS
from retrain.config.schema import Config


def export(config: Config, checkpoint: Path, directory: Path) -> Exported:
    """Write what `tests.extras.test_publish_records` has left in the checkpoint."""
    (directory / "templates").mkdir()  # as tokenizers with several chat templates save them
    shutil.copyfile(checkpoint / WEIGHTS, directory / WEIGHTS)
    (directory / CONFIG).write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": None}))
    return Exported(base="org/base", tokenizer="/models/tokenizer", dtype="bfloat16")
