"""`[backend.options]` of the local backend: types, ranges and defaults, checked without importing torch."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from retrain.backends.options import TEXT, TRUTH, Rule, number, one_of, parsed, problems_of, whole

DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")
MAX_TOKENS_PER_MICRO_BATCH = 10**8
NO_REFERENCE = (
    "needs [backend.options].lora = true, because the model without its adapters is the reference; or 0"
)


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """How a model is loaded, sampled and trained on this machine."""

    revision: str = ""  # branch, tag or commit on the hub; empty: the default branch
    local_files_only: bool = False  # never contact the hub
    device: str = "auto"  # auto (a GPU if there is one), cpu, cuda, cuda:N
    dtype: str = "auto"  # auto: bfloat16 on a GPU, float32 on the CPU; adapters are always float32
    lora: bool = True  # false trains every parameter
    target_modules: tuple[str, ...] = ("all-linear",)  # layers that get adapters
    gradient_checkpointing: bool = False  # recompute activations: a third more work, far less memory
    tokens_per_micro_batch: int = 16384  # including padding
    tokens_per_sampling_batch: int = 262144  # prompts and completions at full length; bounds the KV cache
    threads: int = 0  # CPU threads; 0: one for tiny models, otherwise PyTorch's default
    weight_decay: float = 0.0
    stop: tuple[str, ...] = ()  # strings that end a completion
    chat_template: bool = False  # apply the tokenizer's chat template to prompts
    system_prompt: str = ""  # with chat_template
    engine: str = "torch"  # sampler: torch (in this process), openai (a server)
    engine_url: str = ""  # server address, without /v1
    engine_adapters: str = ""  # directory shared by server and trainer; empty: a temporary one
    engine_reload: str = "/v1/load_lora_adapter"  # vLLM; SGLang: /load_lora_adapter
    engine_timeout_s: float = 600.0


DEFAULTS = LocalOptions()


def _is_words(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(word, str) and word for word in value)


_TOKENS = whole(
    1, MAX_TOKENS_PER_MICRO_BATCH, f"a whole number of tokens from 1 to {MAX_TOKENS_PER_MICRO_BATCH}"
)
_RULES: Mapping[str, Rule] = {
    "revision": TEXT,
    "local_files_only": TRUTH,
    "device": (
        lambda value: isinstance(value, str) and DEVICE.fullmatch(value) is not None,
        "'auto', 'cpu', 'cuda' or 'cuda:N'",
    ),
    "dtype": one_of("auto", "float32", "bfloat16"),
    "lora": TRUTH,
    "target_modules": (
        lambda value: _is_words(value) and bool(value),
        "a list with 'all-linear' or names of layers, such as ['q_proj', 'v_proj']",
    ),
    "gradient_checkpointing": TRUTH,
    "tokens_per_micro_batch": _TOKENS,
    "tokens_per_sampling_batch": _TOKENS,
    "threads": whole(0, 1024, "a whole number from 0 (choose) to 1024"),
    "weight_decay": number(0, 1),
    "stop": (_is_words, "a list of strings, none of them empty"),
    "chat_template": TRUTH,
    "system_prompt": TEXT,
    "engine": one_of("torch", "openai"),
    "engine_url": (
        lambda value: isinstance(value, str) and re.match(r"https?://[^/]", value) is not None,
        "an address such as 'http://127.0.0.1:8000'",
    ),
    "engine_adapters": TEXT,
    "engine_reload": TEXT,
    "engine_timeout_s": number(0.1, 86400, "seconds from 0.1 to 86400"),
}


def parse_options(options: Mapping[str, Any]) -> LocalOptions:
    """Return checked options.

    Raises:
        ConfigError: every problem found.
    """
    frozen = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    return parsed(LocalOptions, frozen, check_options(options))


def takes_permits(options: Mapping[str, object]) -> bool:
    """Whether calls hold permits: true if a server samples."""
    return options.get("engine") == "openai"


def check_options(options: Mapping[str, object]) -> list[str]:
    """Return the problems of a `[backend.options]` table, one line each, starting with the key."""
    return problems_of(options, _RULES) or list(_conflicts(options))


def _conflicts(options: Mapping[str, object]) -> Iterator[str]:
    if options.get("system_prompt") and not options.get("chat_template"):
        yield "system_prompt: needs chat_template = true"
    if options.get("engine") == "openai":
        if not options.get("engine_url"):
            yield 'engine_url: needed by engine = "openai"; for example "http://127.0.0.1:8000"'
        if not options.get("lora", DEFAULTS.lora):
            yield 'engine: "openai" needs lora = true, because a server can only reload adapters'
