"""Models and tokenizers that are damaged, odd, or not each other's: said before the first step, by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import processors

from retrain.base.errors import BackendMemoryError, ConfigError
from retrain.base.json_lines import Demonstration
from retrain.base.rollouts import Prompt
from tests.extras.local_policies import open_backend
from tests.extras.tiny_models import character_tokenizer, save_tiny_model

WEIGHTS = "model.safetensors"
PROMPT = Prompt(3, "7=", "8")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(save_tiny_model(tmp_path / "model", hidden=32))


def cut_off(model: Path) -> None:
    (model / WEIGHTS).write_bytes((model / WEIGHTS).read_bytes()[:5000])


def fill_with_nan(model: Path) -> None:
    tensors = load_file(model / WEIGHTS)
    tensors["model.norm.weight"][:] = float("nan")
    save_file(tensors, model / WEIGHTS, metadata={"format": "pt"})


def widen(model: Path) -> None:
    configure(model / "config.json", hidden_size=64)


def lose_weights(model: Path) -> None:
    tensors = load_file(model / WEIGHTS)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, model / WEIGHTS, metadata={"format": "pt"})


def add_code(model: Path) -> None:
    (model / "own.py").write_text("raise SystemExit('it was run')\n")
    configure(model / "config.json", model_type="own", auto_map={"AutoConfig": "own.Config"})


def lose_the_tokenizer(model: Path) -> None:
    for path in model.glob("tokenizer*"):
        path.unlink()


def configure(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut_off, "cannot be loaded .*deserializing"),
        (widen, r"its weights do not fit its config\.json"),
        (fill_with_nan, "not finite: its weights are damaged"),
        (lose_weights, r"lack weights of the model: model\.layers\.1\.mlp\.up_proj\.weight;"),
        (add_code, "code of its own, which is never run"),
        (lose_the_tokenizer, "has no tokenizer"),
    ],
)
def test_a_damaged_model_is_named(
    model: Path, damage: Callable[[Path], None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    damage(model)
    monkeypatch.setattr("sys.stdin", StringIO("y\n"))  # nobody is to be asked
    with pytest.raises(ConfigError, match=rf"^\[model\]\.model: .*{words}"):
        open_backend(model)


@pytest.mark.parametrize(
    ("template", "options", "words"),
    [
        (
            "{{ raise_exception('no system role') }}",
            {"system_prompt": "Be brief."},
            "without system_prompt",
        ),
        ("{{ messages[5].content.text }}", {}, "UndefinedError"),
        ("{% for m in messages %}", {}, "TemplateSyntaxError"),
    ],
)
def test_a_chat_template_that_fails_is_named_with_the_prompt(
    model: Path, template: str, options: dict[str, str], words: str
) -> None:
    configure(model / "tokenizer_config.json", chat_template=template)
    backend = open_backend(model, chat_template=True, **options)
    with pytest.raises(ConfigError, match=rf"chat_template: .* fails on prompt 3 .*{words}"):
        backend.check_prompts([PROMPT])


def test_a_token_that_the_model_does_not_know_is_refused(tmp_path: Path) -> None:
    backend = open_backend(save_tiny_model(tmp_path, hidden=32, vocabulary=30))
    backend.check_prompts([PROMPT])
    with pytest.raises(ConfigError, match=r"gives token 38, and the model knows 30"):
        backend.check_prompts([Prompt(4, "z=", "")])
    with pytest.raises(ConfigError, match="do not belong together"):
        backend.written([Demonstration(PROMPT, "z")])


@pytest.mark.parametrize(
    ("frame", "ids"),
    [("<eos> $A", (1, 9, 12)), ("$A <eos>", (9, 12)), ("<eos> $A <eos>", (1, 9, 12))],
)
def test_of_what_a_tokenizer_adds_only_the_beginning_is_shown(
    model: Path, frame: str, ids: tuple[int, ...]
) -> None:
    tokenizer = character_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=frame, special_tokens=[("<eos>", 1)]
    )
    tokenizer.save_pretrained(model)
    backend = open_backend(model)
    assert backend.text.encode(PROMPT) == ids
    assert backend.text.encode(Prompt(4, "7=<eos>", ""))[-1] == 1  # whoever writes it, means it


def test_a_model_that_does_not_fit_on_its_device_may_fit_later(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB")

    monkeypatch.setattr(torch.nn.Linear, "forward", refuse)
    with pytest.raises(BackendMemoryError, match=r"\[model\]\.model: .* does not fit in memory"):
        open_backend(model)
