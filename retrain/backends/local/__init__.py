"""Any causal language model, sampled and trained on this machine with PyTorch, transformers and peft.

Heavy imports are deferred until a run connects: planning reads only this file and `model_files`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrain.backends import ENGINE, SELF, BackendSpec, Devices, DeviceUse, always, functions_of
from retrain.backends.engines.vllm import vllm_problem
from retrain.backends.local import model_files
from retrain.backends.options import (
    chat_template,
    is_number,
    number,
    one_of,
    option,
    parsed,
    problems_of,
    table,
    template_in,
    template_problems,
    words,
)
from retrain.base import extras
from retrain.base.errors import ConfigError, Location, Problem
from retrain.base.registry import PLACED, read_problem
from retrain.config.resolve import runs_here, teachers_of
from retrain.config.schema import CampaignSection
from retrain.control.machine import cpu_capacity
from retrain.control.machine.nvidia import gpu_count, gpu_nodes

if TYPE_CHECKING:
    from retrain.backends import Exported, MemoryEstimate
    from retrain.backends.local.policy import LocalBackend
    from retrain.base.rollouts import Prompt
    from retrain.config.schema import Config
    from retrain.plugins.tasks import Task

EXTRA = "local"
PACKAGES = ("torch", "transformers", "peft", "safetensors")
EXTRA_4BIT = "4bit"
ROUNDED_RATIO = 0.005  # change of the mean ratio of sixty tokens by bfloat16 rounding
NO_REFERENCE = (
    "needs [backend.options].lora = true, because the model without its adapters is the reference; or 0"
)
MOST_TOKENS = 10**8
ALL = "all"  # the devices that there are
MOST_DEVICES = 1024
MOST_GB = 100_000
TOKENS = f"a whole number of tokens from 1 to {MOST_TOKENS}"
SERVER = "an address without /v1, such as 'http://127.0.0.1:8000'"


def _is_server(value: object) -> bool:
    from retrain.base.http_client import (
        is_address,  # not at the top: it takes 20 ms, and few runs have a server
    )

    return isinstance(value, str) and is_address(value) and not value.rstrip("/").endswith("/v1")


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """How a model is loaded, sampled and trained on this machine."""

    revision: str = ""  # branch, tag or commit on the hub; empty: the default branch
    local_files_only: bool = False  # never contact the hub
    device: str = option(
        "auto",
        lambda value: isinstance(value, str) and bool(re.fullmatch(r"auto|cpu|cuda(:\d+)?", value)),
        "'auto', 'cpu', 'cuda' or 'cuda:N'",
    )  # auto (a GPU if there is one), cpu, cuda, cuda:N
    devices: int | str = option(
        1,
        lambda value: value == ALL or (type(value) is int and 1 <= value <= MOST_DEVICES),
        f"a whole number from 1 to {MOST_DEVICES}, or '{ALL}'",
    )  # of a machine that a run uses, each with a process: GPUs, or single threads on the CPU
    nodes: int = number(
        1, 1, MOST_DEVICES, f"a whole number from 1 to {MOST_DEVICES}"
    )  # of a Slurm job that a run uses, with so many devices of each
    shard: bool = False  # each of several devices holds a part of every layer; gathered while it runs
    dtype: str = one_of(
        "auto", "float32", "bfloat16"
    )  # auto: bfloat16 on a GPU, float32 on the CPU; adapters are always float32
    lora: bool = True  # false trains every parameter
    target_modules: tuple[str, ...] = words(
        "all-linear", "a list with 'all-linear' or names of layers, such as ['q_proj', 'v_proj']"
    )  # layers that get adapters
    lora_alpha: float = number(0.0, 0, 65536)  # adapters are scaled by it over their rank; 0: twice the rank
    lora_dropout: float = number(0.0, 0, 0.95)  # share of an adapter's inputs that training sets to 0
    quantization: str = one_of("none", "4bit")  # of the frozen weights: 4bit needs the extra `4bit`
    gradient_checkpointing: bool = False  # recompute activations: a third more work, far less memory
    tokens_per_micro_batch: int = number(
        0, 0, MOST_TOKENS, f"a whole number of tokens from 0 (choose) to {MOST_TOKENS}"
    )  # including padding; 0: 16384 on a GPU, on the CPU what keeps activations near 128 MiB
    tokens_per_sampling_batch: int = number(
        262144, 1, MOST_TOKENS, TOKENS
    )  # size of the KV cache, padding included
    threads: int = number(
        0, 0, 1024, "a whole number from 0 (choose) to 1024"
    )  # CPU threads; 0: one, of larger models as many as OMP_NUM_THREADS says
    share_weights: bool = True  # on the CPU, runs that train adapters map one file of frozen weights
    weight_decay: float = number(0.0, 0, 1)
    stop: tuple[str, ...] = ()  # strings that end a completion
    top_p: float = number(1.0, 1e-6, 1)  # draw from the most likely tokens of this total probability
    top_k: int = number(0, 0, MOST_TOKENS)  # draw from so many most likely tokens; 0: from all
    min_p: float = number(0.0, 0, 1)  # draw from tokens this fraction as likely as the most likely one
    chat_template: bool | str = chat_template()  # true: prompts in the tokenizer's, or in that of a file
    system_prompt: str = ""  # with chat_template
    chat_template_kwargs: Mapping[str, Any] = table()  # variables of the template, such as enable_thinking
    engine: str = one_of(
        "torch", "vllm", "openai"
    )  # sampler: torch (in this process), vllm (a server that runs here share), openai (your server)
    engine_url: str = option("", _is_server, SERVER)  # server address, without /v1
    engine_adapters: str = ""  # directory shared by server and trainer; empty: a temporary one
    engine_reload: str = "/v1/load_lora_adapter"  # vLLM; SGLang: /load_lora_adapter
    engine_command: tuple[str, ...] = words(
        "vllm", "a list such as ['/opt/vllm/bin/vllm']"
    )  # starts vLLM's command line, if it is in an environment of its own
    engine_arguments: tuple[str, ...] = ()  # further ones of `vllm serve`
    engine_memory: float | str = option(
        "auto",
        lambda value: value == "auto" or (is_number(value) and 0 < value <= MOST_GB),
        f"'auto' or a number of GB up to {MOST_GB}",
    )  # for vLLM on a GPU, or for its cache on the CPU; auto: what the trainers are estimated to leave
    engine_spare: float = number(
        0.0, 0, 4
    )  # ask a server for this fraction of prompts beyond a step's, and leave the slowest to the next step
    engine_sleep: bool = False  # vLLM frees the GPU's memory while a run updates; all runs on it take turns
    engine_timeout_s: float = number(
        600.0, 0.1, 86400, "seconds from 0.1 to 86400"
    )  # longest silence of a server
    teacher_url: str = option(
        "", _is_server, SERVER
    )  # with [teacher].teacher = "engine": server address, without /v1; empty: the sampling one
    teacher_model: str = ""  # its name at that server; empty: the only model there without adapters
    teacher_offload: bool = False  # its layers stay in the machine's memory, and are on the GPU in turn


DEFAULTS = LocalOptions()


def connect(spec: BackendSpec) -> LocalBackend:
    """Load a model and add fresh adapters to it."""
    options = options_of(spec.options)
    if missing := extras.missing_problem("backends", "local"):
        raise ConfigError(f"[backend].backend: {missing}")
    # peft imports it, if it is installed; it warns of kernels that are only faster
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    from retrain.backends.local.policy import opened

    return opened(spec, options)


def options_of(options: Mapping[str, object]) -> LocalOptions:
    """Return the options of a `[backend.options]` table; a ConfigError with all its problems."""
    return parsed(LocalOptions, options, check_options(options))


def check_options(options: Mapping[str, object]) -> list[str]:
    """Return the problems of a `[backend.options]` table, one line each, starting with the key."""
    if problems := problems_of(LocalOptions, options):
        return problems
    chosen, problems = parsed(LocalOptions, options, []), [*template_problems(options)]
    calls, quantizes = chosen.engine != DEFAULTS.engine, chosen.quantization != DEFAULTS.quantization
    if chosen.engine == "openai" and not chosen.engine_url:
        problems.append('engine_url: needed by engine = "openai"; for example "http://127.0.0.1:8000"')
    if chosen.engine_spare and not calls:
        problems.append('engine_spare: needs engine = "vllm" or "openai"; only calls are cancelled')
    if not chosen.lora:
        needing = {
            "lora_dropout: needs lora = true, because it is dropout of adapters": chosen.lora_dropout,
            f'engine: "{chosen.engine}" needs lora = true, because a server can only reload adapters': calls,
            "quantization: needs lora = true, because quantized weights cannot be trained": quantizes,
        }
        problems += [problem for problem, is_set in needing.items() if is_set]
    if quantizes and calls:
        what = 'needs engine = "torch", because the server would sample from other weights'
        problems.append(f"quantization: {what}")
    if has_several(options):
        problems += _ranks_problems(chosen, quantizes=quantizes)
    elif chosen.shard:
        problems.append(f'shard: needs several devices; set devices = 2 or more, or "{ALL}"')
    if quantizes and chosen.teacher_offload:
        problems.append('teacher_offload: needs quantization = "none"; quantized weights stay on their GPU')
    if quantizes and (missing := extras.Needs(EXTRA_4BIT, ("bitsandbytes",)).problem("4bit")):
        problems.append(f"quantization: {missing}")
    return problems


def _ranks_problems(options: LocalOptions, *, quantizes: bool) -> Iterator[str]:
    key = "devices" if options.devices != DEFAULTS.devices else "nodes"
    if options.engine == "openai":
        yield f'{key}: needs engine = "torch" or "vllm", got "openai"; your server has its own'
    if ":" in options.device:
        yield f'{key}: {options.device!r} is one device; set device = "cuda"'
    if quantizes:
        yield f"{key}: quantized weights are trained on one device only; use 1"


def teacher_modes(options: Mapping[str, object]) -> tuple[str, ...]:
    """Return the modes of `[teacher]`: all of them, but whole distributions are not sent to other ranks."""
    return ("reverse_kl",) if has_several(options) else ("reverse_kl", "jsd")


def has_several(options: Mapping[str, object]) -> bool:
    """Whether a run may have several ranks."""
    return any(options.get(key, 1) != 1 for key in ("devices", "nodes"))


def takes_permits(options: Mapping[str, object]) -> bool:
    """Whether calls hold permits: true if a server samples or teaches."""
    return options.get("engine", DEFAULTS.engine) != "torch" or bool(options.get("teacher_url"))


reports_calls = takes_permits
takes_adapters = always  # if it trains adapters, as `check` says


def check(config: Config, task: Task) -> list[Problem]:
    """Return what would stop a run: on this machine, then with its adapter, its prompts and its functions."""
    options = parsed(LocalOptions, config.backend.options, [])
    if problems := [Problem(where, what) for where, what in _run_problems(config, options) if what]:
        return problems
    unfit = model_files.start_problems(config, options) if config.model.adapter else ()
    if problems := [Problem(("model", "adapter"), what) for what in unfit]:
        return problems
    wrong = model_files.prompts_problem(config.model.model, [*task.train, *task.held_out])
    problems = [Problem(("data",), wrong)] if wrong else []
    if functions_of(config):  # which certainly cannot be shown, by the options and the model's files
        from retrain.backends.text import NEEDS_TEMPLATE, SHOWS_NONE, form_refused  # imports numpy

        template = template_in(options.chat_template)
        if not options.chat_template:
            problems.append(read_problem(NEEDS_TEMPLATE, PLACED))
        elif "tools" not in template if template else model_files.shows_no_tools(config.model.model):
            problems.append(read_problem(str(form_refused(SHOWS_NONE)), PLACED))
    return problems


def _run_problems(config: Config, options: LocalOptions) -> Iterator[tuple[Location, str]]:
    """Iterate over keys and what is wrong with each; "" for nothing."""
    model, own = config.model.model, ("backend", "options")
    if wrong := model_files.model_problem(model, local_files_only=options.local_files_only):
        yield ("model", "model"), wrong
    elif options.chat_template is True and (wrong := model_files.template_problem(model)):
        yield (*own, "chat_template"), wrong
    elif runs_here(config.campaign) and not model_files.is_offline(options.local_files_only):
        yield ("model", "model"), model_files.hub_problem(model, options.revision)
    if options.engine == "vllm":
        yield (*own, "engine_command"), vllm_problem(options.engine_command)
    lacks_gpu = runs_here(config.campaign) and not gpu_nodes()
    if options.engine_sleep:
        yield (*own, "engine_sleep"), _sleep_problem(config, options, lacks_gpu=lacks_gpu)
    yield from _teacher_problems(config, options)
    if config.algorithm.kl_coef and not options.lora:
        yield ("algorithm", "kl_coef"), NO_REFERENCE
    if options.device.startswith("cuda") and lacks_gpu:
        fix = 'this machine has no GPU; use "cpu" or "auto"'
        yield (*own, "device"), f"got {options.device!r}; {fix}"
    yield (*own, "devices"), _devices_problem(config, options)
    if options.shard:
        yield (*own, "shard"), model_files.shard_problem(model)
    launcher = (config.campaign or CampaignSection()).launcher
    if options.nodes > 1 and launcher != "slurm":
        yield (*own, "nodes"), f'several need launcher = "slurm", got "{launcher}"; use 1'


def _sleep_problem(config: Config, options: LocalOptions, *, lacks_gpu: bool) -> str:
    if options.engine != "vllm":
        return 'needs engine = "vllm"'
    if config.rate_limiter.max_staleness != 0:
        return "needs [rate_limiter].max_staleness = 0, because it samples and trains in turn"
    if options.device == "cpu" or lacks_gpu:
        return "vLLM can sleep on a GPU only"
    if has_several(config.backend.options):
        return "needs devices = 1, because other ranks do not free their memory for the server"
    return ""


def _devices_problem(config: Config, options: LocalOptions) -> str:
    if options.devices == DEFAULTS.devices:
        return ""
    campaign = config.campaign
    if campaign and campaign.launcher == "ray" and options.devices == ALL and not campaign.ray.gpus:
        return f'got "{ALL}", and Ray does not limit a task to the cores that it asks for; needs a number'
    if not runs_here(campaign) or not gpu_nodes():
        return ""  # a worker sees what its job has; a missing GPU is the problem of `device`
    if is_gpu(options) and options.devices != ALL and int(options.devices) > gpu_count():
        return f'got {options.devices}, and this machine has {gpu_count()} GPUs; use fewer, or "{ALL}"'
    return ""


def is_gpu(options: LocalOptions) -> bool:
    """Whether a run on this machine uses a GPU."""
    return bool(gpu_nodes()) if options.device == "auto" else options.device != "cpu"


def devices_of(options: LocalOptions) -> int:
    """Return how many devices a run on this machine uses."""
    if options.devices != ALL:
        return int(options.devices)
    return max(1, gpu_count() if is_gpu(options) else int(cpu_capacity()))


def _teacher_problems(config: Config, options: LocalOptions) -> Iterator[tuple[Location, str]]:
    teachers, temperature = teachers_of(config), config.training.temperature
    for teacher, where in teachers.items():
        if options.shard and teacher == SELF:
            yield where, 'got "self", whose layers are in pieces; set [backend.options].shard = false'
        elif teacher != ENGINE:
            yield from ((where, what) for what in model_files.teacher_problems(teacher, config, options))
        elif options.engine == "torch" and not options.teacher_url:
            what = 'got "engine", and no server; set [backend.options].teacher_url, or engine = "vllm"'
            yield where, what
    if options.teacher_offload and not teachers.keys() - {ENGINE}:
        yield ("backend", "options", "teacher_offload"), "has no effect; no teacher is on this machine"
    if ENGINE not in teachers:
        what = 'has no effect; set [teacher].teacher = "engine"'
        unread = (key for key in ("teacher_url", "teacher_model") if getattr(options, key))
        yield from ((("backend", "options", key), what) for key in unread)
        return
    if temperature != 1:
        at = ("training", "temperature")
        yield at, f"got {temperature:g}; a server scores a teacher's tokens at 1, so needs 1"


def advise(config: Config) -> list[str]:
    """Return advice about this configuration."""
    options = parsed(LocalOptions, config.backend.options, [])
    count, cores, advice = devices_of(options), max(1, int(cpu_capacity())), []
    is_here = runs_here(config.campaign)
    if count > cores and not is_gpu(options) and is_here:
        advice.append(
            f"backend.options.devices = {count} on {cores} cores: ranks wait for each other; use {cores}"
        )
    if options.teacher_offload:
        why = "" if is_gpu(options) or not is_here else "on the CPU all weights are in it anyway"
        if not any(model_files.has_own_weights(teacher, config, options) for teacher in teachers_of(config)):
            why = "the teacher's frozen weights are the policy's, which are in memory once"
        if why:
            advice.append(f"backend.options.teacher_offload moves nothing to the machine's memory: {why}")
    return [*advice, *_advise_precision(config, options)]


def _advise_precision(config: Config, options: LocalOptions) -> list[str]:
    bounds = config.algorithm.loss_params
    tightest = min(bounds.get("clip_low", 0.0), bounds.get("clip_high", 0.0))  # unset: the published
    if config.algorithm.loss_mode != "gspo" or tightest >= ROUNDED_RATIO:
        return []
    if options.dtype == "float32" or (options.dtype == "auto" and not is_gpu(options)):
        return []
    return [
        'in bfloat16, rounding alone moves a rollout\'s ratio further than "gspo" allows, which then cuts at '
        "random; set algorithm.loss_params = { clip_low = 0.01, clip_high = 0.01 }, or "
        'backend.options.dtype = "float32"'
    ]


def samples_as_it_trains(options: Mapping[str, object]) -> bool:
    """Whether a token has the same probability in sampling and training, but for rounding."""
    chosen = parsed(LocalOptions, options, [])
    is_precise = chosen.dtype == "float32" or (chosen.dtype == "auto" and chosen.device == "cpu")
    cuts = chosen.top_p < 1 or chosen.top_k > 0 or chosen.min_p > 0
    return chosen.engine == "torch" and is_precise and not cuts and not chosen.lora_dropout


def export(config: Config, checkpoint: Path, directory: Path) -> Exported:
    """Copy a checkpoint's trained weights into a directory, as peft or transformers reads them."""
    return model_files.exported(config, options_of(config.backend.options), checkpoint, directory)


def memory(config: Config, prompts: Sequence[Prompt]) -> MemoryEstimate | None:
    """Return an estimate of the memory that a run takes; None without the model's files."""
    options = options_of(config.backend.options)
    return model_files.estimate(config, options, prompts, devices_of(options))


def servers(config: Config) -> dict[str, str]:
    """Return the servers that a run needs, as address -> key."""
    options, keys = config.backend.options, []
    if options.get("engine") == "openai":
        keys.append("engine_url")
    if options.get("teacher_url"):
        keys.append("teacher_url")
    return {str(options.get(key, "")): f"[backend.options].{key}" for key in keys}


def wants_gpu(options: Mapping[str, Any]) -> int:
    """Return how many GPUs a run uses of those that it is assigned; 0 if it names a GPU, or uses the CPU."""
    if options.get("device", DEFAULTS.device) not in ("auto", "cuda"):
        return 0
    count = options.get("devices", DEFAULTS.devices)
    return MOST_DEVICES if count == ALL else int(count)


def device_use(options: Mapping[str, object]) -> DeviceUse | None:
    """Return how many devices a run uses, of all GPUs, or of all cores; None if it names one, or a server."""
    chosen = parsed(LocalOptions, options, [])
    if chosen.engine != DEFAULTS.engine or ":" in chosen.device:
        return None
    there, kind = (gpu_count(), "GPU") if is_gpu(chosen) else (int(cpu_capacity()), "core")
    return DeviceUse(devices_of(chosen), max(1, there), kind)


def devices(options: Mapping[str, Any]) -> Devices:
    """Return a core for each rank, and a GPU where a run names GPUs; nothing for all that there are."""
    count, nodes = options.get("devices", DEFAULTS.devices), int(options.get("nodes", DEFAULTS.nodes))
    if count in (DEFAULTS.devices, ALL):
        return Devices(nodes=nodes)
    return Devices(int(count), int(count) if options.get("device") == "cuda" else 0, nodes)
