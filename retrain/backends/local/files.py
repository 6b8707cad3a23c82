"""A local policy on disk: adapters in peft's format, the rest as safetensors and JSON, no pickle.

peft can load `adapter/` directly; transformers can load `model/`, written if every parameter is trained.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
from peft import PeftModel, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from retrain.backends.local.loading import Policy
from retrain.backends.local.training import Optimizer
from retrain.backends.saved import reading, write_facts
from retrain.base.errors import ConfigError, RecordsError, first_line
from retrain.config.files import PEFT, weights_of

FORMAT = 1  # increment when old checkpoints can no longer be read
SAME = "resume with the configuration, and on the kind of device, that wrote it"
FACTS, OPTIMIZER, START = "local.json", "optimizer.safetensors", "start.safetensors"
ADAPTER, MODEL = "adapter", "model"
WRAPPED = "base_model.model."  # peft's prefix of a layer's name


def save_weights(directory: Path, policy: Policy) -> None:
    """Write the trained weights in the format that peft or transformers reads."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft queries the hub about the base model's vocabulary
        if policy.adapters is not None:
            policy.adapters.save_pretrained(str(directory / ADAPTER), save_embedding_layers=False)
        else:
            policy.causal.save_pretrained(str(directory / MODEL))


def save_policy(
    directory: Path,
    policy: Policy,
    optimizer: Optimizer,
    generator: torch.Generator,
    identity: Mapping[str, object],
    budgets: Mapping[str, int],
) -> None:
    """Write all state that later steps depend on, bit for bit."""
    save_weights(directory, policy)
    save_file(optimizer.state(), directory / OPTIMIZER)
    if policy.start:
        save_file(policy.start, directory / START)
    facts = {
        "format": FORMAT,
        "identity": dict(identity),
        "optimizer_steps": optimizer.steps,
        "generator": generator.get_state().numpy().tobytes().hex(),
        "tokens_at_a_time": dict(budgets),
    }
    write_facts(directory / FACTS, facts)


def load_policy(
    directory: Path,
    policy: Policy,
    optimizer: Optimizer,
    generator: torch.Generator,
    identity: Mapping[str, object],
) -> dict[str, int]:
    """Overwrite all state with what `save_policy` wrote; return the batch sizes that fitted, in tokens."""
    own_facts = {"format": FORMAT, **identity}
    with reading(directory / FACTS, "local", own_facts, RuntimeError, SafetensorError, fix=SAME) as facts:
        state = torch.frombuffer(bytearray.fromhex(facts["generator"]), dtype=torch.uint8)
        if len(state) != len(generator.get_state()):
            raise RecordsError(
                f"{directory}: this checkpoint is from another kind of device than {generator.device}, "
                "with another random generator; resume on that kind, see [backend.options].device"
            )
        tensors = load_file(directory / OPTIMIZER)
        if policy.adapters is not None:
            load_adapters(directory / ADAPTER / PEFT, policy.adapters)
        else:
            saved = AutoModelForCausalLM.from_pretrained(
                directory / MODEL, dtype=policy.causal.dtype, local_files_only=True
            )
            policy.causal.load_state_dict(saved.state_dict())
        if (directory / START).exists():
            started = load_file(directory / START)
            policy.start.update({name: started[name].to(own) for name, own in policy.trainable().items()})
        optimizer.load(tensors, facts["optimizer_steps"])
        generator.set_state(state)
        return {kind: int(tokens) for kind, tokens in facts["tokens_at_a_time"].items()}


def load_adapters(file: Path, adapters: PeftModel) -> None:
    """Overwrite all adapters with those of a file; if they do not fit, a ValueError or RuntimeError."""
    loaded = set_peft_model_state_dict(adapters, load_file(file))
    # of layers that text never passes, other programs write adapters without effect
    beside = re.compile(str(adapters.active_peft_config.exclude_modules))
    for key in loaded.unexpected_keys:
        if not beside.fullmatch(key.removeprefix(WRAPPED).partition(".lora_")[0]):
            raise ValueError(f"adapters of another model: {key}")
    trained = {name for name, p in adapters.named_parameters() if p.requires_grad}
    if missing := sorted(trained & {*loaded.missing_keys}):  # missing_keys includes the base model's
        raise ValueError(f"adapters without {missing[0]}")


def load_start(adapter: str, policy: Policy) -> None:
    """Overwrite the adapters' weights; a ConfigError if they do not fit the model."""
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
            f"[backend.options].target_modules must be those of its adapter_config.json"
        ) from error
