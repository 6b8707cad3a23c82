"""The local backend's gradient beside TRL's GRPOTrainer's, on the very same batch, tied groups included.

TRL's own `_compute_loss` is called on our adapters with the rollouts that our sampler drew, and both
gradients are compared number by number. The sampler's log-probabilities are moved away from the policy's, so
that ratios are not 1 and some are clipped. With a KL term they are left alone: TRL's (k3, corrected for bias)
and ours (k2) have the same gradient on policy only. With minibatches, the gradient of each is
compared with TRL's for one of several optimizer steps on a generated batch (`steps_per_generation`).

    python -m benchmarks.trl_gradients [--json]
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.suite import script_parser

LOSS_TYPES = {"token": "dapo", "sequence": "grpo", "constant": "dr_grpo"}
PROMPTS, GROUP, MAX_TOKENS = 8, 4, 16
TIED = (0, 4, 7, 8)  # groups whose rewards are all equal
MINIBATCHES = 4
BETA, BONUS = 0.1, 0.05


@dataclass(frozen=True)
class Result:
    loss_normalization: str
    loss_type: str  # TRL's
    tied_groups: int
    minibatches: int
    kl_coef: float
    entropy_bonus: float
    gradient_norm: float  # TRL's
    relative_error: float  # norm of the difference over TRL's norm; the difference's own if that is 0
    informative_ratio: float | None  # norm of the gradient by informative_*, over TRL's; None: TRL's is 0


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        results = compare(Path(directory))
    print(json.dumps([asdict(r) for r in results]) if arguments.json else table(results))


def compare(directory: Path) -> list[Result]:
    import torch

    from tests.extras.local_policies import open_backend, stir
    from tests.extras.tiny_models import save_tiny_model

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    model = save_tiny_model(directory / "model", hidden=64, layers=2)
    trainer = trl_trainer(model, directory)
    results = []
    for tied in TIED:
        for beta, bonus in ((0.0, 0.0), (BETA, 0.0), (BETA, BONUS)):
            for ours, theirs in LOSS_TYPES.items():
                backend = open_backend(model)
                stir(backend)
                batch = drawn(backend, tied, drift=0.0 if beta else 0.3)
                wanted = trl_gradient(trainer, backend, batch, theirs, beta, bonus)
                found, old = (
                    our_gradient(backend, batch, f"{scope}{ours}", beta, bonus)
                    for scope in ("", "informative_")
                )
                norm = float(np.linalg.norm(wanted))
                error = float(np.linalg.norm(found - wanted))
                relative = error / norm if norm else error
                ratio = float(np.linalg.norm(old)) / norm if norm else None
                results.append(Result(ours, theirs, tied, 1, beta, bonus, norm, relative, ratio))
    return results + [of_minibatches(trainer, model, ours) for ours in LOSS_TYPES]


def of_minibatches(trainer: Any, model: str, normalization: str) -> Result:
    """Compare minibatch by minibatch; return the largest error."""
    from retrain.trainer.batch import ScoredBatch
    from retrain.trainer.updates import minibatches_of
    from tests.extras.local_policies import open_backend, stir

    backend = open_backend(model)
    stir(backend)
    batch, theirs = drawn(backend, 0, drift=0.3), LOSS_TYPES[normalization]
    samples, loss = our_samples(batch, normalization, 0.0, 0.0)
    whole = {"steps": MINIBATCHES, "generated": sum(len(rollout.tokens) for rollout in batch.rollouts)}
    norms, errors = [], []
    for part in minibatches_of(samples, MINIBATCHES, [1]):
        chosen = sorted({sample.group for sample in part})
        rows = ScoredBatch([batch.groups[number] for number in chosen], batch.rewards[chosen])
        wanted = trl_gradient(trainer, backend, rows, theirs, 0.0, 0.0, **whole)
        norms.append(float(np.linalg.norm(wanted)))
        errors.append(float(np.linalg.norm(differentiated(backend, part, loss, 0.0, 0.0) - wanted)))
    largest = max(error / norm for error, norm in zip(errors, norms, strict=True))
    return Result(normalization, theirs, 0, MINIBATCHES, 0.0, 0.0, max(norms), largest, None)


def drawn(backend: Any, tied: int, drift: float) -> Any:
    """Sample a batch and give it rewards; the last groups tie."""
    from retrain.base.rollouts import Prompt
    from retrain.trainer.batch import ScoredBatch
    from tests.extras.local_policies import draw

    prompts = [Prompt(number, f"{number}+{7 * number}=", "") for number in range(PROMPTS)]
    groups = draw(backend, prompts, group_size=GROUP, max_tokens=MAX_TOKENS, temperature=1.0)
    random = np.random.default_rng(tied)
    for group in groups:
        for rollout in group.rollouts:
            rollout.logprobs[:] += drift * random.standard_normal(len(rollout.tokens))
    rewards = np.tile([1.0, 0.0, 0.5, 0.0], (PROMPTS, 1))
    rewards[PROMPTS - tied :] = random.choice([0.0, 1.0], size=(tied, 1))
    return ScoredBatch(groups, rewards)


def our_gradient(backend: Any, batch: Any, normalization: str, beta: float, bonus: float) -> Any:
    samples, loss = our_samples(batch, normalization, beta, bonus)
    return differentiated(backend, samples, loss, beta, bonus) if samples else np.zeros(1)


def our_samples(batch: Any, normalization: str, beta: float, bonus: float) -> Any:
    """Return a batch as the loss sees it, and the loss."""
    from retrain.config.load import parse
    from retrain.trainer.batch import BoundAlgorithm

    raw = {
        "training": {"max_tokens": MAX_TOKENS, "entropy_bonus": bonus},
        "algorithm": {"advantage_mode": "grpo", "loss_normalization": normalization, "kl_coef": beta},
    }
    algorithm = BoundAlgorithm(parse(raw, "benchmark"), lambda groups, step: batch)
    return algorithm.transform(batch, algorithm.estimate(batch), 0.0), algorithm.loss


def differentiated(backend: Any, samples: Any, loss: Any, beta: float, bonus: float) -> Any:
    from retrain.backends import Optimization

    how = Optimization(lr=0.0, max_grad_norm=1e9, entropy_bonus=bonus, kl_coef=beta, micro_batches=3)
    backend.reset_optimizer()
    backend.update(samples, loss, how)
    state = backend.optimizer.state()
    names = [f"exp_avg.{name}" for name in backend.policy.trainable()]
    return flat([10 * state[name] for name in names])  # Adam's first moment is a tenth of it


def trl_trainer(model: str, directory: Path) -> Any:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    return GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_list([{"prompt": "1="}]),
        processing_class=AutoTokenizer.from_pretrained(model),
        args=GRPOConfig(
            output_dir=str(directory),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=PROMPTS * GROUP,
            num_generations=GROUP,
            max_completion_length=MAX_TOKENS,
            temperature=1.0,
            beta=BETA,
            use_bias_correction_kl=True,
            entropy_coef=BONUS,
            epsilon=0.2,
            report_to="none",
        ),
    )


def trl_gradient(
    trainer: Any,
    backend: Any,
    batch: Any,
    loss_type: str,
    beta: float,
    bonus: float,
    *,
    steps: int = 1,
    generated: int = 0,
) -> Any:
    """Call TRL's loss on our adapters, with what our sampler drew, and differentiate it.

    Args:
        batch: of one optimizer step.
        steps: optimizer steps for each batch that was generated, `steps_per_generation`.
        generated: tokens of that batch; 0: of this one.
    """
    import torch
    from trl.trainer.utils import add_fused_lm_head

    trainer.loss_type, trainer.beta, trainer.entropy_coef = loss_type, beta, bonus
    trainer._entropy_bonus_enabled = bonus > 0
    trainer.current_gradient_accumulation_steps, trainer.args.steps_per_generation = 1, steps
    prompts = [backend.text.encode(rollout.prompt) for rollout in batch.rollouts]
    completions = [rollout.tokens for rollout in batch.rollouts]
    advantages = batch.rewards - batch.rewards.mean(axis=1, keepdims=True)
    old = padded([rollout.logprobs.tolist() for rollout in batch.rollouts], 0.0)
    inputs = {
        "prompt_ids": padded(prompts, 0, left=True),
        "prompt_mask": padded([[1] * len(p) for p in prompts], 0, left=True),
        "completion_ids": padded(completions, 0),
        "completion_mask": padded([[1] * len(c) for c in completions], 0),
        "advantages": torch.tensor(advantages.ravel(), dtype=torch.float32),
        "old_per_token_logps": old,
        "num_items_in_batch": torch.tensor(generated or sum(map(len, completions))),
    }
    causal = backend.policy.causal
    add_fused_lm_head(causal, temperature=1.0, outputs=("log_probs", "entropy"))
    if beta:
        inputs["ref_per_token_logps"] = reference(trainer, backend, inputs)
    trainer.model.train()
    causal.train()  # no layer has dropout
    try:
        loss = trainer._compute_loss(causal, inputs)
    finally:
        causal.eval()
    return flat(torch.autograd.grad(loss, list(backend.policy.trainable().values())))


def reference(trainer: Any, backend: Any, inputs: Any) -> Any:
    import torch

    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
    mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    keep = inputs["completion_ids"].size(1)
    with torch.no_grad(), backend.policy.adapters.disable_adapter():
        return trainer._get_per_token_logps_and_entropies(backend.policy.causal, ids, mask, keep)[0]


def padded(rows: Sequence[Sequence[float]], filler: float, *, left: bool = False) -> Any:
    import torch

    longest = max(map(len, rows))
    fill = [[filler] * (longest - len(row)) for row in rows]
    return torch.tensor([[*f, *row] if left else [*row, *f] for row, f in zip(rows, fill, strict=True)])


def flat(tensors: Sequence[Any]) -> Any:
    return np.concatenate([tensor.detach().double().numpy().ravel() for tensor in tensors])


def table(results: Sequence[Result]) -> str:
    lines = [
        f"{'ours':<10}{'TRL':<9}{'tied':>5}{'parts':>7}{'KL':>6}{'bonus':>7}{'norm':>10}{'error':>10}{'informative_':>14}"
    ]
    lines += [
        f"{r.loss_normalization:<10}{r.loss_type:<9}{r.tied_groups:>3}/{PROMPTS}{r.minibatches:>7}{r.kl_coef:>6g}{r.entropy_bonus:>7g}"
        f"{r.gradient_norm:>10.2e}{r.relative_error:>10.1e}"
        + ("" if r.informative_ratio is None else f"{r.informative_ratio:>13.2f}x")
        for r in results
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
