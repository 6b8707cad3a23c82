"""Files with a chat template: a wrong one is found before anything runs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from retrain.backends.options import template_problems
from tests.extras.test_tool_templates import chat_model

Call = Callable[..., subprocess.CompletedProcess[str]]
TRANSFORMERS = """
{%- set day = strftime_now("%d %b %Y") %}
{%- for message in messages %}
    {%- if message.role == "system" %}{% continue %}{% endif %}
    {%- if message.role == "tool" %}{{ raise_exception("no tools") }}{% endif %}
    {%- if message.role == "assistant" %}
        {%- generation %}{{ message.content }}{% endgeneration %}
    {%- else %}{{ message | tojson(indent=2) }}{% break %}
    {%- endif %}
{%- endfor %}
"""


@pytest.fixture
def template(tmp_path: Path) -> Path:
    return tmp_path / "chat.jinja"


def problems(template: Path, text: str) -> list[str]:
    template.write_text(text)
    return template_problems({"chat_template": str(template), "system_prompt": "be brief"})


def test_what_transformers_adds_to_jinja_is_no_problem(template: Path) -> None:
    assert problems(template, TRANSFORMERS) == []


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("a\n{% for m in messages %}\n{{ m }}\n", 3, "innermost block that needs to be closed"),
        ("a\n\n{{ m.content \n", 3, "end of print statement"),
        ("{% if x %}{% endfor %}", 1, "unknown tag 'endfor'"),
        ("a\n{{ x | tojsn }}", 2, "No filter named 'tojsn'"),
        ("{% generation %}a", 1, "'endgeneration'"),
    ],
)
def test_a_wrong_template_is_named_with_its_line(template: Path, text: str, line: int, what: str) -> None:
    (problem,) = problems(template, text)
    assert problem.startswith(f"chat_template: {template}, line {line}: ")
    assert what in problem


@pytest.mark.parametrize("command", ["explain", "doctor"])
def test_commands_refuse_a_file_that_names_a_wrong_template(
    command: str, template: Path, retrain: Call, here: Path
) -> None:
    template.write_text("{% if x %}")
    model = chat_model(here / "model", None)
    (here / "c.toml").write_text(
        f'[model]\nmodel = "{model}"\n[backend]\nbackend = "local"\n'
        f'[backend.options]\nchat_template = "{template}"\n'
    )
    refused = retrain(command, "c.toml", env=dict(os.environ, COLUMNS="500"))
    assert refused.returncode == 2
    assert f"{template}, line 1: " in " ".join((refused.stdout + refused.stderr).split())
