"""What the files of a model and of adapters tell, without torch: faults, sizes, and the memory of a run.

Only certain faults are reported here; the others appear when the model is loaded. The estimate of memory
counts a decoder of the Llama kind: rotary attention, gated feed-forward layers, RMS norms. Other kinds take
about as much at the same sizes. Checked against measurements in docs/backends-local.md.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrain.backends import ENGINE, SELF, Exported, MemoryEstimate, other_token
from retrain.base.errors import ConfigError, RecordsError, is_passing, records_error
from retrain.base.registry import PLACED, read_problem
from retrain.base.rollouts import Prompt
from retrain.config.files import (
    PEFT,
    REMOTE,
    adapter_problem,
    fingerprint,
    model_of,
    runs_instead,
    weights_of,
)
from retrain.config.resolve import plays_episodes, runs_here, teachers_of
from retrain.config.schema import Config
from retrain.control.machine.nvidia import gpu_nodes
from retrain.records.layout import RunFiles, recorded_tables

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from retrain.backends.local import LocalOptions


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
    path = directory_at(model)
    if path is None and not HUB_ID.fullmatch(model):
        return f"{model!r} is no directory here, and no name on the hub; needs a saved model's directory"
    if path is None and is_offline(local_files_only) and not directory_at(_cached(model)):
        return (
            f"{model!r} is neither a directory nor in {_cache()}, and offline mode is on; "
            "use a directory, or allow the hub (local_files_only = false, no HF_HUB_OFFLINE)"
        )
    if path is None:
        return ""
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
    config = read_json(path / "config.json")
    tables = [table for table in (config, config.get("text_config")) if isinstance(table, dict)]
    lengths = [table.get(name) for table in tables for name in CONTEXT]
    room = next((length for length in lengths if isinstance(length, int)), math.inf)
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


RUNTIME_BYTES = {"cpu": 476 << 20, "cuda": 600 << 20}  # PyTorch, transformers, a tokenizer; a GPU's context
QUANTIZER_BYTES = 115 << 20  # bitsandbytes
FLOAT = 4  # bytes; the optimizer keeps float32 regardless of the weights' dtype
TINY_PARAMETERS = 20_000_000  # below this size, a second thread or a shared file costs more than it saves
MOMENTS, GRADIENTS = 2, 1  # copies of the trained weights
SPARE = 1.25  # of a cache that grows in place
LOGITS_SAMPLED = 5  # copies in sampling: logits, log-probabilities, noise, and two that are temporary
LOGITS_TRAINED, LOGITS_AT_A_TIME = 8, 2**24  # the same in training, in chunks of so many numbers
GATHERED = 3  # layers: one that runs, as it was received and as it is used, and the next
MATRIX = 2  # dimensions
OF_LAYER = re.compile(r".*?\b\d+\.")  # a layer's name, with which those of its tensors begin
NOT_LINEAR = {"embed", "head", "wte", "wpe"}  # words in names of other matrices
TEMPLATE_TOKENS = 32  # that a chat template adds, about
QUANTIZED = {"none": 0.0, "4bit": 0.5 + (1 + 4 / 256) / 64}  # bytes of a linear layer's weight, with scales
FRAGMENTED = {"cpu": 1.3, "cuda": 1.1}  # blocks of changing sizes leave gaps
GPU_TOKENS = 16384  # of a micro-batch
CPU_TOKENS = (256, 2048)  # at least, at most: smaller ones are slower, and larger ones no faster
CPU_ACTIVATIONS = 128 << 20  # bytes that a micro-batch's activations take on the CPU, about


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a saved model."""

    parameters: int
    linear: tuple[tuple[str, int, int], ...]  # name, outputs and inputs of each linear layer
    layers: int
    hidden: int
    heads: int  # width of all attention heads
    kv_heads: int  # width of all heads of keys, which is that of values
    feed_forward: int
    vocabulary: int
    movable: int  # weights of all layers but the largest

    def adapters(self, rank: int, targets: Sequence[str]) -> int:
        everywhere = tuple(targets) == ("all-linear",)
        chosen = (n + m for name, n, m in self.linear if everywhere or name.split(".")[-2] in targets)
        return rank * sum(chosen)

    def activations(self, rank: int) -> int:
        """Return the numbers that training keeps for each token and layer.

        Both norms' inputs and outputs; queries, keys, values and the heads' output; the gate, its activation,
        the up projection and their product; the low-rank input of seven adapters.
        """
        return 4 * self.hidden + 2 * self.heads + 2 * self.kv_heads + 4 * self.feed_forward + 7 * rank


def micro_batch(options: LocalOptions, sizes: Sizes | None, device: str, rank: int, width: int) -> int:
    """Return the tokens of a micro-batch; `width` is the bytes of a number, `sizes` None if unknown."""
    if options.tokens_per_micro_batch:
        return options.tokens_per_micro_batch
    if device != "cpu":
        return GPU_TOKENS
    least, most = CPU_TOKENS
    if sizes is None:
        return least
    return min(max(CPU_ACTIVATIONS // (sizes.activations(rank) * sizes.layers * width), least), most)


@dataclass(frozen=True, slots=True)
class LargestStep:
    """The largest step that a run may take, which decides about its memory."""

    sizes: Sizes
    options: LocalOptions
    device: str  # cpu or cuda
    width: int  # bytes of a weight
    rank: int  # of adapters; 0 without
    drawn: int  # tokens of a completion, at most
    length: int  # the same with the longest prompt and what an environment says
    pieces: int = 1  # that layers are cut into, one for each rank

    def held(self) -> dict[str, int]:
        """Return the bytes that are taken all the time, by what takes them."""
        sizes, adapts = self.sizes, self.options.lora
        trained = sizes.adapters(self.rank, self.options.target_modules) if adapts else sizes.parameters
        masters = 1 if self.width < FLOAT and not adapts else 0
        optimizer = trained * FLOAT * (MOMENTS + GRADIENTS + masters)
        if self.trains_pieces:
            layers = sum(n * m for _, n, m in sizes.linear)
            outside, layer = trained - layers, layers // sizes.layers
            # weights of layers are their own masters, and gradients of what is outside are whole at first;
            # that of a layer is there as it was computed and as it is sent
            optimizer = FLOAT * (
                (trained * (MOMENTS + GRADIENTS) + outside * masters) // self.pieces + outside * GRADIENTS
            ) + layer * (self.width + FLOAT)
        quantizes = bool(QUANTIZED[self.options.quantization])
        return {
            "runtime": RUNTIME_BYTES[self.device] + (QUANTIZER_BYTES if quantizes else 0),
            "weights": self.weights(),
            "adapters": trained * FLOAT if adapts else 0,
            "optimizer": optimizer,
        }

    @property
    def trains_pieces(self) -> bool:
        return self.pieces > 1 and not self.options.lora

    def weights(self) -> int:
        """Return the bytes of the weights; of quantized ones, and of layers in pieces, some are expanded."""
        linear = [n * m for _, n, m in self.sizes.linear]
        if self.pieces > 1:
            gathered = GATHERED * sum(linear) // self.sizes.layers
            outside, kept = self.sizes.parameters - sum(linear), FLOAT if self.trains_pieces else self.width
            return (outside + gathered) * self.width + sum(linear) // self.pieces * kept
        if not (width := QUANTIZED[self.options.quantization]):
            return self.sizes.parameters * self.width
        others = self.sizes.parameters - sum(linear)
        return int(sum(linear) * width + (others + max(linear, default=0)) * self.width)

    def sampling(self, rows: int) -> int:
        """Return the bytes of the key-value cache and of logits; 0 if a server samples."""
        if self.options.engine != "torch":
            return 0
        rows = max(1, min(rows, self.options.tokens_per_sampling_batch // self.length))
        cache = 2 * self.sizes.layers * self.sizes.kv_heads * self.width * self.length * SPARE
        return int(rows * (cache + LOGITS_SAMPLED * FLOAT * self.sizes.vocabulary))

    def training(self, rows: int) -> int:
        """Return the bytes of activations and of logits."""
        at_a_time = micro_batch(self.options, self.sizes, self.device, self.rank, self.width)
        rows = max(1, min(rows, at_a_time // self.length))
        of_layer, layers = self.sizes.activations(self.rank), self.sizes.layers
        kept = of_layer + self.sizes.hidden * layers
        if not self.options.gradient_checkpointing:
            kept = of_layer * layers
        logits = LOGITS_TRAINED * FLOAT * min(LOGITS_AT_A_TIME, rows * self.drawn * self.sizes.vocabulary)
        return int(rows * self.length * kept * self.width * FRAGMENTED[self.device]) + logits


def estimate(
    config: Config, options: LocalOptions, prompts: Sequence[Prompt], devices: int = 1
) -> MemoryEstimate | None:
    """Return what a run takes at its peak of one GPU, or of the machine's memory with all of its processes.

    None if the model's files are not on this machine.
    """
    directory = files_of(config.model.model)
    sizes = read_sizes(directory) if directory else None
    if directory is None or sizes is None or not sizes.parameters:
        return None
    training = config.training
    on_gpu = bool(gpu_nodes()) if options.device == "auto" else options.device != "cpu"
    automatic = "bfloat16" if on_gpu else "float32"
    # as many as the policy's, which nobody knows better before the first episode
    observed = training.max_tokens if plays_episodes(config) else 0
    prompt = prompt_tokens(directory, prompts, options.system_prompt)
    of_run = devices * options.nodes
    step = LargestStep(
        sizes=sizes,
        options=options,
        device="cuda" if on_gpu else "cpu",
        width={"float32": FLOAT, "bfloat16": FLOAT // 2}[options.dtype.replace("auto", automatic)],
        rank=config.model.lora_rank if options.lora else 0,
        drawn=training.max_tokens,
        length=prompt + (TEMPLATE_TOKENS if options.chat_template else 0) + training.max_tokens + observed,
        pieces=of_run if options.shard else 1,
    )
    held, ranks = step.held(), 1 if on_gpu else devices
    others = {**held}
    if not step.trains_pieces:
        others["optimizer"] = held["adapters"] or sizes.parameters * FLOAT  # only a gradient
    is_mapped = options.share_weights and options.lora and not options.shard
    if is_mapped and sizes.parameters >= TINY_PARAMETERS:
        others["weights"] = 0
    held = {name: size + (ranks - 1) * others[name] for name, size in held.items()}
    teachers = [_teacher_bytes(teacher, config, step) for teacher in teachers_of(config)]
    movable = sum(bytes_ for _, bytes_ in teachers) if on_gpu else 0
    is_moved = options.teacher_offload and movable > 0
    if of_teachers := sum(bytes_ for bytes_, _ in teachers) - (movable if is_moved else 0):
        held["teacher"] = of_teachers
    rows = -(-training.batch_size // of_run) * training.group_size
    least = ranks * max(step.sampling(1), step.training(1))
    return MemoryEstimate(
        step.device,
        held,
        ranks * step.sampling(rows),
        ranks * step.training(rows),
        least,
        movable,
        is_moved,
    )


def has_own_weights(teacher: str, config: Config, options: LocalOptions) -> bool:
    """Whether a teacher on this machine has frozen weights that are not the policy's."""
    if teacher in (ENGINE, SELF):
        return teacher == SELF and not options.lora
    try:
        files = teacher_files(teacher)
    except ConfigError:
        return False  # `check` reports it
    if options.shard or not options.lora:
        return True
    return not files.is_on(config.model.model, options.revision)


def _teacher_bytes(teacher: str, config: Config, step: LargestStep) -> tuple[int, int]:
    """Return the bytes of a teacher's weights beside the policy's, and of those that can be offloaded."""
    if teacher == ENGINE:
        return 0, 0
    adapters, directory = 0, files_of(config.model.model)
    if teacher == SELF:
        adapters = step.held()["adapters"]
    else:
        try:
            files = teacher_files(teacher)
        except ConfigError:
            return 0, 0  # `check` reports it
        adapters = (files.adapter / PEFT).stat().st_size if files.adapter else 0
        directory = files_of(files.model)
    own = directory is not None and has_own_weights(teacher, config, step.options)
    sizes = read_sizes(directory) if directory and own else None
    if sizes is None:
        return adapters, 0
    return adapters + replace(step, sizes=sizes, pieces=1).weights(), step.width * sizes.movable


def read_sizes(directory: Path) -> Sizes | None:
    """Return the sizes of a model that is saved as safetensors; None if they cannot be read."""
    config = read_json(directory / "config.json")
    text = config.get("text_config") or config
    shapes = _shapes(directory)
    try:
        hidden, heads = int(text["hidden_size"]), int(text["num_attention_heads"])
        of_layers = Counter[str]()
        for name, shape in shapes.items():
            if layer := OF_LAYER.match(name):
                of_layers[layer[0]] += prod(shape)
        head = int(text.get("head_dim") or hidden // heads)
        wide = [(name, shape[0], shape[1]) for name, shape in shapes.items() if len(shape) == MATRIX]
        return Sizes(
            parameters=sum(map(prod, shapes.values())),
            linear=tuple(layer for layer in wide if not NOT_LINEAR & {*re.split("[._]", layer[0])}),
            layers=int(text["num_hidden_layers"]),
            hidden=hidden,
            heads=head * heads,
            kv_heads=head * int(text.get("num_key_value_heads") or heads),
            feed_forward=int(text.get("intermediate_size") or 4 * hidden),
            vocabulary=int(text["vocab_size"]),
            movable=sum(of_layers.values()) - max(of_layers.values(), default=0),
        )
    except (KeyError, TypeError, ValueError):
        return None


def shard_problem(model: str) -> str:
    """Return why a model's layers cannot be cut, as far as its files are here and tell it."""
    directory = files_of(model)
    sizes = read_sizes(directory) if directory else None
    if sizes is None or sizes.layers > 1:
        return ""
    return f"{model!r} has one layer, and it is not cut alone; set it to false"


def _shapes(directory: Path) -> dict[str, Sequence[int]]:
    shapes: dict[str, Sequence[int]] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with suppress(OSError, ValueError), path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, 100 << 20)))
            if isinstance(header, dict):
                shapes |= {name: facts["shape"] for name, facts in header.items() if "shape" in facts}
    return shapes


@dataclass(frozen=True, slots=True)
class TeacherFiles:
    """Where the weights of a teacher are."""

    model: str  # a directory, or a name on the hub
    tokenizer: str  # where its tokenizer is: there, or with the model that the run began with
    adapter: Path | None = None  # directory of adapters on it
    revision: str = ""  # on the hub

    def is_on(self, model: str, revision: str) -> bool:
        """Whether these are the same weights, or adapters on them."""
        if self.model == model:
            return self.revision == revision
        return all(map(directory_at, (self.model, model))) and fingerprint(self.model) == fingerprint(model)


def teacher_files(teacher: str) -> TeacherFiles:
    """Return where a teacher's weights are; a ConfigError if there are none.

    Args:
        teacher: directory of a model, of adapters or of a run, or a name on the hub.
    """
    path = directory_at(teacher)
    if path is None or (path / "config.json").is_file():
        return TeacherFiles(teacher, teacher)
    weights, problem, whole = weights_of(path), adapter_problem(teacher), model_of(path)
    if weights is None and whole:
        problem = "" if (path / "done.json").is_file() else f"{teacher!r} is a run that is not finished"
    if not problem and not whole and (weights is None or weights.name != PEFT):
        problem = f"{teacher!r} is a run of another backend; name one of 'local', or a saved model"
    if problem:
        raise ConfigError(f"[teacher].teacher: {problem}")
    if weights is None:
        model = recorded_tables(RunFiles(path)).get("model", {})
        return TeacherFiles(str(whole), str(model.get("model", "")))
    facts = read_json(weights.parent / CONFIG)
    base, revision = str(facts.get("base_model_name_or_path", "")), str(facts.get("revision") or "")
    if not base:
        raise ConfigError(f"[teacher].teacher: {weights.parent / CONFIG} names no base model; save it again")
    return TeacherFiles(base, base, weights.parent, revision)


def teacher_problems(teacher: str, config: Config, options: LocalOptions) -> Iterator[str]:
    """Iterate over why a run cannot learn from a teacher, as far as the files on this machine tell."""
    model = config.model.model
    if teacher == SELF:
        return
    try:
        files = teacher_files(teacher)
    except ConfigError as error:
        yield from (read_problem(problem, PLACED).what for problem in error.problems)
        return
    wrong = model_problem(files.model, local_files_only=options.local_files_only)
    if not wrong and runs_here(config.campaign) and not is_offline(options.local_files_only):
        wrong = hub_problem(files.model, files.revision)
    if wrong:
        if files.model == teacher and directory_at(teacher) is None:
            others = runs_instead(teacher, Path(config.logging.log_dir))
            wrong += f"; {others or 'a run is named by its directory, or as NAME/RUN once it is finished'}"
        yield wrong
        return
    places = [files_of(name) for name in (model, files.tokenizer)]
    own, theirs = (_tokenizer(place) if place else None for place in places)
    if own and theirs and (difference := other_token(own.get_vocab(), theirs.get_vocab())):
        yield difference


CONFIG = "adapter_config.json"
# keys of adapters that are computed in another way than this backend's
OTHER_KINDS = (
    *("use_dora", "use_rslora", "use_qalora", "use_bdlora", "lora_bias", "alora_invocation_tokens"),
    *("arrow_config", "kasa_config", "layer_replication", "layers_to_transform", "modules_to_save"),
    *("rank_pattern", "alpha_pattern", "target_parameters", "trainable_token_indices"),
)
UNMERGEABLE = (
    "they were trained on weights in four bits, and merged with the full ones they would be another policy; "
    "publish the adapters, which others load on the same four bits"
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
    base, model = facts.get("base_model_name_or_path"), config.model.model
    if isinstance(base, str) and base and base != model:  # another name, but it may be the same model's
        of = fingerprint if Path(base).is_dir() and Path(model).is_dir() else lambda name: Path(name).name
        if of(base) != of(model):
            yield f"was trained on {base!r}, not on [model].model = {model!r}"


def _kinds(modules: Iterable[str]) -> list[str]:
    """Return the last parts of layers' names, each once."""
    return sorted({name.rpartition(".")[2] for name in modules})


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
        unmergeable="" if options.quantization == "none" else UNMERGEABLE,
    )
