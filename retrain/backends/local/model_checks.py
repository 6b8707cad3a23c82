"""Checks of a model before torch is imported: can it be loaded from here, and has it an end token?

Reports only certain problems; the others appear when the model is loaded.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrain.base.errors import is_passing
from retrain.base.rollouts import Prompt
from retrain.config.files import PEFT

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# these have no end-of-sequence token unless their files name one; other classes may have a default
WITHOUT_DEFAULTS = ("PreTrainedTokenizerFast", "TokenizersBackend")
CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len")  # names in model configs
HUB_ID = re.compile(r"\w[\w.-]{0,95}(/\w[\w.-]{0,95})?", re.ASCII)  # the hub itself allows a little less
SHOWN = 3  # prompts named in an error about length
YES = ("1", "on", "yes", "true")
NOT_FOUND = 404
LETTERS = 3  # of a token, where no tokenizer can be asked


def model_problem(model: str, *, local_files_only: bool = False) -> str:
    """Return why a model name is certainly unusable; "" if it may be usable."""
    if not model:
        return "empty; the local backend needs a hub id or a local path"
    if path := directory_at(model):
        return _directory_problem(model, path)
    if not HUB_ID.fullmatch(model):
        return f"{model!r} is no directory here, and no name on the hub; needs a saved model's directory"
    if is_offline(local_files_only) and not directory_at(_cached(model)):
        return (
            f"{model!r} is neither a directory nor in {_cache()}, and offline mode is on; "
            "use a directory, or allow the hub (local_files_only = false, no HF_HUB_OFFLINE)"
        )
    return ""


def directory_at(name: str | Path) -> Path | None:
    """Return the directory of this name; None if there is none, or it cannot be one."""
    try:
        path = Path(name).expanduser()
        return path if path.is_dir() else None
    except (OSError, RuntimeError, ValueError) as error:  # too long, of an unknown user, or not to be read
        if is_passing(error):
            raise
        return None


def is_offline(local_files_only: bool) -> bool:
    """Whether the hub is never contacted."""
    return local_files_only or os.environ.get("HF_HUB_OFFLINE", "").lower() in YES


def hub_problem(model: str, revision: str) -> str:
    """Return why a model cannot be downloaded; "" if the hub has it, or it need not be. No secret is sent."""
    if files_of(model) is not None:
        return ""
    hub = os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"
    address = f"{hub}/{model}/resolve/{revision or 'main'}/config.json"
    from retrain.base.http_client import (
        answer_of,  # not at the top: planning rarely needs it, and it takes 20 ms
    )

    code, silence = answer_of(address)
    if silence:
        return (
            f"{model!r} is not on this machine, and {hub} does not answer ({silence}); "
            "use a saved model's directory, or check the connection"
        )
    return f"{hub} has no model {model!r}; check its name and the revision" if code == NOT_FOUND else ""


def files_of(model: str) -> Path | None:
    """Return the directory with a model's files, its own or the hub's cache; None if they are not here."""
    if path := directory_at(model):
        return path
    cached = directory_at(_cached(model))
    snapshots = [file.parent for file in cached.glob("snapshots/*/config.json")] if cached else []
    complete = [
        snapshot
        for snapshot in snapshots
        if any(snapshot.glob("*.safetensors")) or any(snapshot.glob("*.bin"))
    ]
    return max(complete, key=lambda snapshot: snapshot.stat().st_mtime, default=None)


def prompt_tokens(directory: Path, prompts: Sequence[Prompt], system_prompt: str) -> int:
    """Return the tokens of the longest prompt with the system prompt, without a chat template's."""
    longest = max((prompt.text for prompt in prompts), key=len, default="")
    if (tokenizer := _tokenizer(directory)) is None:
        return (len(longest) + len(system_prompt)) // LETTERS
    return len(tokenizer.encode(system_prompt + longest, add_special_tokens=False).ids)


def _tokenizer(directory: Path) -> Tokenizer | None:
    """Return a saved model's tokenizer; None if it is in no file, or the package is not here."""
    file = directory / "tokenizer.json"
    if find_spec("tokenizers") is None or "model" not in read_json(file):
        return None
    from tokenizers import Tokenizer  # imports in 25 ms, without torch

    return Tokenizer.from_file(str(file))


def _directory_problem(model: str, path: Path) -> str:
    has_adapters = (path / PEFT).is_file()
    if not (path / "config.json").is_file():
        if has_adapters:
            return f"{model!r} holds adapters; set it as [model].adapter, and here the model they belong to"
        return f"{model!r} is a directory without config.json; use a saved model's directory"
    if has_adapters:
        return (
            f"{model!r} has adapters beside its weights, which would be left out; move them to a directory "
            "of their own, and set that as [model].adapter"
        )
    tokenizer = read_json(path / "tokenizer_config.json")
    ends = [read_json(path / name).get("eos_token_id") for name in ("config.json", "generation_config.json")]
    named = tokenizer.get("eos_token") or read_json(path / "special_tokens_map.json").get("eos_token")
    is_endless = tokenizer.get("tokenizer_class") in WITHOUT_DEFAULTS and not named
    if is_endless and all(end is None for end in ends):
        return (
            f"the tokenizer of {model!r} has no end-of-sequence token, so completions could not end; "
            "set eos_token in its tokenizer_config.json"
        )
    return ""


def template_problem(model: str) -> str:
    """Return a problem if a saved model's tokenizer has no chat template; "" if it has or may have one."""
    if not (path := directory_at(model)):
        return ""
    config = path / "tokenizer_config.json"
    if not config.is_file() or read_json(config).get("chat_template") or any(path.glob("*chat_template*")):
        return ""
    return f"the tokenizer of {model!r} has none; set it to false, or name a file with a template"


def shows_no_tools(model: str) -> bool:
    """Whether a model on this machine has a chat template that shows no functions, because it reads none."""
    if (directory := files_of(model)) is None:
        return False
    written = json.dumps(read_json(directory / "tokenizer_config.json").get("chat_template", ""))
    with suppress(OSError):
        written += "".join(file.read_text("utf-8", "replace") for file in directory.rglob("*chat_template*"))
    return bool(written.strip('"')) and "tools" not in written


def prompts_problem(model: str, prompts: Sequence[Prompt]) -> str:
    """Return which prompts certainly fill the context of a model in a local directory; "" if none.

    Special tokens and a chat template are not counted, so a borderline prompt is detected only at the start.
    """
    if not (path := directory_at(model)):
        return ""
    room = _context(path)
    long = [p for p in prompts if len(p.text.encode()) >= room]  # a token covers at least one byte
    if not long or (tokenizer := _tokenizer(path)) is None:
        return ""
    encoded = tokenizer.encode_batch([prompt.text for prompt in long], add_special_tokens=False)
    return too_long([(p.id, len(e.ids)) for p, e in zip(long, encoded, strict=True)], room)


def too_long(prompts: Iterable[tuple[int, int]], room: float) -> str:
    """Return which prompts, given as (id, tokens), leave no room for a completion; "" if none."""
    long = [(number, tokens) for number, tokens in prompts if tokens >= room]
    if not long:
        return ""
    if len(long) == 1:
        ((number, tokens),) = long
        return (
            f"prompt {number} has {tokens} tokens, which leaves no room in the model's context of {room}; "
            "shorten it or use a model with a longer context"
        )
    shown = ", ".join(f"prompt {number} has {tokens}" for number, tokens in long[:SHOWN])
    return (
        f"{len(long)} prompts fill the model's context of {room} tokens ({shown}); "
        "shorten them or use a model with a longer context"
    )


def _context(path: Path) -> float:
    config = read_json(path / "config.json")
    tables = [config, config.get("text_config")]
    lengths = [t.get(name) for t in tables if isinstance(t, dict) for name in CONTEXT]
    return next((length for length in lengths if isinstance(length, int)), math.inf)


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file; empty if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _cached(model: str) -> Path:
    return _cache() / f"models--{model.replace('/', '--')}"


def _cache() -> Path:
    """Return the hub's cache directory, by the same rules as huggingface_hub."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    named = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    return Path(named or Path(home) / "hub").expanduser()
