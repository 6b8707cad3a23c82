"""Learning from a teacher beside TRL's own trainers, on the very same batch: loss and gradient.

    python -m benchmarks.trl_teacher [--json]
    python -m benchmarks.trl_teacher --record tests/data/trl_teacher.jsonl

A student of one layer, with adapters or with every parameter trained, samples a batch; a teacher of another
size scores it. Trainers of TRL are made of the same files, and `compute_loss` of each is given these tokens:

- `DistillationTrainer` and `GKDTrainer` for `mode = "jsd"`; with beta 1, the exact reverse KL divergence;
- `IWOPDTrainer` with `iw_opd_gamma = 0`, which weighs all tokens alike, for `mode = "reverse_kl"`.

All divide the sum over tokens by their number in the batch, as `loss_normalization = "token"` does. TRL has
no counterpart of the others. `GKDTrainer` compares at temperature 1 whatever it samples at; the two others
at the sampler's, as here. Of sampled tokens TRL's loss is -log p times the advantage and ours -ratio times
it: on policy their gradients are equal and their values are not, so losses are compared for `jsd` alone.

With `--record` the batch and what TRL makes of it are written for `tests/extras/test_trl_teacher.py`, which
compares without TRL. Weights come from a generator whose numbers never change.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.suite import script_parser
from benchmarks.trl_gradients import flat, padded

MAX_TOKENS, GROUP = 9, 3
EVERY = 17  # of a gradient's numbers, those that are recorded


@dataclass(frozen=True)
class Case:
    """What is compared."""

    trainer: str  # TRL's
    mode: str
    beta: float
    temperature: float
    lora: bool


@dataclass(frozen=True)
class Result(Case):
    loss: float  # TRL's
    gradient_norm: float  # TRL's
    loss_error: float | None  # relative; None: the two are not defined alike
    gradient_error: float  # norm of the difference over TRL's norm


def cases() -> Iterator[Case]:
    for lora in (True, False):
        for beta in (0.0, 0.5, 1.0):
            for trainer in ("DistillationTrainer", "GKDTrainer"):
                yield Case(trainer, "jsd", beta, 1.0, lora)
        yield Case("DistillationTrainer", "jsd", 0.5, 0.8, lora)
        yield Case("IWOPDTrainer", "reverse_kl", 1.0, 1.0, lora)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--record", type=Path, metavar="FILE", help="write what the test compares with")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        results, record = compare(Path(directory))
    if options.record:
        options.record.write_text("".join(json.dumps(line) + "\n" for line in record))
    print(json.dumps([asdict(result) for result in results]) if options.json else table(results))


def compare(directory: Path) -> tuple[list[Result], list[dict[str, Any]]]:
    """Return the results, and the lines of the record: the batches, then each case."""
    import torch

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    student, teacher = save_models(directory)
    batches = {is_lora: drawn(student, lora=is_lora) for is_lora in (True, False)}
    results, recorded = [], []
    for case in cases():
        batch = batches[case.lora]
        loss, gradient = trl_gradient(case, student, teacher, batch, directory)
        our_loss, ours = our_gradient(case, student, teacher, batch)
        norm = float(np.linalg.norm(gradient))
        error = float(np.linalg.norm(ours - gradient)) / norm
        loss_error = abs(our_loss - loss) / abs(loss) if case.mode == "jsd" else None
        results.append(
            Result(**asdict(case), loss=loss, gradient_norm=norm, loss_error=loss_error, gradient_error=error)
        )
        recorded.append({**asdict(case), "loss": loss, "norm": norm, "gradient": short(gradient[::EVERY])})
    facts = {
        "source": f"TRL {version('trl')}, by python -m benchmarks.trl_teacher --record",
        "packages": {name: version(name) for name in ("trl", "torch", "transformers", "peft")},
        "batches": {"adapters": rows(batches[True]), "all": rows(batches[False])},
        "every": EVERY,
    }
    return results, [facts, *recorded]


def rows(batch: Sequence[Any]) -> list[dict[str, Any]]:
    return [{"prompt": r.prompt.text, "tokens": r.tokens, "logprobs": short(r.logprobs)} for r in batch]


def short(numbers: Any) -> list[float]:
    return [float(f"{number:.8g}") for number in numbers]


def save_models(directory: Path) -> tuple[str, str]:
    """Save a student and a teacher of another size whose weights are the same wherever this runs."""
    from transformers import AutoModelForCausalLM

    from tests.extras.tiny_models import save_tiny_model

    paths = []
    for name, hidden, layers in (("student", 16, 1), ("teacher", 24, 2)):
        path = save_tiny_model(directory / name, hidden=hidden, layers=layers)
        causal = AutoModelForCausalLM.from_pretrained(path)
        fill(dict(causal.named_parameters()), seed=hidden)
        causal.save_pretrained(path)
        paths.append(path)
    return paths[0], paths[1]


def fill(parameters: Mapping[str, Any], seed: int) -> None:
    """Draw weights from numpy's legacy generator, whose numbers are frozen."""
    import torch

    random = np.random.RandomState(seed)
    with torch.no_grad():
        for name, parameter in parameters.items():
            drawn = torch.tensor(random.standard_normal(parameter.shape) * 0.3, dtype=torch.float32)
            parameter.copy_(1 + drawn / 3 if "norm" in name else drawn)


def opened(student: str, *, lora: bool) -> Any:
    """Return our backend on the student, with adapters that do something."""
    from tests.extras.local_policies import open_backend

    backend = open_backend(student, rank=2, lora=lora)
    if lora:
        fill(backend.policy.trainable(), seed=1)
    return backend


def drawn(student: str, *, lora: bool) -> list[Any]:
    """Sample a batch, of completions and prompts of different lengths."""
    from retrain.base.rollouts import Prompt
    from tests.extras.local_policies import draw

    prompts = [
        Prompt(number, text, "") for number, text in enumerate(["7=", "12abc30=", "9=", "abcdefghij="])
    ]
    groups = draw(
        opened(student, lora=lora), prompts, group_size=GROUP, max_tokens=MAX_TOKENS, temperature=1.0
    )
    return [rollout for group in groups for rollout in group.rollouts]


def our_gradient(case: Case, student: str, teacher: str, batch: Sequence[Any]) -> tuple[float, Any]:
    """Return loss and gradient of a step that learns from the teacher alone, as the trainer takes it."""
    from retrain.backends import Optimization
    from retrain.base.rollouts import Group
    from retrain.config.load import parse
    from retrain.trainer.batch import BoundAlgorithm, ScoredBatch
    from retrain.trainer.teachers import TeacherSignal

    raw = {
        "model": {"model": student},
        "training": {"max_tokens": MAX_TOKENS, "temperature": case.temperature},
        "algorithm": {"loss_mode": "importance_sampling"},
        "reward": {"reward": "none"},
        "teacher": {"teacher": teacher, "mode": case.mode}
        | ({"beta": case.beta} if case.mode == "jsd" else {}),
        "backend": {"backend": "local", "options": {"local_files_only": True}},
    }
    config, backend = parse(raw, "benchmark", try_plugins=False), opened(student, lora=case.lora)
    groups = [Group(one[0].prompt, one) for one in np.reshape(np.array(batch, object), (-1, GROUP)).tolist()]
    scored = ScoredBatch(groups, np.full((len(groups), GROUP), np.nan))
    algorithm = BoundAlgorithm(config, lambda groups, step: scored, TeacherSignal(config, backend))
    samples = algorithm.transform(scored, algorithm.estimate(scored), 0.0)
    how = Optimization(lr=0.0, max_grad_norm=1e9, temperature=case.temperature, micro_batches=2)
    loss = backend.update(samples, algorithm.loss, how).loss
    state = backend.optimizer.state()
    names = [f"exp_avg.{name}" for name in backend.policy.trainable()]
    return loss, flat([10 * state[name] for name in names])  # Adam's first moment is a tenth of it


def trl_gradient(
    case: Case, student: str, teacher: str, batch: Sequence[Any], directory: Path
) -> tuple[float, Any]:
    """Return what `compute_loss` of a trainer of TRL gives for the same tokens, and its gradient."""
    import torch

    trainer, names = trl_trainer(case, student, teacher, directory)
    prompts = [trainer.processing_class(one.prompt.text)["input_ids"] for one in batch]
    tokens = [one.tokens for one in batch]
    prompt_ids, completion_ids = padded(prompts, 0, left=True), padded(tokens, 0)
    prompt_mask = padded([[1] * len(ids) for ids in prompts], 0, left=True)
    completion_mask = padded([[1] * len(ids) for ids in tokens], 0)
    if case.trainer == "DistillationTrainer":
        inputs = {
            "prompt_ids": prompt_ids,
            "prompt_mask": prompt_mask,
            "completion_ids": completion_ids,
            "completion_mask": completion_mask,
            "num_items_in_batch": completion_mask.sum(),
        }
    else:
        labels = [torch.full_like(prompt_ids, -100), completion_ids.where(completion_mask == 1, -100)]
        inputs = {
            "input_ids": torch.cat([prompt_ids, completion_ids], dim=1),
            "attention_mask": torch.cat([prompt_mask, completion_mask], dim=1),
            "labels": torch.cat(labels, dim=1),
            "prompts": prompt_ids,
            "prompt_attention_mask": prompt_mask,
        }
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, inputs)
    parameters = dict(trainer.model.named_parameters())
    gradient = torch.autograd.grad(loss, [parameters[name] for name in names])
    return float(loss), flat(gradient)


def trl_trainer(case: Case, student: str, teacher: str, directory: Path) -> tuple[Any, list[str]]:
    """Return a trainer of TRL on the student's files, and its names of our trained parameters, in order."""
    from datasets import Dataset
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DistillationConfig, DistillationTrainer
    from trl.experimental.gkd import GKDConfig, GKDTrainer
    from trl.experimental.iw_opd import IWOPDConfig, IWOPDTrainer

    backend, model = opened(student, lora=case.lora), AutoModelForCausalLM.from_pretrained(student)
    names, adapter = list(backend.policy.trainable()), directory / "saved"
    if case.lora:
        adapter.mkdir(exist_ok=True)
        backend.save(adapter)
        model = PeftModel.from_pretrained(model, adapter / "adapter", is_trainable=True)
        names = [f"base_model.model.{name}" for name in names]
    common = {
        "output_dir": str(directory),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 12,
        "report_to": "none",
        "beta": case.beta,
        "temperature": case.temperature,
    }
    trainers = {
        "DistillationTrainer": (DistillationTrainer, DistillationConfig, {}),
        "GKDTrainer": (GKDTrainer, GKDConfig, {"lmbda": 0.0}),
        "IWOPDTrainer": (IWOPDTrainer, IWOPDConfig, {"iw_opd_gamma": 0.0}),
    }
    make, configure, options = trainers[case.trainer]
    turns = [{"role": "user", "content": "1="}, {"role": "assistant", "content": "1"}]
    row = {"prompt": "1="} if case.trainer == "DistillationTrainer" else {"messages": turns}
    trainer = make(
        model=model,
        teacher_model=AutoModelForCausalLM.from_pretrained(teacher),
        args=configure(**common, **options),
        train_dataset=Dataset.from_list([row]),
        processing_class=AutoTokenizer.from_pretrained(student),
    )
    return trainer, names


def table(results: Sequence[Result]) -> str:
    lines = [
        f"{'TRL':<21}{'mode':<12}{'beta':>5}{'T':>5}  {'trained':<9}{'norm':>9}{'loss':>10}{'gradient':>10}"
    ]
    for r in results:
        loss = "" if r.loss_error is None else f"{r.loss_error:.1e}"
        trained = "adapters" if r.lora else "all"
        case = f"{r.trainer:<21}{r.mode:<12}{r.beta:>5g}{r.temperature:>5g}  {trained:<9}"
        lines.append(f"{case}{r.gradient_norm:>9.2e}{loss:>10}{r.gradient_error:>10.1e}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
