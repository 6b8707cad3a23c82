"""Copies a checkpoint's trained weights, which are in the formats of peft or transformers already."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from retrain.backends.exported import Exported
from retrain.backends.local import DEFAULTS, LocalOptions
from retrain.config.adapters import weights_of
from retrain.config.schema import Config
from retrain.errors import RecordsError, records_error

QUANTIZED = (
    "they were trained on weights in four bits, and merged with the full ones they would be another policy; "
    "publish the adapters, which others load on the same four bits"
)


def exported(config: Config, options: LocalOptions, checkpoint: Path, directory: Path) -> Exported:
    """Copy a checkpoint's adapters, or its whole model, into an existing directory."""
    weights = weights_of(checkpoint) if options.lora else None
    source = weights.parent if weights else checkpoint / "model"
    try:
        facts = json.loads((checkpoint / "local.json").read_text(encoding="utf-8"))
        for path in source.iterdir():
            if path.suffix in (".json", ".safetensors"):  # peft adds a model card of its own
                shutil.copyfile(path, directory / path.name)
    except OSError as error:
        raise records_error(checkpoint, "copy its weights", error, then="publish again") from error
    except ValueError as error:
        raise RecordsError(f"{checkpoint}: local.json cannot be read ({error}); use another step") from error
    return Exported(
        base=config.model.model,
        tokenizer=config.model.model,
        revision=options.revision,
        dtype=str(facts.get("identity", {}).get("dtype", "")),
        is_whole=weights is None,
        unmergeable="" if options.quantization == DEFAULTS.quantization else QUANTIZED,
    )
