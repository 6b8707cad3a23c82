"""What `retrain publish` writes of a run is the run's policy, to whom knows only transformers and peft."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w
import torch
import yaml
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from retrain.backends import Exported
from retrain.base.errors import ConfigError, RecordsError, RunFailedError
from retrain.campaign.run import start
from retrain.results.publish import Wishes, publish, push_published, read_published
from retrain.results.publish.choice import Choice, choose
from retrain.results.publish.merging import Probe, merge
from tests.extras.hub import TOKEN, USER, Repository, serving
from tests.extras.local_policies import open_backend
from tests.extras.tiny_models import save_tiny_model
from tests.full_disk import files_of_at_most

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*is deprecated:FutureWarning"
)  # peft's and transformers' own

TOKENS = [3, 4, 5, 6, 7, 8]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
# the lines of a card, then log-probabilities under what they have loaded
SCORE = f"""
import torch
logits = model(input_ids=torch.tensor([{TOKENS}])).logits[0, :-1].log_softmax(-1)
print("SCORED", logits.gather(-1, torch.tensor({TOKENS[1:]})[:, None])[:, 0].tolist())
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, context=128)


def trained(place: Path, model: str, **options: object) -> Path:
    """Train a campaign of one run; give its directory."""
    raw = {
        "model": {"model": model, "lora_rank": 4},
        "backend": {"backend": "local", "options": {"local_files_only": True, "device": "cpu", **options}},
        "training": {"batch_size": 2, "group_size": 4, "max_tokens": 4, "lr": 3e-2, "entropy_bonus": 0.1},
        "data": {"task": "successor"},
        "reward": {"reward": "partial"},
        "campaign": {"seeds": [0], "max_steps": 2, "launcher": "inline"},
        "logging": {"log_dir": str(place / "logs")},
    }
    (place / "c.toml").write_text(tomli_w.dumps(raw))
    campaign = start(place / "c.toml")
    assert campaign.execute().exit_code == 0
    return campaign.directory


@pytest.fixture(scope="module")
def choice(model: str, tmp_path_factory: pytest.TempPathFactory) -> Choice:
    return choose(trained(tmp_path_factory.mktemp("run"), model), "")


def published(choice: Choice, output: Path, **wishes: object):
    return publish(choice, Wishes(output, **wishes), lambda _: None)


def lines_of(directory: Path) -> str:
    """Return the program in a card."""
    [program] = re.findall(r"```python\n(.*?)```", (directory / "README.md").read_text(), re.DOTALL)
    return str(program)


def scored(logits: torch.Tensor) -> torch.Tensor:
    return logits[0, :-1].log_softmax(-1).gather(-1, torch.tensor(TOKENS[1:])[:, None])[:, 0]


def policy_of(choice: Choice, model: str) -> torch.Tensor:
    """Return what the run's own policy says of `TOKENS`."""
    policy = open_backend(model)
    policy.load(choice.checkpoint.directory)
    with torch.no_grad():
        return scored(policy.policy.causal(input_ids=torch.tensor([TOKENS])).logits)


def results_of(program: str, where: Path) -> list[torch.Tensor]:
    """Return what a program prints in a process of its own."""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=where, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.removeprefix("SCORED") for line in done.stdout.splitlines() if line.startswith("SCORED")]
    return [torch.tensor(json.loads(line)) for line in lines]


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub's own
def test_the_lines_of_a_card_load_the_policy_in_a_new_process(choice, model, tmp_path, monkeypatch):
    """From a directory, merged, and from the hub with its base model."""
    wanted = policy_of(choice, model)
    with torch.no_grad():
        untrained = scored(
            AutoModelForCausalLM.from_pretrained(model)(input_ids=torch.tensor([TOKENS])).logits
        )
    assert (wanted - untrained).abs().max() > 0.1  # it has learned something
    published(choice, tmp_path / "adapters")
    found = published(choice, tmp_path / "whole", merge=True)
    known = {"HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path / "cache")}
    with serving() as hub:
        hub.repositories[f"{USER}/base"] = Repository(
            private=True, files={path.name: path.read_bytes() for path in Path(model).iterdir()}
        )
        for name, value in {**known, "HF_ENDPOINT": hub.url}.items():
            monkeypatch.setenv(name, value)
        pushed = published(choice, tmp_path / "out", base_model=f"{USER}/base", repository=f"{USER}/sorter")
        push_published(pushed, f"{USER}/sorter", private=True)
        (tmp_path / "pushed").mkdir()
        (tmp_path / "pushed" / "README.md").write_bytes(hub.repositories[f"{USER}/sorter"].files["README.md"])
        names = ("adapters", "whole", "pushed")
        results = results_of("".join(lines_of(tmp_path / name) + SCORE for name in names), tmp_path)
    assert len(results) == 3
    for result in results:
        assert torch.allclose(result, wanted, atol=1e-5)
    merged = b"".join(path.read_bytes() for path in (tmp_path / "whole").iterdir())
    assert model.encode() not in merged
    assert str(tmp_path).encode() not in merged
    assert found.merged.largest_difference < 1e-5
    assert found.merged.tokens > 10


def test_a_card_of_a_chat_model_encodes_as_the_run_did(tmp_path, model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = Path(save_tiny_model(tmp_path / "chat", hidden=32, context=128))
    (place / "chat_template.jinja").write_text(TEMPLATE)
    choice = choose(trained(tmp_path, str(place), chat_template=True, system_prompt="answer "), "")
    published(choice, tmp_path / "out")
    names = {}
    exec(lines_of(tmp_path / "out").replace("print(", "str("), names)
    prompt = open_backend(place, chat_template=True, system_prompt="answer ").text
    shown = re.search(r'"role": "user", "content": "(.*?)"', lines_of(tmp_path / "out"))[1]
    ids = prompt.tokens_of(f"answer {shown}=")
    assert names["prompt"]["input_ids"][0].tolist() == list(ids)


@pytest.mark.parametrize("merge", [False, True])
def test_the_chat_template_of_a_file_is_published(tmp_path, model, merge):
    place = tmp_path / "own.jinja"
    place.write_text(TEMPLATE)
    choice = choose(trained(tmp_path, model, chat_template=str(place)), "")
    published(choice, tmp_path / "out", merge=merge)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.chat_template == TEMPLATE
    assert str(place) not in (tmp_path / "out" / "README.md").read_text()
    assert "tokenizer = AutoTokenizer.from_pretrained(name)" in lines_of(tmp_path / "out")


def test_a_merge_that_rounds_away_what_was_learned_is_refused(model, tmp_path):
    torch.manual_seed(0)
    lora = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False, task_type="CAUSAL_LM")
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(model), lora)
    for name, factor in adapted.named_parameters():
        factor.data *= 1e-4 if "lora_B" in name else 1.0
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    about = Exported(model, model), tmp_path / "adapter", tmp_path / "out", [Probe(tuple(TOKENS), 1)]
    with pytest.raises(RunFailedError, match=r"is not the policy: .*\(bfloat16; .*\); merge in float32"):
        merge(*about, dtype="bfloat16")
    assert merge(*about).mean_difference < 1e-5


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_adapters_of_a_shared_output_head_leave_the_embedding_alone(tmp_path):
    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    config = Qwen3Config(
        vocab_size=40, hidden_size=16, intermediate_size=32, tie_word_embeddings=True, **shape
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "base")
    lora = LoraConfig(
        r=2, target_modules=["lm_head", "q_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    get_peft_model(base, lora).save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    found = merge(
        Exported(str(tmp_path / "base"), ""),
        tmp_path / "adapter",
        tmp_path / "out",
        [Probe(tuple(TOKENS), 1)],
    )
    assert found.largest_difference < 1e-5


def test_a_run_that_trained_every_parameter_is_published_whole(tmp_path, model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    choice = choose(trained(tmp_path, model, lora=False), "")
    assert published(choice, tmp_path / "out", base_model="org/base").kind == "model"
    names = {}
    exec(lines_of(tmp_path / "out").replace("print(", "str("), names)
    policy = open_backend(model, lora=False)
    policy.load(choice.checkpoint.directory)
    ids = torch.tensor([TOKENS])
    assert torch.equal(names["model"](input_ids=ids).logits, policy.policy.causal(input_ids=ids).logits)
    front = yaml.safe_load((tmp_path / "out" / "README.md").read_text().split("---\n")[1])
    assert (front["library_name"], front["base_model"]) == ("transformers", "org/base")
    with pytest.raises(ConfigError, match="it is a whole model already"):
        published(choice, tmp_path / "other", merge=True)


def test_a_base_model_that_is_gone_is_named(choice, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    gone = Exported(str(tmp_path / "gone"), str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match=r"the base model '.*gone' with these adapters cannot be loaded"):
        merge(gone, tmp_path, tmp_path / "out", [])


def test_a_merge_that_does_not_fit_on_the_disk_leaves_what_was_published_before(choice, tmp_path):
    before = published(choice, tmp_path / "out")
    largest = max(path.stat().st_size for path in (tmp_path / "out").iterdir())
    fix = r"raise the file size limit \(ulimit -f\), then publish again"
    with (
        files_of_at_most(largest),
        pytest.raises(RecordsError, match=rf"out: cannot write it \(File too large\); {fix}"),
    ):
        published(choice, tmp_path / "out", merge=True, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert read_published(tmp_path / "out") == before
