"""Learning-rate scaling in PyTorch loops: recorded traces, accumulation, two replicas, Adam."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from retrain import (
    AdamScale,
    AdaptiveDataParallel,
    AdaScale,
    LEGWScale,
    LinearScale,
    ScalingRuleBase,
    SqrtScale,
)
from retrain.control.rules.scaling import AdaScaleRule
from tests.extras import ddp_worker

pytestmark = pytest.mark.extras
TESTS = Path(__file__).parent.parent
PUBLISHED = json.loads((TESTS / "data" / "scaling_rules.json").read_text())


class Linear(torch.nn.Module):
    """Its gradient is its input."""

    def __init__(self, size=2):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(size))

    def forward(self, gradient):
        return self.weight @ torch.as_tensor(gradient, dtype=torch.float32)


def attached(rule, lr=0.1, optimizer=torch.optim.SGD, size=2, **options):
    model = Linear(size)
    rule.initialize(model, optimizer(model.parameters(), lr=lr), **options)
    return rule, model


def take_step(rule, model, gradients, divide_by=1):
    before = model.weight.detach().clone()
    for gradient in gradients:
        (model(gradient) / divide_by).backward()
    rule.step()
    rule.zero_grad()
    return (model.weight.detach() - before).numpy()


@pytest.mark.parametrize("case", PUBLISHED["estimator_single_process"], ids=lambda case: case["name"])
def test_a_loop_updates_its_weights_as_published(case):
    rule, model = attached(AdaScale(), case["lr"], accum_scale=case["accum_scale"])
    for step in case["steps"]:
        delta = take_step(rule, model, [micro[0] for micro in step["micro_grads"]])
        assert np.allclose(delta, step["param_delta"][0], atol=1e-6)
        assert rule.progress == pytest.approx(step["progress"])


@pytest.mark.parametrize("case", PUBLISHED["estimator_single_process"][:2], ids=lambda case: case["name"])
def test_a_loop_estimates_noise_as_published(case):
    rule, model = attached(AdaScale(), case["lr"], accum_scale=case["accum_scale"])
    for step in case["steps"]:
        take_step(rule, model, [micro[0] for micro in step["micro_grads"]])
        assert np.allclose(rule.noise.sqr, step["sqr_avg"], rtol=1e-6)
        assert np.allclose(rule.noise.var, np.maximum(step["var_avg"], 1e-6), rtol=1e-6)


def test_adams_second_moment_preconditions_estimates_as_published():
    case = PUBLISHED["estimator_adam_preconditioned"]

    def adam(parameters, lr):
        return torch.optim.Adam(parameters, lr=lr, betas=tuple(case["betas"]), eps=case["eps"])

    rule, model = attached(AdamScale(), case["lr"], adam, accum_scale=case["accum_scale"])
    for step in case["steps"]:
        take_step(rule, model, step["micro"])
        assert np.allclose(rule.noise.sqr, step["sqr_avg"], rtol=1e-5)
        assert np.allclose(rule.noise.var, step["var_avg"], rtol=1e-5)


def test_losses_divided_by_the_user_give_the_same_steps():
    gradients = [[[1.0, 0.0], [0.0, 1.0]], [[2.0, 1.0], [1.0, 1.0]], [[3.0, 0.5], [1.0, 4.0]]]
    averaging, first = attached(AdaScale())
    divided, second = attached(AdaScale(), losses_are_divided=True)
    for step in gradients:
        deltas = take_step(averaging, first, step), take_step(divided, second, step, divide_by=2)
        assert np.allclose(*deltas, atol=1e-7)
    assert divided.progress == pytest.approx(averaging.progress)


def test_the_optimizers_learning_rates_are_untouched_after_a_step_even_one_that_fails():
    rule, model = attached(LinearScale(), accum_scale=8)
    take_step(rule, model, [[1.0, 1.0]])
    assert rule.optimizer.param_groups[0]["lr"] == 0.1
    rule.optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        take_step(rule, model, [[1.0, 1.0]])
    assert rule.optimizer.param_groups[0]["lr"] == 0.1


def test_each_parameter_group_has_its_own_factor():
    quiet, noisy = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    model = torch.nn.ParameterList([quiet, noisy])
    optimizer = torch.optim.SGD([{"params": [quiet], "lr": 1.0}, {"params": [noisy], "lr": 10.0}])
    rule = AdaScale()
    rule.initialize(model, optimizer)
    for sign in (1.0, -1.0):
        (quiet.sum() + sign * (noisy[0] - noisy[1]) + noisy[0]).backward()
    rule.step()
    assert np.allclose(quiet.detach(), -1.0, atol=1e-5)  # no noise: factor 1
    # Gradients (2, -1) and (0, 1): L = 3, T = 1, sqr = -1 raised to 0, so the factor is S = 2.
    assert np.allclose(noisy.detach(), [-20, 0], atol=1e-4)


def test_a_plain_zero_grad_between_steps_works_too():
    rule, model = attached(AdaScale())
    for _ in range(2):
        model([1.0, 0.0]).backward()
        model([1.0, 0.0]).backward()
        rule.step()
        rule.optimizer.zero_grad()
    assert rule.progress == pytest.approx(2, abs=1e-5)


def test_zero_grad_forgets_a_pass_that_was_not_used():
    rule, model = attached(AdaScale())
    model([100.0, -100.0]).backward()
    rule.zero_grad()
    assert np.allclose(take_step(rule, model, [[1.0, 0.0], [1.0, 0.0]]), [-0.1, 0], atol=1e-6)


def test_parameters_that_a_pass_leaves_out_count_as_zero_gradient():
    always, first, second = (torch.nn.Parameter(torch.zeros(1)) for _ in range(3))
    rule = AdaScale()
    rule.initialize(torch.nn.Module(), torch.optim.SGD([always, first, second], lr=1.0))
    (always + first).sum().backward()
    (always + second).sum().backward()
    rule.step()
    # Gradients (1, 1, 0) and (1, 0, 1): L = 2, T = 1.5.
    assert (rule.noise.sqr, rule.noise.var) == (1, 1)


def test_gradients_that_are_not_finite_teach_nothing():
    rule, model = attached(AdaScale())
    take_step(rule, model, [[1.0, 0.0], [0.0, 1.0]])
    before = rule.noise.state_dict()
    take_step(rule, model, [[float("nan"), 0.0], [0.0, 1.0]])
    assert rule.noise.state_dict() == before


def test_a_changed_batch_is_told_by_accum_scale():
    rule, model = attached(LinearScale(), accum_scale=1)
    rule.accum_scale = 8
    assert np.allclose(take_step(rule, model, [[1.0, 0.0]]), [-0.8, 0])


def test_gradients_before_and_after_a_change_of_batch_are_not_paired():
    rule, model = attached(AdaScale(), accum_scale=1)
    take_step(rule, model, [[1.0, 0.0]])
    rule.accum_scale = 8
    take_step(rule, model, [[0.0, 1.0]])
    assert not rule.noise.is_known


def test_a_resumed_rule_goes_on_as_the_one_that_was_saved():
    saved, model = attached(AdaScale())
    take_step(saved, model, [[1.0, 0.0], [0.0, 1.0]])
    resumed, other = attached(AdaScale())
    resumed.load_state_dict(json.loads(json.dumps(saved.state_dict())))
    after = take_step(saved, model, [[2.0, 1.0], [1.0, 1.0]])
    assert np.allclose(take_step(resumed, other, [[2.0, 1.0], [1.0, 1.0]]), after)
    assert resumed.progress == saved.progress


def test_attaching_again_watches_once():
    rule, model = attached(AdaScale())
    rule.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1))
    once = take_step(*attached(AdaScale()), [[1.0, 0.0], [0.0, 1.0]])
    assert np.array_equal(take_step(rule, model, [[1.0, 0.0], [0.0, 1.0]]), once)
    assert rule.progress == pytest.approx(2.0)


def test_a_closure_is_evaluated_once_and_its_loss_returned():
    plain, by_hand = attached(LinearScale(), accum_scale=2.0)
    with_closure, model = attached(LinearScale(), accum_scale=2.0)
    evaluated = []

    def closure():
        with_closure.zero_grad()
        loss = model([3.0, 4.0])
        loss.backward()
        evaluated.append(loss.item())
        return loss

    for _ in range(3):
        take_step(plain, by_hand, [[3.0, 4.0]])
        with torch.no_grad():
            loss = with_closure.step(closure)
        assert loss.item() == evaluated[-1]
    assert len(evaluated) == 3
    assert torch.equal(model.weight, by_hand.weight)
    assert with_closure.progress == plain.progress


def test_a_patched_optimizer_steps_as_the_rule_does_until_detached():
    plain, by_hand = attached(LinearScale(), accum_scale=4.0)
    model = Linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rule = LinearScale()
    rule.initialize(model, optimizer, patch_optimizer=True, accum_scale=4.0)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    for _ in range(3):
        take_step(plain, by_hand, [[1.0, 2.0], [3.0, 4.0]])
        for gradient in ([1.0, 2.0], [3.0, 4.0]):
            model(gradient).backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    assert torch.equal(model.weight, by_hand.weight)
    assert rule.progress == plain.progress
    rule.detach()
    before = model.weight.detach().clone()
    model([1.0, 1.0]).backward()
    optimizer.step()
    assert torch.allclose(model.weight, before - 0.1)


def test_a_rule_of_ones_own_says_its_factor_alone():
    class Power(ScalingRuleBase):
        def scale_lr(self, scale):
            return scale**0.25

    rule, model = attached(Power(), lr=1.0, accum_scale=16.0)
    assert np.allclose(take_step(rule, model, [[1.0, 0.0]]), [-2.0, 0.0])
    assert rule.lr_factor(16.0) == pytest.approx([2.0])
    with pytest.raises(NotImplementedError, match="ScalingRuleBase: define scale_lr"):
        attached(ScalingRuleBase())


@pytest.mark.parametrize(("rule", "factor"), [(LinearScale(), 4.0), (SqrtScale(), 2.0)])
def test_rules_say_the_factor_of_a_scale_as_published(rule, factor):
    assert attached(rule)[0].scale_lr(4.0) == pytest.approx([factor])
    assert isinstance(rule, ScalingRuleBase)


def test_an_optimizer_without_one_gradient_per_step_is_refused():
    with pytest.raises(ValueError, match="LBFGS"):
        attached(LinearScale(), optimizer=torch.optim.LBFGS)


def test_a_rule_without_a_model_says_what_to_call():
    with pytest.raises(RuntimeError, match="call initialize"):
        AdaScale().step()


def test_a_rule_tells_factors_before_a_model_is_there():
    assert [LinearScale().scale_lr(4.0), SqrtScale().scale_lr(4.0)] == [4.0, 2.0]
    assert AdaScale().scale_lr(4.0) == pytest.approx([1.0], abs=1e-5)  # no noise was measured


@pytest.mark.parametrize("is_replicated", [False, True])
def test_the_published_loop_takes_the_steps_of_the_rule(tmp_path, is_replicated):
    distributed, plain = torch.distributed, attached(LinearScale(), accum_scale=1.0)
    if is_replicated:
        place = f"file://{tmp_path / 'rendezvous'}"
        distributed.init_process_group("gloo", init_method=place, rank=0, world_size=1)
    try:
        inner = Linear()
        optim = torch.optim.SGD(inner.parameters(), lr=0.1)
        rule = LinearScale()
        model = AdaptiveDataParallel(inner, optim, rule)
        for gradient in ([1.0, 2.0], [3.0, 1.0]):
            optim.zero_grad()
            loss = model(torch.tensor(gradient))
            loss.backward()
            rule.step()
            take_step(*plain, [gradient])
        assert torch.equal(inner.weight, plain[1].weight)
        assert (model.scaling_rule, model.gain) == (rule, pytest.approx(1.0))
        assert list(model.state_dict()) == ["module.weight"]
        other = LinearScale()
        other.initialize(adp=model, optimizer=optim)
        with pytest.raises(RuntimeError, match="call initialize"):
            rule.step()
    finally:
        if is_replicated:
            distributed.destroy_process_group()


def test_a_step_without_a_backward_pass_is_refused():
    rule, _ = attached(AdaScale())
    with pytest.raises(RuntimeError, match=r"call loss\.backward"):
        rule.step()


def test_parameters_added_or_unfrozen_later_are_refused_until_attached_again():
    model = torch.nn.Sequential(Linear(), Linear())
    model[1].weight.requires_grad_(False)
    rule = AdaScale()
    rule.initialize(model, optimizer := torch.optim.SGD(model.parameters(), lr=0.1))
    model[0]([1.0, 0.0]).backward()
    rule.step()
    rule.zero_grad()
    model[1].weight.requires_grad_(True)
    (model[0]([1.0, 0.0]) + model[1]([1.0, 0.0])).backward()
    with pytest.raises(RuntimeError, match="call it again"):
        rule.step()
    rule.initialize(model, optimizer)
    (model[0]([1.0, 0.0]) + model[1]([1.0, 0.0])).backward()
    rule.step()
    assert model[1].weight.tolist() != [0.0, 0.0]


@pytest.mark.parametrize("size", [0, -1, float("nan")])
def test_an_initial_batch_that_is_none_is_refused_when_attached(size):
    with pytest.raises(ValueError, match="needs a finite number above 0"):
        attached(LEGWScale(1, 10), init_batch_size=size)


def test_legw_asks_for_the_initial_batch_when_attached():
    with pytest.raises(ValueError, match="init_batch_size: missing"):
        attached(LEGWScale(1, 100))


def test_legw_warms_up_over_progress():
    rule, model = attached(LEGWScale(1, 100), init_batch_size=10)
    deltas = [take_step(rule, model, [[1.0, 0.0]])[0] for _ in range(12)]
    assert np.allclose(deltas, [-0.01 * min(step, 10) for step in range(12)], atol=1e-6)


def test_attached_or_not_a_rule_computes_the_same_factors():
    facts = {"grad_sqr": np.ones(2), "grad_var": np.array([1.0, 3.0])}
    assert np.array_equal(AdaScale().lr_factor(4, **facts), AdaScaleRule().lr_factor(4, **facts))


DICTATED = PUBLISHED["estimator_multi_replica"][0]
# steps x replicas x passes x parameters
ACCUMULATED = np.random.default_rng(0).normal([1.0, 2.0], 1.0, size=(3, 2, 2, 2)).tolist()
PLANS = {
    "published": {
        "lr": 0.1,
        "accum_scale": DICTATED["accum_scale"],
        "no_sync": False,
        "steps": [step["micro_grads_by_replica"] for step in DICTATED["steps"]],
    },
    "averaged once": {"lr": 0.1, "accum_scale": 2.0, "no_sync": True, "steps": ACCUMULATED},
    "averaged at every pass": {"lr": 0.1, "accum_scale": 2.0, "no_sync": False, "steps": ACCUMULATED},
}


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    """What this process and another one found, by plan."""
    folder = tmp_path_factory.mktemp("replicas")
    rendezvous, output = str(folder / "rendezvous"), folder / "found.json"
    (folder / "plans.json").write_text(json.dumps(list(PLANS.values())))
    command = [sys.executable, ddp_worker.__file__, rendezvous, "1", str(output)]
    with (folder / "plans.json").open() as plans, subprocess.Popen(command, stdin=plans) as other:
        found = [ddp_worker.replica(rendezvous, 0, list(PLANS.values()))]
    assert other.returncode == 0
    found.append(json.loads(output.read_text()))
    return [dict(zip(PLANS, each, strict=True)) for each in found]


def test_two_replicas_estimate_as_published(replicas):
    for row, step in zip(replicas[0]["published"], DICTATED["steps"], strict=True):
        assert np.allclose(row["sqr"], np.maximum(step["sqr_avg"], 0), rtol=1e-6)
        assert np.allclose(row["var"], step["var_avg"], rtol=1e-6)
        assert row["progress"] == pytest.approx(step["progress"])
        assert np.allclose(row["delta"], -0.1 * step["lr_factor"][0] * np.array(step["mean_grad"]), atol=1e-6)


def test_replicas_agree(replicas):
    assert replicas[0] == replicas[1]


@pytest.mark.parametrize("plan", ["averaged once", "averaged at every pass"])
def test_two_replicas_that_accumulate_match_one_that_accumulates_all(replicas, plan):
    single, model = attached(AdaScale(), accum_scale=1.0)
    for step, row in zip(ACCUMULATED, replicas[0][plan], strict=True):
        delta = take_step(single, model, [gradient for mine in step for gradient in mine])
        assert np.allclose(row["delta"], delta, atol=1e-6)
        assert np.allclose([row["sqr"], row["var"]], [single.noise.sqr, single.noise.var], rtol=1e-5)
        assert row["progress"] == pytest.approx(single.progress, rel=1e-5)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # PyTorch's own
def test_sharded_models_are_refused(tmp_path):
    said = ddp_worker.refusals(str(tmp_path / "rendezvous"))
    assert [line.partition(",")[0] for line in said] == ["model: is sharded (FSDP or DTensor)"] * 2
