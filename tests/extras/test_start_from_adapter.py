"""The local backend starts from a run or from peft's directory, and says what does not fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import tomli_w
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from retrain.backends import Optimization
from retrain.base.errors import ConfigError
from retrain.campaign.run import reopen, start
from retrain.records.metrics import read_metrics
from tests.extras.local_policies import as_samples, draw, loss_named, open_backend, stir
from tests.extras.tiny_models import save_tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # peft's own

HOW = Optimization(lr=1e-2, temperature=0.8, kl_coef=0.1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, context=64)


@pytest.fixture
def adapter(model: str, tmp_path: Path) -> str:
    """An adapter that peft made and saved by itself."""
    torch.manual_seed(1)
    lora = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False)
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), lora)
    adapted.save_pretrained(str(tmp_path / "adapter"))
    return str(tmp_path / "adapter")


def started(model: str, adapter: str, **reference: bool):
    backend = open_backend(model)
    backend.start_from(adapter, **(reference or {"is_reference": True}))
    return backend


def reference_kls(backend, steps: int = 2) -> list[float]:
    drawn = [as_samples(draw(backend), seed=step) for step in range(steps)]
    return [backend.update(samples, loss_named("ppo"), HOW).reference_kl for samples in drawn]


def test_the_policy_is_that_of_peft(model, adapter):
    theirs = get_logits(model, adapter)
    ours = started(model, adapter).policy.causal(input_ids=torch.tensor([[3, 4, 5]])).logits
    assert torch.allclose(ours, theirs, atol=1e-5)


def get_logits(model: str, adapter: str) -> torch.Tensor:
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter).eval()
    return adapted(input_ids=torch.tensor([[3, 4, 5]])).logits


def test_the_reference_is_the_start_or_the_base_model(model, adapter):
    first, later = reference_kls(started(model, adapter, is_reference=True))
    assert first == pytest.approx(0, abs=1e-9)
    assert later > 1e-6
    assert reference_kls(started(model, adapter, is_reference=False))[0] > 1e-3


def test_dropout_does_not_reach_the_reference(model, adapter):
    backend = open_backend(model, lora_dropout=0.5)
    backend.start_from(adapter, is_reference=True)
    ids = torch.tensor([[3, 4, 5]])
    with backend.learner.dropout.masks(0, 0):
        with backend.policy.as_reference():
            seen = backend.policy.causal(input_ids=ids).logits
        dropped = backend.policy.causal(input_ids=ids).logits
    assert torch.equal(seen, backend.policy.causal(input_ids=ids).logits)
    assert not torch.equal(seen, dropped)


def test_a_checkpoint_holds_the_reference(model, adapter, tmp_path):
    first = started(model, adapter)
    reference_kls(first)
    (tmp_path / "saved").mkdir()
    first.save(tmp_path / "saved")
    shutil.rmtree(adapter)
    second = open_backend(model, seed=9)
    second.load(tmp_path / "saved")
    assert reference_kls(second) == reference_kls(first)


def campaign(place: Path, model: str, adapter: str, **options: object):
    place.mkdir()
    raw = {
        "model": {"model": model, "lora_rank": options.pop("rank", 4), "adapter": adapter},
        "backend": {"backend": "local", "options": {"local_files_only": True, "device": "cpu", **options}},
        "training": {"batch_size": 2, "group_size": 4, "max_tokens": 4, "lr": 1e-2, "entropy_bonus": 0.1},
        "data": {"task": "successor"},
        "reward": {"reward": "partial"},
        "algorithm": {"kl_coef": 0.1},
        "campaign": {"seeds": [0], "max_steps": 2, "launcher": "inline"},
        "logging": {"log_dir": str(place / "logs")},
    }
    (place / "c.toml").write_text(tomli_w.dumps(raw))
    return start(place / "c.toml")


def test_a_run_starts_from_an_adapter_and_another_from_that_run(model, adapter, tmp_path):
    first = campaign(tmp_path / "one", model, adapter)
    assert first.execute().exit_code == 0
    run = first.directory / "runs" / "maxrl_s0"
    second = campaign(tmp_path / "two", model, str(run))
    assert second.execute().exit_code == 0
    rows = [read_metrics(one.directory / "runs" / "maxrl_s0") for one in (first, second)]
    assert all(row[0]["reference_kl"] == pytest.approx(0, abs=1e-9) for row in rows)
    first_hash, second_hash = (reopen(one.directory).plan.runs[0].config_hash for one in (first, second))
    assert first_hash != second_hash


def change(adapter: str, **facts: object) -> None:
    path = Path(adapter) / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | facts))


@pytest.mark.parametrize(
    ("options", "facts", "said"),
    [
        ({"rank": 8}, {}, r"has rank 4, the run \[model\]\.lora_rank = 8"),
        ({"lora_alpha": 32.0}, {}, "has alpha 8, the run 32"),
        ({"target_modules": ["q_proj"]}, {}, r"adapts .*'down_proj'.*, the run \['q_proj'\]"),
        ({"lora": False}, {}, "needs .*lora = true|kl_coef"),
        ({}, {"base_model_name_or_path": "org/another"}, "was trained on 'org/another'"),
        ({}, {"peft_type": "IA3"}, "is of type 'IA3'; needs LORA"),
        ({}, {"use_rslora": True}, "has use_rslora"),
        ({}, {"alora_invocation_tokens": [3, 4]}, "has alora_invocation_tokens"),  # off before these
        ({}, {"init_lora_weights": "pissa"}, "also changed the base model"),
    ],
    ids=str,
)
def test_an_adapter_that_does_not_fit_is_refused_before_anything_is_created(
    model, adapter, tmp_path, options, facts, said
):
    change(adapter, **facts)
    with pytest.raises(ConfigError, match=said):
        campaign(tmp_path / "one", model, adapter, **options)
    assert not (tmp_path / "one" / "logs").exists()


def test_another_model_of_the_same_name_is_told_by_its_content(model, adapter, tmp_path):
    other = save_tiny_model(tmp_path / "other" / Path(model).name, hidden=32, context=64, seed=1)
    with pytest.raises(ConfigError, match="was trained on"):
        campaign(tmp_path / "one", other, adapter)


def test_a_model_s_directory_with_adapters_is_refused(model, adapter, tmp_path):
    with pytest.raises(ConfigError, match=r"holds adapters; set it as \[model\]\.adapter"):
        open_backend(adapter)
    shutil.copytree(model, tmp_path / "both")
    shutil.copytree(adapter, tmp_path / "both", dirs_exist_ok=True)
    with pytest.raises(ConfigError, match="has adapters beside its weights, which would be left out"):
        open_backend(tmp_path / "both")


def test_adapters_of_other_layers_are_refused(model, tmp_path):
    first = open_backend(model, target_modules=["q_proj"])
    stir(first)
    first.save(tmp_path)
    with pytest.raises(ConfigError, match=r"\[model\]\.adapter: .* does not fit the model .*target_modules"):
        open_backend(model).start_from(str(tmp_path / "adapter"), is_reference=True)


def test_adapters_that_are_cut_off_are_told_from_those_that_do_not_fit(model, adapter):
    file = Path(adapter, "adapter_model.safetensors")
    file.write_bytes(file.read_bytes()[:300])
    with pytest.raises(ConfigError, match=r"\[model\]\.adapter: cannot read .*deserializing.*; copy it"):
        open_backend(model).start_from(adapter, is_reference=True)
