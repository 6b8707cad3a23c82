"""Loads a model from a hub id or a path with transformers, adds adapters with peft, and knows its device.

Runs that train adapters on the CPU read the same frozen weights. The first one writes them, under a digest of
their content, among the user's own temporary files; each process of the user maps the file copy-on-write, so
that none can change what another reads. A file is removed once no process uses it.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import gc
import hashlib
import inspect
import math
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from peft.tuners.lora import Linear
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.nn.functional import linear
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from retrain.backends import BackendSpec
from retrain.backends.local import ALL, EXTRA_4BIT, LocalOptions
from retrain.backends.local.model_files import CONTEXT, directory_at, model_problem
from retrain.base import extras
from retrain.base.errors import BackendMemoryError, ConfigError, InfrastructureError, first_line
from retrain.base.extras import quiet_transformers
from retrain.base.locks import LockFile
from retrain.config.files import weights_of
from retrain.control.machine import cpu_capacity, memory_limit_bytes, own_memory_bytes
from retrain.records.layout import own_temporary_folder
from retrain.records.text import first_of

LOGITS_AT_A_TIME = 2**24  # numbers: 64 MiB in float32; far fewer already keep a GPU busy
ADAPTER, MODEL = "adapter", "model"  # folders of what is trained
WRAPPED = "base_model.model."  # peft's prefix of a layer's name
DEFAULT = "default"  # peft's name for the only adapter
Tensors = dict[str, torch.Tensor]
UNREACHABLE = ("couldn't connect", "offline mode")  # transformers' messages if the hub did not answer
CACHE_SHARE = 0.6  # of free memory; buffers are up to a quarter larger than the cache, and logits need some
ALIGNED = 64  # bytes, as PyTorch allocates: kernels may round differently at other addresses
FOLDER_LOCK = "folder.lock"  # held while a file is written, taken into use or removed
Parameters = Sequence[torch.nn.Parameter]


@dataclass(frozen=True, slots=True)
class Cut:
    """Which tokens may be drawn: all conditions apply, in the order min_p, top_k, top_p."""

    top_p: float
    top_k: int
    min_p: float

    @classmethod
    def by(cls, options: LocalOptions) -> Cut | None:
        """Return the cut that options ask for; None if they cut nothing."""
        chosen = (options.top_p, options.top_k, options.min_p)
        return cls(*chosen) if chosen != (1.0, 0, 0.0) else None

    def of(self, logp: torch.Tensor) -> torch.Tensor:
        """Return log-distributions over the tokens that are left; -infinity for all others."""
        if self.min_p:
            logp = logp.masked_fill(logp < logp.amax(-1, keepdim=True) + math.log(self.min_p), -math.inf)
        if 0 < self.top_k < logp.shape[-1]:
            logp = logp.masked_fill(logp < logp.topk(self.top_k).values[..., -1:], -math.inf)
        logp = torch.log_softmax(logp, dim=-1)
        if self.top_p < 1:
            ordered, places = logp.sort(descending=True, dim=-1)
            weights = ordered.exp()
            unlikely = weights.cumsum(-1) - weights >= self.top_p  # what is before a token suffices
            ordered = torch.log_softmax(ordered.masked_fill(unlikely, -math.inf), dim=-1)
            logp = torch.empty_like(logp).scatter_(-1, places, ordered)
        return logp


@dataclass(frozen=True, slots=True, eq=False)
class Policy:
    """A causal language model, split into body and output head."""

    causal: Any  # transformers' model, adapters included
    adapters: PeftModel | None  # the same model wrapped by peft; None if all parameters are trained
    body: torch.nn.Module  # token ids -> last hidden states
    context: int  # maximum tokens of prompt plus completion
    start: Tensors = field(default_factory=dict)  # of `trainable`, if they are the reference
    # around any number of passes, and around a backward one: ranks that hold pieces run them together
    together: Callable[[], AbstractContextManager[None]] = nullcontext
    backward: Callable[[], AbstractContextManager[None]] = nullcontext

    @property
    def device(self) -> torch.device:
        device: torch.device = self.causal.get_output_embeddings().weight.device  # others may be offloaded
        return device

    @property
    def rows_at_a_time(self) -> int:
        """How many rows' logits are computed together."""
        return max(1, LOGITS_AT_A_TIME // int(self.causal.config.get_text_config().vocab_size))

    def run_cached(self, cache: Any, input_ids: torch.Tensor, **others: Any) -> Any:
        """Run tokens behind those in transformers' cache, which grows by them; return the body's output."""
        return self.body(
            input_ids=input_ids, use_cache=True, **{_cache_key(type(self.body).forward): cache}, **others
        )

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return next-token logits in float32: (..., hidden) -> (..., vocabulary)."""
        config = self.causal.config.get_text_config()
        logits: torch.Tensor = self.causal.get_output_embeddings()(hidden).float()
        if scale := getattr(config, "logit_scale", None):
            logits = logits * scale
        if divisor := getattr(config, "logits_scaling", None):
            logits = logits / divisor
        if cap := getattr(config, "final_logit_softcapping", None):
            logits = torch.tanh(logits / cap) * cap
        return logits

    def log_distribution(
        self, hidden: torch.Tensor, temperature: float, cut: Cut | None = None, tokens: int | None = None
    ) -> torch.Tensor:
        """Return the next token's log-probabilities at a temperature, after a cut; 0 means 1, and no cut.

        With `tokens`, they are those among the first so many of the vocabulary.
        """
        logits = self.logits(hidden)[..., :tokens]
        logp = torch.log_softmax(logits if temperature in (0.0, 1.0) else logits / temperature, dim=-1)
        return cut.of(logp) if cut is not None and temperature else logp

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """Return the trained parameters by name, in a fixed order."""
        return {name: p for name, p in self.causal.named_parameters() if p.requires_grad}

    def with_own_adapters(self, *, can_run: bool = True) -> Policy:
        """Return a policy that shares the frozen weights and has adapters, and switches, of its own.

        One that cannot run has no frozen weights.
        """
        assert self.adapters is not None
        shared = {
            id(p): p if can_run else torch.nn.Parameter(p.to("meta"), requires_grad=False)
            for p in self.causal.parameters()
            if not p.requires_grad
        }
        adapters = copy.deepcopy(self.adapters, shared)
        shorten_forwards(adapters)  # those copied read the original's adapters
        causal = adapters.get_base_model()
        return Policy(causal, adapters, causal.base_model, self.context)

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """Act as the reference while entered: with the start's adapters, or with none; nothing is copied."""
        disabled = self.adapters.disable_adapter() if self.adapters else nullcontext()
        with at_start(self.causal, self.start) if self.start else disabled, torch.no_grad():
            yield


@functools.cache
def _cache_key(forward: Callable[..., Any]) -> str:
    """Return what a model calls its cache: `past_key_values` in transformers before 5.24."""
    return "cache" if "cache" in inspect.signature(forward).parameters else "past_key_values"


@contextmanager
def at_start(causal: Any, start: Tensors) -> Iterator[None]:
    """Exchange a model's adapters with those of its start, without dropout; nothing is copied."""
    drops = [layer for layer in causal.modules() if isinstance(layer, torch.nn.Dropout) and layer.training]
    _exchange(causal, start, drops, drop=False)
    try:
        yield
    finally:
        _exchange(causal, start, drops, drop=True)


def _exchange(causal: Any, start: Tensors, drops: list[torch.nn.Dropout], *, drop: bool) -> None:
    for layer in drops:
        layer.train(drop)
    for name, own in causal.named_parameters():
        if name in start:
            own.data, start[name] = start[name], own.data


def load(
    spec: BackendSpec, options: LocalOptions, device: torch.device, seed: int, tokenizer_of: str = ""
) -> tuple[Policy, Any]:
    """Return a model with adapters from the seed, or with every parameter trainable, and its tokenizer.

    The tokenizer may be that of another model.
    """
    model = spec.model
    if problem := model_problem(model, local_files_only=options.local_files_only):
        raise ConfigError(f"[model].model: {problem}")
    source: dict[str, Any] = {
        "pretrained_model_name_or_path": str(directory_at(model) or model),
        "local_files_only": options.local_files_only,
        "trust_remote_code": False,  # if it is not said, transformers asks on the terminal
        **({"revision": options.revision} if options.revision else {}),
    }
    automatic = "bfloat16" if device.type == "cuda" else "float32"
    dtype = getattr(torch, automatic if options.dtype == "auto" else options.dtype)
    with (
        fitting(model),
        _explained(model, options),
        torch.random.fork_rng(devices=[]),
        quiet_transformers(),
    ):  # drawn on the CPU, so that no GPU is initialised
        torch.default_generator.manual_seed(seed)
        config = AutoConfig.from_pretrained(**source)
        # so that sampling and training see the same policy
        for name, value in config.to_dict().items():
            if ("dropout" in name or name.endswith("_pdrop")) and isinstance(value, float):
                setattr(config, name, 0.0)
        causal = _weights(options, dtype, device, {**source, "config": config})
        adapters = _with_adapters(causal, spec.lora_rank, options) if options.lora else None
        if options.gradient_checkpointing:
            renamed = getattr(causal, "activation_checkpointing_enable", None)  # its name in transformers 6
            (renamed or causal.gradient_checkpointing_enable)({"use_reentrant": False})
        if tokenizer_of:
            source["pretrained_model_name_or_path"] = str(directory_at(tokenizer_of) or tokenizer_of)
        tokenizer = AutoTokenizer.from_pretrained(**source)
    if not set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids):
        raise ConfigError(
            f"[model].model: {model!r} has no tokenizer (such as tokenizer.json); save one with it"
        )
    with fitting(model):
        if not options.shard:  # else it is cut first
            causal.to(device)
        causal.eval()
    text = config.get_text_config()
    context = next((int(n) for name in CONTEXT if (n := getattr(text, name, None))), 2**31 - 1)
    return Policy(causal, adapters, causal.base_model, context), tokenizer


def _weights(options: LocalOptions, dtype: torch.dtype, device: torch.device, source: dict[str, Any]) -> Any:
    """Load a model; transformers would draw at random what its files lack, so such a model is refused."""
    if options.quantization == "4bit":
        # linear layers as NF4 in blocks of 64, their scales in eight bits, each expanded when it is used;
        # gradients flow through them to the adapters. Source: QLoRA, arXiv:2305.14314.
        extras.load("bitsandbytes", EXTRA_4BIT, 'quantization = "4bit"')
        quantization = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
        source = {**source, "quantization_config": quantization, "device_map": {"": device}}
    causal, loading = AutoModelForCausalLM.from_pretrained(**source, dtype=dtype, output_loading_info=True)
    if missing := sorted(loading["missing_keys"]):
        name = source["pretrained_model_name_or_path"]
        lacks = f"the files of {name!r} lack weights of the model: {first_of(missing, 3)}"
        raise ConfigError(f"[model].model: {lacks}; save or download it again, as a causal language model")
    for layer in causal.modules():
        # with AVX512-BF16 it would, after the first sample, repack the weights for a kernel without gradients
        if hasattr(layer, "support_avx512bf16_for_cpu"):
            layer.support_avx512bf16_for_cpu = False
    return causal


@contextmanager
def fitting(model: str) -> Iterator[None]:
    """Convert an out-of-memory error into one that names the model."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise BackendMemoryError(f"[model].model: {model!r} does not fit in memory ({error})") from error


@contextmanager
def _explained(model: str, options: LocalOptions) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        if is_out_of_memory(error):
            raise
        first, fix = first_line(error), "check the name, the revision and your access"
        if "custom code" in first:
            first, fix = (
                "it needs code of its own, which is never run",
                "use one that transformers has code for",
            )
        if "ignore_mismatched_sizes" in first:  # following transformers' advice would train random weights
            first = "its weights do not fit its config.json"
        message = f"[model].model: {model!r} cannot be loaded ({first})"
        if not options.local_files_only and any(words in str(error) for words in UNREACHABLE):
            raise InfrastructureError(f"{message}; use a local path, or check the connection") from error
        raise ConfigError(f"{message}; {fix}") from error


def _with_adapters(causal: Any, rank: int, options: LocalOptions) -> PeftModel:
    targets, excluded = options.target_modules, None
    if causal.config.get_text_config() is not causal.config:  # not what text never passes, such as what sees
        decoder, head = causal.get_decoder(), causal.get_output_embeddings()
        names = {module: re.escape(name) for name, module in causal.named_modules() if name}
        passed = "|".join(names[module] for module in (decoder, head) if module in names)
        excluded = rf"(?!(?:{passed})(?:\.|$)).*" if decoder in names else None
    lora = LoraConfig(
        revision=options.revision or None,  # of the base model, recorded in the adapters' config
        r=rank,
        lora_alpha=options.lora_alpha or 2 * rank,
        target_modules=targets[0] if targets == ("all-linear",) else list(targets),
        exclude_modules=excluded,
        lora_dropout=options.lora_dropout,
        bias="none",
        task_type="CAUSAL_LM",
    )
    try:
        adapted = get_peft_model(causal, lora)
    except ValueError as error:
        raise ConfigError(
            f"[backend.options].target_modules: {list(targets)} ({first_line(error)})"
        ) from error
    assert isinstance(adapted, PeftModel)
    shorten_forwards(adapted)
    return adapted


def shorten_forwards(model: torch.nn.Module) -> None:
    """Replace the forward pass of every plain LoRA layer by three calls, where peft makes about thirty.

    In small models this overhead dominates a step; in large ones the fused sum saves two passes over every
    layer's output. peft runs all other layers. Source: LoRA, arXiv:2106.09685.
    """
    for layer in model.modules():
        if type(layer) is not Linear or type(layer.get_base_layer()) is not torch.nn.Linear:
            continue
        if DEFAULT not in layer.lora_variant and not layer.lora_bias[DEFAULT]:
            layer.__dict__["forward"] = _direct(layer)


def _direct(layer: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    base = layer.get_base_layer()
    down, up = layer.lora_A[DEFAULT].weight, layer.lora_B[DEFAULT].weight
    scaling, dropout = layer.scaling[DEFAULT], layer.lora_dropout[DEFAULT]
    drops = isinstance(dropout, torch.nn.Dropout)

    def forward(x: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, -2)
        result = linear(rows, base.weight, base.bias)
        shape = (*x.shape[:-1], result.shape[-1])
        if layer.disable_adapters:
            return result.view(shape)
        low = dropout(rows) if drops else rows
        if x.dtype is down.dtype:  # in place: nothing else needs the layer's output without its adapters
            return result.addmm_(linear(low, down), up.t(), alpha=scaling).view(shape)
        low = linear(low.to(down.dtype), down)
        return torch.addmm(result.to(down.dtype), low, up.t(), alpha=scaling).to(result.dtype).view(shape)

    return forward


def save_weights(directory: Path, policy: Policy, state: Tensors | None = None) -> None:
    """Write the trained weights in the format that peft or transformers reads.

    A policy in pieces needs its model's whole state.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft queries the hub about the base model's vocabulary
        if policy.adapters is not None:
            policy.adapters.save_pretrained(str(directory / ADAPTER), save_embedding_layers=False)
        else:
            policy.causal.save_pretrained(str(directory / MODEL), state_dict=state)


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


def choose_device(name: str, rank: int = 0) -> torch.device:
    """Return the device that an option names, of a rank of a node; one that is not there is a ConfigError."""
    count = torch.cuda.device_count()
    if name == "auto":
        name = "cuda" if count else "cpu"
    device = torch.device(f"cuda:{rank}" if name == "cuda" else name)  # limits and statistics need a number
    if device.type == "cuda" and device.index >= count:
        there = f"cuda:0 to cuda:{count - 1}" if count else "no GPU that PyTorch can use"
        raise ConfigError(f"[backend.options].device: got {name!r}; this process sees {there}")
    return device


def count_devices(options: LocalOptions) -> int:
    """Return how many devices a run uses; more than this process sees are a ConfigError."""
    gpus = 0 if options.device == "cpu" else torch.cuda.device_count()
    if options.devices == ALL:
        of_job = float(os.environ.get("SLURM_CPUS_ON_NODE", "inf"))  # sites need not confine it to them
        return gpus or max(1, int(min(cpu_capacity(), of_job)))
    wanted = int(options.devices)
    if gpus and wanted > gpus:
        raise ConfigError(
            f'[backend.options].devices: got {wanted}, this process sees {gpus}; use fewer, or "{ALL}"'
        )
    return wanted


def finished_s(device: torch.device) -> float:
    """Wait until the device has finished all submitted work; return the time (monotonic clock, seconds)."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class DeviceMemory:
    """Limit and peak use of a device's memory."""

    def __init__(self, device: torch.device, ranks: int = 1) -> None:
        """Measure a device; so many ranks share the memory of a machine."""
        self._device, self._ranks = device, ranks
        self._share = 1.0
        on_gpu = device.type == "cuda"
        self._total = float(
            torch.cuda.get_device_properties(device).total_memory if on_gpu else memory_limit_bytes()
        )

    def limit(self, share: float) -> None:
        """Limit this process to a fraction of a GPU's memory; other devices have no limit."""
        if self._device.type == "cuda" and share != self._share:
            torch.cuda.set_per_process_memory_fraction(share, self._device)
            self._share = share

    def cache_bytes(self) -> float:
        """Memory that a key-value cache may take: on a GPU of what is free now.

        On the CPU half of the machine's, whatever is free, so that a resumed run draws the same.
        """
        if self._device.type != "cuda":
            return self._total / 2 / self._ranks
        free = torch.cuda.mem_get_info(self._device)[0]
        unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return float(CACHE_SHARE * min(free + unused, self._total * self._share))

    def begin_peak(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def peak_fraction(self) -> float:
        """Peak fraction in use since `begin_peak`; on the CPU, the process's current memory."""
        if self._device.type == "cuda":
            used = int(torch.cuda.max_memory_allocated(self._device))
        else:
            used = own_memory_bytes([os.getpid()])
        return min(1.0, used / (self._total * self._share))

    def of_ranks(self, fractions: Sequence[float]) -> float:
        """Return the peak fraction of a device, by those of all ranks; a node's share its CPU's memory."""
        at_a_time = 1 if self._device.type == "cuda" else self._ranks
        starts = range(0, len(fractions), at_a_time)
        return min(1.0, max(sum(fractions[start : start + at_a_time]) for start in starts))

    def free(self) -> None:
        """Free cached blocks that no tensor uses, so that a smaller attempt gets contiguous memory."""
        gc.collect()  # reference cycles in an exception's frames may hold tensors
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed; CPU and CUDA libraries raise a plain RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    words = ("out of memory", "can't allocate memory", "not enough memory", "STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


class SharedWeights:
    """This process's share in a file of weights."""

    def __init__(self, path: Path, lock: LockFile) -> None:
        self.path = path
        self._lock = lock

    def close(self) -> None:
        """Stop using the file, and remove it if nobody else does; safe to call twice."""
        if self._lock.is_open:
            self._lock.close()
            with suppress(OSError), _folder(self.path.parent):
                _remove_unused(self.path.parent)


def share(causal: torch.nn.Module) -> SharedWeights | None:
    """Let a model's frozen parameters be views of a file that other processes map as well.

    Values stay the same to the bit. Returns None if the file cannot be written: the model keeps its own.
    """
    parameters = [p for p in causal.parameters() if not p.requires_grad]  # tied ones once
    folder = own_temporary_folder("weights")
    path = folder / f"{_digest(parameters)}.bin"
    try:
        with _folder(folder):
            _remove_unused(folder)
            lock = LockFile(f"{path}.lock")
            lock.try_lock(shared=True)  # others only share it
            if not path.exists():
                _write(path, parameters)
    except OSError:
        return None
    storage = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=path.stat().st_size)
    for parameter, (begin, _) in zip(parameters, _places(parameters), strict=True):
        view = torch.empty(0, dtype=parameter.dtype)
        first = begin // parameter.dtype.itemsize
        parameter.data = view.set_(storage, first, parameter.shape)
    return_freed()
    return SharedWeights(path, lock)


def return_freed() -> None:
    """Have the system get what copies of weights took, which glibc keeps."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def _folder(folder: Path) -> FileLock:
    return FileLock(folder / FOLDER_LOCK, mode=0o600)


def _places(parameters: Parameters) -> Iterator[tuple[int, int]]:
    """Iterate over where each parameter's bytes begin and end."""
    end = 0
    for parameter in parameters:
        begin = -(-end // ALIGNED) * ALIGNED
        end = begin + parameter.nbytes
        yield begin, end


def _bytes(parameter: torch.nn.Parameter) -> memoryview:
    flat = parameter.detach().contiguous().view(-1).view(torch.uint8)
    return memoryview(flat.numpy())


def _digest(parameters: Parameters) -> str:
    digest = hashlib.sha256()
    for parameter in parameters:  # in the model's order: adapters change names
        digest.update(f"{tuple(parameter.shape)} {parameter.dtype}\n".encode())
        digest.update(_bytes(parameter))
    return digest.hexdigest()[:32]


def _write(path: Path, parameters: Parameters) -> None:
    """Write all bytes and rename, so that a file that exists is complete."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        with temporary.open("xb") as file:
            for parameter, (begin, _) in zip(parameters, _places(parameters), strict=True):
                file.seek(begin)
                file.write(_bytes(parameter))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _remove_unused(folder: Path) -> None:
    for path in (*folder.glob("*.bin"), *folder.glob("*.tmp")):
        lock = LockFile(f"{path}.lock")
        if lock.try_lock():
            path.unlink(missing_ok=True)
            Path(f"{path}.lock").unlink(missing_ok=True)
        lock.close()
