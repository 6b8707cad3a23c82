"""What a run starts from: weights of another, and the KL term's reference that its checkpoints keep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from retrain.config.adapters import KEY
from retrain.config.files import changed_files
from retrain.config.schema import Config
from retrain.errors import ConfigError

if TYPE_CHECKING:
    from retrain.trainer.loop import Trainer


def start_anew(config: Config, trainer: Trainer) -> None:
    """Load the weights that a run starts from; a ConfigError if they are not those that were planned."""
    if not (adapter := config.model.adapter):
        return
    known = {key: text for key, text in config.run.files.items() if key == KEY} if config.run else {}
    if changed := changed_files(config, known):
        raise ConfigError([f"[model].adapter{line.removeprefix(KEY)}; restore it" for line in changed])
    backend: Any = trainer.backend  # the method is optional in the protocol
    is_reference = config.algorithm.kl_coef > 0 and config.algorithm.kl_reference == "start"
    trainer.calls.wait_for(backend.start_from(adapter, is_reference=is_reference))


def check_reference(config: Config, trainer: Trainer) -> None:
    """Raise a ConfigError if a resumed run's KL term needs another reference than its checkpoint has."""
    algorithm, has_start = config.algorithm, getattr(trainer.backend, "has_start", None)
    if not (config.model.adapter and algorithm.kl_coef and has_start):
        return
    if has_start() != (algorithm.kl_reference == "start"):
        raise ConfigError(
            "[algorithm]: kl_coef or kl_reference was changed, and the checkpoint has not the reference that "
            "the run now needs; undo the change, or start the run again"
        )
