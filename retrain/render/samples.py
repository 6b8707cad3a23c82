"""Samples as people read them: what was asked, what was written, what it was worth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.text import Text

from retrain.records.text import plain_lines
from retrain.render.text import number
from retrain.status.samples import Sample


def show(samples: Sequence[Sample], console: Console) -> None:
    """Print samples, each with its step, prompt, reward and advantage."""
    for sample in samples:
        console.print(_headline(sample), soft_wrap=True)
        for name, text in (
            ("prompt", sample.prompt),
            ("answer", sample.answer),
            ("wrote", sample.completion),
        ):
            console.print(Text("\n".join(_block(name, text))), soft_wrap=True)
        console.print()


def _headline(sample: Sample) -> Text:
    line = Text(f"step {sample.step}  prompt {sample.prompt_id}  reward ", style="bold")
    if sample.reward is None:
        line.append("unscored", style="yellow")
    else:
        line.append(number(sample.reward), style="green" if sample.reward > 0 else "red")
    advantage = "-" if sample.advantage is None else f"{sample.advantage:+.3f}"
    line.append(f"  advantage {advantage}  {sample.tokens} tokens")
    marks = (("  tie: taught nothing", sample.tie), ("  truncated", sample.truncated))
    return line.append("".join(mark for mark, is_so in marks if is_so), style="yellow")


def _block(name: str, text: str) -> Iterator[str]:
    first, *rest = plain_lines(text) or ["(empty)"]
    yield f"  {name:<7}{first}"
    for line in rest:
        yield f"  {'':7}{line}"
