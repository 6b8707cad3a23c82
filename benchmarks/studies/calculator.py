"""A small language model learns to use a calculator, on sums that it gets wrong without one.

    python -m benchmarks.studies.calculator DIRECTORY

The model is made here: two layers, a tokenizer of its own, and calls of functions as Qwen2.5 and Hermes write
them. It learns them from written conversations; in the last of these, one first turn of eight is a call, and
the others are wrong sums. Reinforcement learning follows, in two conditions: with the calculator,
and with a single turn, where nothing of a call's result can be read.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from benchmarks.suite import script_parser
from retrain.plugins.environments.tools import tool_of

# (updates, share of calls among first turns): the form is learned first, then how rarely it is used
STAGES = ((280, 0.5), (120, 0.12))
UNTRAINED = -100  # label of a token that is read only
WRITTEN, BATCH, LR = 1500, 32, 3e-3  # conversations, turns of an update, learning rate
END = "<|im_end|>"
Turn: TypeAlias = tuple[list[dict[str, Any]], str]  # the messages before it, and what it says
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' + tool | tojson }}{% endfor %}{{ '\\n</tools><|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}{{ '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}\\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
SUMS = '''\
"""Sums of two numbers of two digits, and a calculator."""

import random

from retrain.base.rollouts import Prompt
from retrain.plugins.tasks import Task


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def build(*, seed: int) -> Task:
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(seed).shuffle(pairs)
    prompts = tuple(Prompt(n, f"{a}+{b}=", str(a + b)) for n, (a, b) in enumerate(pairs))
    return Task(prompts[200:], prompts[:200], "", 3)
'''
CAMPAIGN = """\
[model]
model = "{model}"

[backend]
backend = "local"
options = {{ lora = false, device = "cpu", dtype = "float32", chat_template = true, local_files_only = true }}

[data]
task = "sums.build"
eval_prompts = 100

[environment]
environment = "tools"
max_turns = 2
max_turn_tokens = 24

[environment.options]
tools = ["sums.add"]

[training]
max_tokens = 40
batch_size = 16
group_size = 8
temperature = 1.0
lr = 5e-4
eval_every = 6
save_every = 6

[algorithm]
advantage_mode = "grpo"

[campaign]
seeds = {seeds}
max_steps = {steps}
parallel = true
max_workers = 2

[[campaign.conditions]]
name = "calculator"

[[campaign.conditions]]
name = "alone"
environment = {{ max_turns = 1 }}
"""


def _add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


SCHEMA = tool_of("add", _add).schema


def make(directory: Path, seeds: Sequence[int] = (0,), steps: int = 24) -> Path:
    """Write the model, the task with its function, and the campaign file, which is returned."""
    (directory / "sums.py").write_text(SUMS)
    make_model(directory / "model")
    written = CAMPAIGN.format(model=directory / "model", seeds=list(seeds), steps=steps)
    (directory / "calculator.toml").write_text(written)
    return directory / "calculator.toml"


def make_model(directory: Path) -> None:
    """Train a model on written conversations, and save it with its tokenizer."""
    choice = random.Random(0)
    tokenizer = _tokenizer([said for _ in range(300) for said in _turns(choice, 0.5)])
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        initializer_range=0.1,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
        _train(model, tokenizer, choice)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def _turns(choice: random.Random, calls: float) -> Iterator[Turn]:
    """Iterate over the turns of a written conversation; `calls` is the share of calls among first turns."""
    a, b = choice.randrange(10, 100), choice.randrange(10, 100)
    said: list[dict[str, Any]] = [{"role": "user", "content": f"{a}+{b}="}]
    call = {"name": "add", "arguments": {"a": a, "b": b}}
    written = f"<tool_call>\n{json.dumps(call)}\n</tool_call>"
    if choice.random() < calls:
        yield said, written
    else:
        yield said, str(a + b + choice.choice([-1, 1]) * choice.randint(1, 20))
    answered = {"role": "assistant", "content": written}, {"role": "tool", "content": str(a + b)}
    yield [*said, *answered], str(a + b)


def _tokenizer(turns: Sequence[Turn]) -> PreTrainedTokenizerFast:
    """Return a tokenizer of bytes and digits, whose other tokens are what conversations have in common."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<|im_start|>", END]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=800, special_tokens=special, initial_alphabet=alphabet)
    fast = _fast(tokenizer)
    texts = (part for said, turn in turns for part in (_shown(fast, said), turn))
    tokenizer.train_from_iterator(texts, trainer)
    return _fast(tokenizer)


def _fast(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token="<pad>")
    fast.chat_template = TEMPLATE
    return fast


def _shown(tokenizer: PreTrainedTokenizerFast, said: Sequence[Any]) -> str:
    how = {"tools": [SCHEMA], "add_generation_prompt": True, "tokenize": False}
    return str(tokenizer.apply_chat_template(said, **how))


def _train(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, choice: random.Random) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    rate = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, sum(count for count, _ in STAGES))
    for count, calls in STAGES:
        turns = [turn for _ in range(WRITTEN) for turn in _turns(choice, calls)]
        before = tokenizer([_shown(tokenizer, said) for said, _ in turns])["input_ids"]
        answers = tokenizer([turn + END for _, turn in turns])["input_ids"]
        for _ in range(count):
            rows = [(before[n], answers[n]) for n in choice.sample(range(len(turns)), BATCH)]
            ids = [torch.tensor([*read, *answer]) for read, answer in rows]
            labels = [torch.tensor([*[UNTRAINED] * len(read), *answer]) for read, answer in rows]
            padded = pad_sequence(ids, batch_first=True), pad_sequence(labels, True, UNTRAINED)
            model(input_ids=padded[0], labels=padded[1]).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            rate.step()


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("directory", type=Path, help="a new directory for the model and the campaign")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    options.directory.mkdir(parents=True)
    torch.set_num_threads(1)  # more only wait for each other: the model is tiny
    campaign = make(options.directory.resolve(), range(options.seeds))
    command = [sys.executable, "-m", "retrain", campaign.name]
    sys.exit(subprocess.run(command, cwd=campaign.parent).returncode)


if __name__ == "__main__":
    main()
