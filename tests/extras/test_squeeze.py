"""A squeezed adapter does what the original did, as far as its rank allows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from retrain.backends.squeeze import (
    Adapter,
    Layer,
    analyse,
    output_error,
    read_adapter,
    squeezed,
    write_adapter,
)
from retrain.base.errors import ConfigError
from retrain.cli import app
from tests.extras.tiny_models import save_tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # peft's own
RANK, USED = 16, 3
TOKENS = torch.arange(2, 30)[None]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), hidden=64)


def saved_adapter(model: str, directory: Path, *, used: int = USED, **options) -> Path:
    """An adapter of rank 16 whose updates have rank `used`, saved by peft."""
    torch.manual_seed(0)
    config = LoraConfig(**{"r": RANK, "lora_alpha": 2 * RANK, "target_modules": "all-linear", **options})
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    for name, factor in adapted.named_parameters():
        if "lora_B" in name:
            factor.data = torch.randn(len(factor), used) @ torch.randn(used, factor.shape[1]) / 30
    adapted.save_pretrained(directory, save_embedding_layers=False)
    return directory


def logits(model: str, adapter: Path) -> torch.Tensor:
    base = AutoModelForCausalLM.from_pretrained(model)
    with torch.no_grad():
        return PeftModel.from_pretrained(base, adapter).eval()(TOKENS).logits


def random_layer(outputs: int, inputs: int, rank: int, seed: int) -> Layer:
    random = torch.Generator().manual_seed(seed)
    a, b = torch.randn(rank, inputs, generator=random), torch.randn(outputs, rank, generator=random)
    return Layer("layer", a, b, 2.0 * rank, 2.0, ("layer.lora_A.weight", "layer.lora_B.weight"))


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 12), st.integers(0, 100))
def test_singular_values_are_those_of_the_full_update(outputs, inputs, rank, seed):
    layer = random_layer(outputs, inputs, rank, seed)
    full = torch.linalg.svdvals(layer.scale * layer.b.double() @ layer.a.double())
    found = torch.tensor(analyse(Adapter({}, (layer,), {})).layers[0].singular_values).double()
    count = min(len(full), len(found))
    assert torch.allclose(found[:count], full[:count], atol=1e-9 * float(full[0]))
    assert float(found[count:].sum()) <= 1e-9 * float(full[0])


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 12), st.integers(0, 100))
def test_what_is_cut_is_what_the_spectrum_says(rank, seed):
    adapter = Adapter({}, (random_layer(30, 20, 12, seed),), {})
    one, two = (
        layer.scale * layer.b.double() @ layer.a.double()
        for layer in (adapter.layers[0], squeezed(adapter, rank).layers[0])
    )
    lost = 1 - analyse(adapter).at(rank).mean_fraction
    assert float(((one - two).norm() / one.norm()) ** 2) == pytest.approx(lost, abs=1e-9)


def test_the_recommended_rank_is_the_one_that_is_used(model, tmp_path):
    spectrum = analyse(read_adapter(saved_adapter(model, tmp_path / "adapter")))
    assert spectrum.recommended(0.999999).rank == USED


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 8, "down_proj": 2}, "alpha_pattern": {"q_proj": 5}},
        {"modules_to_save": ["lm_head"], "target_modules": ["q_proj", "v_proj"]},
        {"target_modules": ["embed_tokens", "o_proj"]},
    ],
    ids=["plain", "rslora", "patterns", "trained modules", "embedding"],
)
def test_peft_gets_the_same_answers_from_a_smaller_file(model, tmp_path, options):
    original = saved_adapter(model, tmp_path / "adapter", **options)
    adapter = read_adapter(original)
    used = max(RANK if "embed_tokens" in layer.name else USED for layer in adapter.layers)
    write_adapter(squeezed(adapter, used), tmp_path / "small")
    assert torch.allclose(logits(model, original), logits(model, tmp_path / "small"), atol=1e-4)
    assert output_error(adapter, read_adapter(tmp_path / "small")) < 1e-4


def test_the_smaller_adapter_keeps_precision_and_scale(model, tmp_path):
    original = saved_adapter(model, tmp_path / "adapter")
    weights = {k: v.bfloat16() for k, v in load_file(original / "adapter_model.safetensors").items()}
    save_file(weights, original / "adapter_model.safetensors")
    write_adapter(squeezed(read_adapter(original), 4), tmp_path / "small")
    config = json.loads((tmp_path / "small" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["rank_pattern"]) == (4, 8, {})
    assert {t.dtype for t in load_file(tmp_path / "small" / "adapter_model.safetensors").values()} == {
        torch.bfloat16
    }


def test_an_untrained_adapter_retains_everything(model, tmp_path):
    spectrum = analyse(read_adapter(saved_adapter(model, tmp_path / "adapter", used=0)))
    assert (spectrum.trained, spectrum.recommended(0.99).rank) == ([], 1)


def test_the_command_shows_ranks_and_writes_the_recommended_one(model, tmp_path):
    original = saved_adapter(model, tmp_path / "step" / "adapter")
    small = tmp_path / "small"
    done = CliRunner().invoke(app, ["squeeze", str(tmp_path / "step"), "-o", str(small), "--json"])
    found = json.loads(done.stdout)
    assert done.exit_code == 0, done.output
    assert found["adapter"] == str(original)
    assert found["written_rank"] == found["recommended"]["rank"] <= USED
    assert found["written_bytes"] < found["size_bytes"] / 4
    assert found["output_error"] < 0.15  # a hundredth of the variance is a tenth of the norm


def test_a_long_path_is_shown_whole_above_a_narrower_table(model, tmp_path):
    adapter = saved_adapter(model, tmp_path / ("long-" * 20) / "adapter")
    done = CliRunner().invoke(app, ["squeeze", str(adapter)])
    assert done.stdout.splitlines()[0].startswith(f"{adapter}: "), done.output


def test_the_rank_asked_for_is_among_those_shown(model, tmp_path):
    adapter = saved_adapter(model, tmp_path / "adapter")
    for asked, shown in ((5, 5), (99, RANK)):
        done = CliRunner().invoke(app, ["squeeze", str(adapter), "--rank", str(asked), "--json"])
        assert shown in [one["rank"] for one in json.loads(done.stdout)["ranks"]]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"use_dora": True}, "DoRA normalizes"),
        ({"init_lora_weights": "pissa_niter_4"}, "also changed the base model"),
        ({"peft_type": "LOHA"}, "not a LoRA adapter"),
    ],
)
def test_kinds_that_a_smaller_rank_would_falsify_are_refused(model, tmp_path, change, says):
    original = saved_adapter(model, tmp_path / "adapter")
    config = json.loads((original / "adapter_config.json").read_text())
    (original / "adapter_config.json").write_text(json.dumps(config | change))
    with pytest.raises(ConfigError, match=says):
        read_adapter(original)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_an_adapter_whose_training_diverged_is_refused_by_layer(model, tmp_path, value):
    original = saved_adapter(model, tmp_path / "adapter")
    weights = load_file(original / "adapter_model.safetensors")
    broken = next(name for name in weights if "lora_B" in name)
    weights[broken][0, 0] = value
    save_file(weights, original / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match="contains NaN or infinite values") as refused:
        read_adapter(original)
    assert broken.removeprefix("base_model.model.").removesuffix(".lora_B.weight") in str(refused.value)


@pytest.mark.parametrize("alpha", [float("nan"), "16", None])
def test_a_scale_that_is_no_number_is_refused(model, tmp_path, alpha):
    original = saved_adapter(model, tmp_path / "adapter")
    config = json.loads((original / "adapter_config.json").read_text())
    (original / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": alpha}))
    with pytest.raises(ConfigError, match="needs a finite number"):
        read_adapter(original)


def test_an_output_that_exists_is_refused_before_anything_is_read(tmp_path, retrain):
    (tmp_path / "there").mkdir()
    answer = retrain("squeeze", tmp_path / "nowhere", "-o", tmp_path / "there")
    assert (answer.returncode, answer.stderr) == (
        2,
        f"{tmp_path / 'there'}: exists; name a directory that does not\n",
    )


def test_files_that_are_no_adapter_are_named(model, tmp_path):
    with pytest.raises(ConfigError, match="contains no adapter_config"):
        read_adapter(tmp_path)
    original = saved_adapter(model, tmp_path / "adapter")
    (original / "adapter_model.safetensors").write_bytes(b"cut short")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_adapter(original)


def test_nothing_is_overwritten(model, tmp_path):
    adapter = read_adapter(saved_adapter(model, tmp_path / "adapter"))
    with pytest.raises(ConfigError, match="exists; name a directory that does not"):
        write_adapter(adapter, tmp_path / "adapter")
