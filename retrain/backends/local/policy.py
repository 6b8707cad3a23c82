"""The local policy of one run: sampling, training and checkpoints combined."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

from retrain.backends import (
    ENGINE,
    SELF,
    Backend,
    BackendInfo,
    BackendSpec,
    Optimization,
    RankCall,
    Sampling,
    Teacher,
    TeacherSpec,
    UpdateStats,
)
from retrain.backends.engines import Drawn, Ids
from retrain.backends.local import DEFAULTS, NO_REFERENCE, LocalOptions
from retrain.backends.local.engine import EngineSampler
from retrain.backends.local.engine_teacher import open_engine_teacher
from retrain.backends.local.loading import (
    ADAPTER,
    MODEL,
    Cut,
    DeviceMemory,
    Policy,
    Tensors,
    choose_device,
    count_devices,
    fitting,
    load,
    load_adapters,
    load_start,
    save_weights,
    share,
)
from retrain.backends.local.logprob_check import most_shared, try_out
from retrain.backends.local.model_files import (
    FLOAT,
    TINY_PARAMETERS,
    files_of,
    micro_batch,
    read_sizes,
    too_long,
)
from retrain.backends.local.ranks import Ranks
from retrain.backends.local.sampling import TorchSampler, budget_of
from retrain.backends.local.teacher import Itself, LocalTeacher, load_teacher
from retrain.backends.local.training import MASTER, Dropout, Learner, Optimizer
from retrain.backends.metering import ModelCosts, SamplingWork
from retrain.backends.rows import AdmittedTurn, LiveRows, TurnFeed, unsampled, with_turns
from retrain.backends.saved import reading, write_facts
from retrain.backends.text import Schemas, Text, check_turns, offer_functions, to_groups, with_messages
from retrain.base.errors import ConfigError, FullContextError, RecordsError
from retrain.base.json_lines import Demonstration
from retrain.base.rollouts import CallForm, FirstTurn, Group, Loss, NextTurn, Prompt, Rollout, TrainingSample
from retrain.config.files import PEFT
from retrain.records.row_parts import EngineUse

FORMAT = 1  # increment when old checkpoints can no longer be read
SAME = "resume with the configuration, and on the kind of device, that wrote it"
FACTS, OPTIMIZER, START = "local.json", "optimizer.safetensors", "start.safetensors"
TEACHER = "teacher.safetensors"
ADDED = ("lora_alpha", "quantization")  # to the options after the first checkpoints were written
SHARDS = (2, 13)  # PyTorch whose FSDP2 can try a pass again
REMEMBERED = 10_000  # prompts whose token ids are cached: tens of megabytes at most


def opened(spec: BackendSpec, options: LocalOptions) -> LocalBackend:
    """Return the policy of a run, on all of its devices."""
    spec = replace(spec, seed=spec.seed if spec.seed >= 0 else secrets.randbits(32))
    ranks = Ranks.start(spec, count_devices(options), options.nodes)
    try:
        backend = LocalBackend(spec, options, ranks)
        ranks.values()
        backend.spread()
    except BaseException:
        ranks.close()
        raise
    return backend


class LocalBackend(Backend):
    """A causal language model with its optimizer; on several devices, that of rank 0."""

    def __init__(self, spec: BackendSpec, options: LocalOptions, ranks: Ranks) -> None:
        device, seed = choose_device(options.device, ranks.rank % ranks.devices), spec.seed
        if ranks.size > 1 and device.type == "cuda":
            torch.cuda.set_device(device)
        policy, tokenizer = load(spec, options, device, seed)
        shards = _sharding(ranks.size).Shards(policy, spec.model) if options.shard else None
        samples_elsewhere = options.engine != "torch" and ranks.rank == 0
        own = policy.with_own_adapters(can_run=not options.shard) if samples_elsewhere else None
        ranks.join(device, policy.causal, tokenizer, reads_all=options.shard and not options.lora)
        if shards is not None:
            with fitting(spec.model):
                policy = shards.over(ranks, device)
        directory = files_of(spec.model)
        sizes, rank = read_sizes(directory) if directory else None, spec.lora_rank if options.lora else 0
        tokens = micro_batch(options, sizes, device.type, rank, policy.causal.dtype.itemsize)
        options = replace(options, tokens_per_micro_batch=tokens)
        self.policy = policy
        parameters = weights_in(policy.causal.parameters())
        self._shared = share(policy.causal) if _shares(options, device, parameters) else None
        with policy.together():
            windows = try_out(spec.model, policy)
            self.costs = costs_of(policy, options)
            shared = most_shared(policy, windows)
            if shards is not None:
                shards.rehearse()
        self.text = _text(tokenizer, spec, options, policy)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.optimizer: Optimizer
        if shards is not None and not options.lora:
            self.optimizer = shards.optimizer(options.weight_decay)
        else:
            self.optimizer = Optimizer(policy.trainable(), options.weight_decay)
        self._identity = _identity(spec, options, policy)
        self._encoded: dict[Prompt, Ids] = {}
        self.info = BackendInfo(
            parameters=parameters,
            remote=options.engine != "torch",
            spare_fraction=options.engine_spare if options.engine != "torch" else 0.0,
            extends=True,
            answers_turns=options.engine == "torch",
            deterministic=device.type == "cpu" and options.engine == "torch",
            rank_cores=ranks.cores,
        )
        self.ranks = ranks
        self._memory = DeviceMemory(device, ranks.devices)
        budgets = dict.fromkeys(("sample", "evaluate"), options.tokens_per_sampling_batch)
        cut, limits = Cut.by(options), (self._memory, self.costs, budgets)
        self.sampler = TorchSampler(
            policy, self.text, *limits, windows, cut=cut, ranks=ranks, observe=spec.observe
        )
        self._engine: EngineSampler | None = None
        if own is not None:
            self._engine = EngineSampler(spec, options, policy, own, self.text.end_ids)
        self.learner = Learner(
            policy,
            self.optimizer,
            Dropout(policy, seed),
            self._memory,
            self.costs,
            options.tokens_per_micro_batch,
            options.gradient_checkpointing,
            shared,
            ranks,
            spec.observe,
        )
        self.parts: Mapping[str, Callable[..., Any]] = {  # of calls of rank 0, by the names of its commands
            "sample": self.sampler.sample_share,
            "train": self.learner.gradient,
            "weights": self.take_weights,
            "call": lambda call: call(ranks.tell),
            **self.optimizer.parts,
        }
        self._itself: Itself | None = None  # of a teacher that is this policy
        self._offloads = options.teacher_offload
        self._load_teacher = partial(
            load_teacher, spec=spec, options=options, policy=policy, tokenizer=tokenizer
        )
        self._open_engine_teacher = partial(
            open_engine_teacher,
            spec=spec,
            options=options,
            sampler=self._engine,
            encode=self._encode,
            tokenizer=tokenizer,
            known=len(policy.causal.get_input_embeddings().weight),
        )
        is_one_of_several = device.type == "cpu" and ranks.size > 1
        if options.threads or is_one_of_several or self.info.parameters < TINY_PARAMETERS:
            torch.set_num_threads(options.threads or 1)

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Reject prompts that leave no room for a completion; only long prompts are encoded."""
        around = len(self._encode(prompts[0])) if prompts else 0  # at least the template's tokens
        # a token covers at least one byte
        long = [p for p in prompts if len(p.text.encode()) + around >= self.policy.context]
        self._check_room((p.id, len(self.text.encode(p))) for p in long)

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        """Sample each prompt's group, with one prefill per prompt."""
        if not prompts:
            return []
        ids = [self._encode(prompt) for prompt in prompts]
        self._check_room((p.id, len(tokens)) for p, tokens in zip(prompts, ids, strict=True))
        groups, version = self._drawn(ids, [sampling.max_tokens] * len(ids), sampling)
        drawn = [*chain.from_iterable(groups.values())]
        return to_groups(self.text, [prompts[n] for n in groups], drawn, sampling.group_size, version)

    def check_turns(self) -> None:
        check_turns(self.text)

    def offer_tools(self, schemas: Schemas, *, is_extended: bool = True) -> CallForm:
        self._encoded.clear()
        return offer_functions(self.text, schemas, is_extended=is_extended)

    def call_form(self, schemas: Schemas) -> CallForm:
        return offer_functions(self.text.with_variables(), schemas)

    def extend(self, turns: Sequence[NextTurn], sampling: Sampling) -> list[Rollout | None]:
        begun = [self._begin(turn) for turn in turns]
        fits = [one for one in begun if one is not None]
        groups: dict[int, list[Drawn]] = {}
        if fits:
            groups, _ = self._drawn([one.ids for one in fits], [one.limit for one in fits], sampling)
        return with_turns(self.text, begun, [*chain.from_iterable(groups.values())])

    def sample_turns(self, feed: TurnFeed, sampling: Sampling) -> None:
        self._memory.begin_peak()
        rows = LiveRows(feed, self.text, self._begin)
        temperature, budget = sampling.temperature, budget_of(sampling)
        if self.ranks.size == 1:
            self.sampler.follow(rows, temperature, self.generator.device, budget)
        while self.ranks.size > 1 and (asked := rows.take(0)):  # in rounds, which all ranks begin together
            self.sampler.share_out([[row] for row in asked], temperature, budget)
            rows.end(asked)

    def shown(self, tokens: Ids) -> str:
        return self.text.completions([tokens])[0]

    def read(self, rollout: Rollout) -> Ids:
        return (*self._encode(rollout.prompt), *rollout.placed()[0])

    def _begin(self, turn: FirstTurn | NextTurn) -> AdmittedTurn | None:
        if isinstance(turn, FirstTurn):
            rollout = unsampled(turn.prompt, self.optimizer.steps)
            self._check_room([(turn.prompt.id, len(self.read(rollout)))])
        else:
            rollout = with_messages(self.text, turn, self.policy.context)
        ids = self.read(rollout)
        room = self.policy.context - len(ids)
        return AdmittedTurn(rollout, ids, min(turn.max_tokens, room)) if room > 0 else None

    def _drawn(
        self, contexts: Sequence[Ids], limits: Sequence[int], sampling: Sampling
    ) -> tuple[dict[int, list[Drawn]], int]:
        """Return completions by the number of their context, and the version of their policy.

        A server may sample more than a context's limit of tokens, which keeps contexts in one call.
        """
        generator = self.generator
        if sampling.seed is not None:
            generator = torch.Generator(generator.device).manual_seed(sampling.seed)
        if self._engine is not None:  # any thread, also during an update
            longest = replace(sampling, max_tokens=max(limits))
            return self._engine.complete(contexts, longest)
        self._memory.begin_peak()
        drawn, size = self.sampler.complete(contexts, limits, sampling, generator), sampling.group_size
        groups = {n: drawn[n * size : (n + 1) * size] for n in range(len(contexts))}
        return groups, self.optimizer.steps

    def update(
        self, samples: Sequence[TrainingSample], loss: Loss, optimization: Optimization
    ) -> UpdateStats:
        """Take one AdamW step; one that does not fit is retried in smaller micro-batches."""
        if optimization.kl_coef and self.policy.adapters is None:
            raise ConfigError(f"[algorithm].kl_coef: {NO_REFERENCE}")
        prompts = {s.rollout.prompt: self._encode(s.rollout.prompt) for s in samples}
        with nullcontext() if self._engine is None else self._engine.making_room():
            stats = self.learner.update(samples, prompts, loss, optimization)
        self.spread()
        if optimization.is_last:
            self._publish()
        return stats

    def written(self, demonstrations: Sequence[Demonstration]) -> list[Rollout]:
        rollouts = [self.text.written(one) for one in demonstrations]
        for rollout in rollouts:
            length = len(self._encode(rollout.prompt)) + len(rollout.tokens)
            if length > self.policy.context:
                raise ConfigError(
                    f"[warmup].path: row {rollout.prompt.id} has {length} tokens, more than the "
                    f"model's context of {self.policy.context}; shorten it"
                )
        return rollouts

    def reset_optimizer(self) -> None:
        self.optimizer.reset()
        self.spread()
        self._publish()

    def start_from(self, adapter: str, *, is_reference: bool) -> None:
        """Replace the adapters' weights, which become the KL term's reference, or the base model is it."""
        load_start(adapter, self.policy)
        if is_reference:
            self.policy.start.update({n: p.detach().clone() for n, p in self.policy.trainable().items()})
        if self._itself is not None:
            self._itself.follow()
        self.spread(start=True)
        self._publish()

    def has_start(self) -> bool:
        return bool(self.policy.start)

    def open_teacher(self, teacher: TeacherSpec) -> Teacher:
        if teacher.name == ENGINE:
            return self._open_engine_teacher(is_whole=teacher.is_whole)
        if teacher.name == SELF:
            self._itself = self._itself or Itself(self.policy, offloads=self._offloads)
        itself = self._itself if teacher.name == SELF else None
        policy = itself.policy if itself else self._load_teacher(teacher.name)
        # prompts are shared where the policy's test of that holds for the teacher: in the same base model
        is_same = type(policy.causal) is type(self.policy.causal) and policy.context == self.policy.context
        return LocalTeacher(
            teacher,
            policy,
            self._encode,
            self.learner.tokens_at_a_time,
            self.learner.most_shared if is_same else 0,
            nullcontext if self._engine is None else self._engine.making_room,
            itself,
        )

    def call_ranks(self, calls: Sequence[RankCall], told: Callable[[int], object]) -> list[Any]:
        return self.ranks.call(calls, told)

    def take_sampling_work(self) -> SamplingWork:
        return self.sampler.work.take()

    def take_engine_use(self) -> EngineUse | None:
        return None if self._engine is None else self._engine.take_use()

    def save(self, directory: Path) -> None:
        """Write all state that later steps depend on, bit for bit: as safetensors and JSON, no pickle.

        peft can load `adapter/` directly; transformers `model/`, written if every parameter is trained.
        """
        tensors, weights = self.optimizer.state(), None
        if self.optimizer.is_cut:
            weights, tensors = whole_weights(self.policy, tensors)
        save_weights(directory, self.policy, weights)
        save_file(tensors, directory / OPTIMIZER)
        if self.policy.start:
            save_file(self.policy.start, directory / START)
        if self._itself is not None and not self._itself.is_start:
            save_file({n: p.contiguous() for n, p in self._itself.weights.items()}, directory / TEACHER)
        facts = {
            "format": FORMAT,
            "identity": dict(self._identity),
            "optimizer_steps": self.optimizer.steps,
            "generator": self.generator.get_state().numpy().tobytes().hex(),
            "tokens_at_a_time": {"train": self.learner.tokens_at_a_time, **self.sampler.budgets},
        }
        write_facts(directory / FACTS, facts)

    def load(self, directory: Path) -> None:
        policy, wanted = self.policy, {"format": FORMAT, **self._identity}
        with reading(directory / FACTS, "local", wanted, RuntimeError, SafetensorError, fix=SAME) as facts:
            state = torch.frombuffer(bytearray.fromhex(facts["generator"]), dtype=torch.uint8)
            if len(state) != len(self.generator.get_state()):
                raise RecordsError(
                    f"{directory}: this checkpoint is from another kind of device than "
                    f"{self.generator.device}, with another random generator; resume on that kind, see "
                    "[backend.options].device"
                )
            tensors = load_file(directory / OPTIMIZER)
            if policy.adapters is not None:
                load_adapters(directory / ADAPTER / PEFT, policy.adapters)
            else:
                dtype = policy.causal.dtype
                saved = AutoModelForCausalLM.from_pretrained(
                    directory / MODEL, dtype=dtype, local_files_only=True
                )
                if self.optimizer.is_cut:
                    weights = saved.state_dict()
                    tensors = {**{MASTER + name: weights[name] for name in policy.trainable()}, **tensors}
                else:
                    policy.causal.load_state_dict(saved.state_dict())
            if (directory / START).exists():
                started = load_file(directory / START)
                policy.start.update({n: started[n].to(own) for n, own in policy.trainable().items()})
            if self._itself is not None and (directory / TEACHER).exists():
                self._itself.become(load_file(directory / TEACHER))
            self.optimizer.load(tensors, facts["optimizer_steps"])
            self.generator.set_state(state)
            budgets = {kind: int(tokens) for kind, tokens in facts["tokens_at_a_time"].items()}
            self.learner.tokens_at_a_time = budgets.pop("train")
            self.sampler.budgets = budgets
        self.spread(start=True)
        self._publish()

    def spread(self, *, start: bool = False) -> None:
        """Give all ranks the weights; with `start`, also those of the reference, if it has some."""
        if self.ranks.size > 1 and not self.optimizer.is_cut:  # else each rank trains its own
            command = ("weights", start and bool(self.policy.start))
            self.ranks.together([command] * (self.ranks.size - 1), partial(self.take_weights, *command[1:]))

    def take_weights(self, has_start: bool) -> None:
        """Take the weights of rank 0, as which it gives them."""
        policy = self.policy
        weights = {name: p.detach() for name, p in policy.trainable().items()}
        self.ranks.spread([*weights.values()])
        if has_start:
            if self.ranks.rank > 0:
                policy.start.update({name: values.clone() for name, values in weights.items()})
            self.ranks.spread([policy.start[name] for name in weights])

    def close(self) -> None:
        self.ranks.close()
        if self._engine is not None:
            self._engine.close()
        if self._shared is not None:
            self._shared.close()

    def _publish(self) -> None:
        if self._engine is not None:
            self._engine.publish(self.optimizer.steps)

    def _encode(self, prompt: Prompt) -> Ids:
        if (ids := self._encoded.get(prompt)) is None:
            if len(self._encoded) >= REMEMBERED:
                self._encoded.clear()
            ids = self._encoded[prompt] = self.text.encode(prompt)
        return ids

    def _check_room(self, lengths: Iterable[tuple[int, int]]) -> None:
        if problem := too_long(lengths, self.policy.context):
            raise FullContextError(problem)


def whole_weights(policy: Policy, tensors: Tensors) -> tuple[Tensors, Tensors]:
    """Return a model's state, and tensors without the float32 weights if the state holds these."""
    dtype, state = policy.causal.dtype, policy.causal.state_dict()
    names = {id(p): name for name, p in policy.trainable().items()}
    named = policy.causal.named_parameters(remove_duplicate=False)
    state |= {name: tensors[MASTER + names[id(p)]].to(dtype) for name, p in named}
    if dtype == torch.float32:
        tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(MASTER)}
    return state, tensors


def _sharding(ranks: int) -> ModuleType:
    """Return the module that cuts layers: few runs need it, and it takes half a second and a new PyTorch."""
    if ranks == 1:
        problem = "there is only one device, which holds all layers"
    elif tuple(map(int, torch.__version__.split(".")[:2])) < SHARDS:
        problem = f"needs PyTorch {'.'.join(map(str, SHARDS))} or newer, got {torch.__version__}"
    else:
        from retrain.backends.local import sharding

        return sharding
    raise ConfigError(f"[backend.options].shard: {problem}; set it to false")


def _shares(options: LocalOptions, device: torch.device, parameters: int) -> bool:
    """Return whether this process maps the frozen weights from a file that others map too."""
    if options.quantization != DEFAULTS.quantization or options.shard:  # not what the model's files hold
        return False
    return options.share_weights and options.lora and device.type == "cpu" and parameters >= TINY_PARAMETERS


def _text(tokenizer: Any, spec: BackendSpec, options: LocalOptions, policy: Policy) -> Text:
    listed = getattr(policy.causal.generation_config, "eos_token_id", None)
    return Text(
        tokenizer,
        spec.model,
        chat=options.chat_template,
        system=options.system_prompt,
        template_kwargs=options.chat_template_kwargs,
        ends=listed if isinstance(listed, list) else [listed],
        stop=options.stop,
        known=len(policy.causal.get_input_embeddings().weight),
    )


def _identity(spec: BackendSpec, options: LocalOptions, policy: Policy) -> Mapping[str, object]:
    """Return the properties that a checkpoint and a run must share."""
    return {
        "model": spec.model,
        "revision": options.revision,
        "lora_rank": spec.lora_rank if options.lora else 0,
        "target_modules": list(options.target_modules) if options.lora else [],
        "dtype": str(policy.causal.dtype).removeprefix("torch."),
        **{key: value for key in ADDED if (value := getattr(options, key)) != getattr(DEFAULTS, key)},
        "trained_parameters": sum(p.numel() for p in policy.trainable().values()),
    }


def costs_of(policy: Policy, options: LocalOptions) -> ModelCosts:
    """Return the sizes that determine the cost of a token.

    The input embedding is a lookup and is not counted. Layers with a sliding window count as if they cached
    every token.
    """
    causal = policy.causal
    head = int(causal.get_output_embeddings().weight.numel())
    embedding = int(causal.get_input_embeddings().weight.numel())
    is_tied = causal.get_input_embeddings().weight is causal.get_output_embeddings().weight
    count = weights_in(causal.parameters())
    idle = _idle(causal, causal.config.get_text_config())
    cache = DynamicCache(config=causal.config)
    with torch.no_grad():  # one token, because layers may differ in size
        policy.run_cached(cache, torch.zeros((1, 1), dtype=torch.long, device=policy.device))
    cached = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return ModelCosts(
        body=count - head - (0 if is_tied else embedding) - idle,
        head=head,
        weight_bytes=sum(p.nbytes for p in causal.parameters()) / count,
        kv_bytes_per_token=float(sum(states.nbytes for states in cached if states is not None)),
        frozen=options.lora,
        trained_bytes=FLOAT * sum(p.numel() for p in policy.trainable().values()),
        idle=idle,
    )


def _idle(causal: Any, config: Any) -> int:
    """Return the number of weights in experts that a token is not routed to."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((int(n) for name in names if (n := getattr(config, name, None))), 0)
    used = getattr(config, "num_experts_per_tok", None)
    if not (experts and used):
        return 0
    routed = weights_in(p for name, p in causal.named_parameters() if ".experts." in name)
    return routed * (experts - int(used)) // experts


def weights_in(parameters: Iterable[torch.nn.Parameter]) -> int:
    """Return the number of weights; a quantized parameter holds two in a byte."""
    states = ((p, getattr(p, "quant_state", None)) for p in parameters)
    return sum(prod(state.shape) if state is not None else p.numel() for p, state in states)
