"""`[backend.options]` of the local backend: types, ranges and defaults, checked without importing torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from math import isfinite
from typing import Any

from retrain.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16")
ENGINES = ("torch", "openai")
DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
MAX_TOKENS_PER_MICRO_BATCH = 10**8
NO_REFERENCE = (
    "needs [backend.options].lora = true, because the model without its adapters is the reference; or 0"
)


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """How a model is loaded, sampled and trained on this machine."""

    revision: str = ""  # branch, tag or commit on the hub; empty: the default branch
    local_files_only: bool = False  # never ask the hub
    device: str = "auto"  # auto (a GPU if there is one), cpu, cuda, cuda:N
    dtype: str = "auto"  # auto: bfloat16 on a GPU, float32 on the CPU; adapters are always float32
    lora: bool = True  # false trains every parameter
    target_modules: tuple[str, ...] = ("all-linear",)  # what adapters are put on
    gradient_checkpointing: bool = False  # activations recomputed: a third more work, far less memory
    tokens_per_micro_batch: int = 16384  # padding included
    tokens_per_sampling_batch: int = 262144  # prompts and completions at full length; bounds the KV cache
    threads: int = 0  # of the CPU; 0: one for tiny models, else what the environment says
    weight_decay: float = 0.0
    stop: tuple[str, ...] = ()  # strings that end a completion
    chat_template: bool = False  # show prompts through the tokenizer's chat template
    system_prompt: str = ""  # with chat_template
    engine: str = "torch"  # what samples: torch (the model that is trained), openai (a server)
    engine_url: str = ""  # of the server, without /v1
    engine_model: str = ""  # the name that the server gave the base model; empty: [model].model
    engine_adapters: str = ""  # directory that server and trainer both see; empty: a temporary one
    engine_reload: str = "/v1/load_lora_adapter"  # vLLM; SGLang: /load_lora_adapter
    engine_timeout_s: float = 600.0


def parse_options(options: Mapping[str, Any]) -> LocalOptions:
    """Give checked options.

    Raises:
        ConfigError: every problem found.
    """
    problems = check_options(options)
    if problems:
        raise ConfigError([f"[backend.options].{problem}" for problem in problems])
    frozen: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in options.items()
    }
    return LocalOptions(**frozen)


def takes_permits(options: Mapping[str, object]) -> bool:
    """Tell whether calls hold permits: those to a server that samples."""
    return options.get("engine") == "openai"


def check_options(options: Mapping[str, object]) -> list[str]:
    """List the problems of a `[backend.options]` table, one line each that starts with its key."""
    problems = [f"{key}: {problem}" for key, value in options.items() for problem in _problems(key, value)]
    return problems or list(_conflicts(options))


def _problems(key: str, value: object) -> Iterator[str]:
    known = [field.name for field in fields(LocalOptions)]
    if key not in known:
        near = difflib.get_close_matches(key, known, n=1)
        yield "unknown key; " + (f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}")
        return
    fits, wanted = RULES.get(key) or _BY_TYPE[type(getattr(DEFAULTS, key))]
    if not fits(value):
        yield f"got {value!r}; needs {wanted}"


def _conflicts(options: Mapping[str, object]) -> Iterator[str]:
    lora = options.get("lora", DEFAULTS.lora)
    if options.get("system_prompt") and not options.get("chat_template"):
        yield "system_prompt: needs chat_template = true, which has a place for it"
    if options.get("engine") == "openai":
        if not options.get("engine_url"):
            yield 'engine_url: needed by engine = "openai"; for example "http://127.0.0.1:8000"'
        if not lora:
            yield 'engine: "openai" needs lora = true, because adapters are what a server can reload'


def _is_whole(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_number(value: object, least: float, most: float) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and isfinite(value) and least <= value <= most  # type: ignore[arg-type,operator]


def _is_words(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(word, str) and word for word in value)


Rule = tuple[Callable[[object], bool], str]
DEFAULTS = LocalOptions()
_BY_TYPE: Mapping[type, Rule] = {
    str: (lambda value: isinstance(value, str), "a string"),
    bool: (lambda value: isinstance(value, bool), "true or false"),
    tuple: (_is_words, "a list of strings, none of them empty"),
}
_TOKENS: Rule = (
    lambda value: _is_whole(value, 1, MAX_TOKENS_PER_MICRO_BATCH),
    f"a whole number of tokens from 1 to {MAX_TOKENS_PER_MICRO_BATCH}",
)
RULES: Mapping[str, Rule] = {
    "device": (
        lambda value: isinstance(value, str) and DEVICE.fullmatch(value) is not None,
        "'auto', 'cpu', 'cuda' or 'cuda:N'",
    ),
    "dtype": (lambda value: value in DTYPES, "'auto', 'float32' or 'bfloat16'"),
    "engine": (lambda value: value in ENGINES, "'torch' or 'openai'"),
    "engine_url": (
        lambda value: isinstance(value, str) and re.match(r"https?://[^/]", value) is not None,
        "an address such as 'http://127.0.0.1:8000'",
    ),
    "target_modules": (
        lambda value: _is_words(value) and bool(value),
        "a list with 'all-linear' or names of layers, such as ['q_proj', 'v_proj']",
    ),
    "tokens_per_micro_batch": _TOKENS,
    "tokens_per_sampling_batch": _TOKENS,
    "threads": (lambda value: _is_whole(value, 0, 1024), "a whole number from 0 (choose) to 1024"),
    "weight_decay": (lambda value: _is_number(value, 0, 1), "a number from 0 to 1"),
    "engine_timeout_s": (lambda value: _is_number(value, 0.1, 86400), "seconds from 0.1 to 86400"),
}
