"""Adapters as files in peft's format, without torch: what a run starts from, and what it exports."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrain.backends.local import DEFAULTS, LocalOptions
from retrain.backends.saved import Exported
from retrain.base.errors import ConfigError, RecordsError, first_line, records_error
from retrain.config.files import PEFT, REMOTE, fingerprint, weights_of
from retrain.config.schema import Config

if TYPE_CHECKING:
    from retrain.backends.local.loading import Policy

CONFIG = "adapter_config.json"
# keys of adapters that are computed in another way than this backend's
OTHER_KINDS = (
    *("use_dora", "use_rslora", "use_qalora", "use_bdlora", "lora_bias", "alora_invocation_tokens"),
    *("arrow_config", "kasa_config", "layer_replication", "layers_to_transform", "modules_to_save"),
    *("rank_pattern", "alpha_pattern", "target_parameters", "trainable_token_indices"),
)
PLAIN_STARTS = (True, False, None, "gaussian")  # others also rewrite the base model's weights


def start_problems(config: Config, options: LocalOptions) -> Iterator[str]:
    """Iterate over why a run cannot start from an adapter that exists."""
    adapter = config.model.adapter
    if not options.lora:
        yield "needs [backend.options].lora = true, because adapters are loaded"
        return
    file = None if adapter.startswith(REMOTE) else weights_of(adapter)
    if file is None or file.name != PEFT:
        yield f"{adapter!r} is no adapter in peft's format, which backend 'local' needs"
        return
    try:
        facts = json.loads((file.parent / CONFIG).read_text(encoding="utf-8"))
        if not isinstance(facts, dict):
            raise ValueError("it is no table")
    except (OSError, ValueError) as error:
        yield f"{file.parent / CONFIG} cannot be read ({error}); save the adapter again"
        return
    yield from (f"{file.parent} {what}" for what in _mismatches(facts, config, options))


def _mismatches(facts: Mapping[str, Any], config: Config, options: LocalOptions) -> Iterator[str]:
    """Iterate over what an adapter's configuration and the run's have not in common."""
    if facts.get("peft_type") != "LORA":
        yield f"is of type {facts.get('peft_type')!r}; needs LORA"
        return
    rank, targets = config.model.lora_rank, facts.get("target_modules")
    alpha = options.lora_alpha or 2 * rank
    if facts.get("r") != rank:
        yield f"has rank {facts.get('r')}, the run [model].lora_rank = {rank}; make them equal"
    elif (trained := facts.get("lora_alpha")) != alpha:
        yield f"has alpha {trained}, the run {alpha:g}; set [backend.options].lora_alpha = {trained}"
    if options.target_modules != ("all-linear",) and isinstance(targets, list):
        layers, own = _kinds(targets), _kinds(options.target_modules)
        if layers != own:
            yield f"adapts {layers}, the run {own}; set [backend.options].target_modules to the former"
    if others := [key for key in OTHER_KINDS if facts.get(key)]:
        yield f"has {others[0]}; only plain LoRA adapters can be trained further"
    elif facts.get("bias", "none") != "none" or facts.get("init_lora_weights", True) not in PLAIN_STARTS:
        yield "also changed the base model; only plain LoRA adapters can be trained further"
    base = facts.get("base_model_name_or_path")
    if isinstance(base, str) and base and not _are_same(base, config.model.model):
        yield f"was trained on {base!r}, not on [model].model = {config.model.model!r}"


def _kinds(modules: Iterable[str]) -> list[str]:
    """Return the last parts of layers' names, each once."""
    return sorted({name.rpartition(".")[2] for name in modules})


def _are_same(one: str, other: str) -> bool:
    """Whether two names may be one model's: directories by their content, else by the last part."""
    if one == other:
        return True
    if Path(one).is_dir() and Path(other).is_dir():
        return fingerprint(one) == fingerprint(other)
    return Path(one).name == Path(other).name


def load_start(adapter: str, policy: Policy) -> None:
    """Overwrite the adapters' weights; a ConfigError if they do not fit the model."""
    from safetensors import SafetensorError

    from retrain.backends.local.files import load_adapters

    file = weights_of(adapter)
    try:
        if file is None or policy.adapters is None:
            raise ValueError("no adapters")
        load_adapters(file, policy.adapters)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"[model].adapter: cannot read {file} ({first_line(error)}); copy it again, or name another"
        ) from error
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"[model].adapter: {file or adapter} does not fit the model ({first_line(error)}); "
            f"[backend.options].target_modules must be those of its {CONFIG}"
        ) from error


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
