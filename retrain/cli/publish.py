"""`retrain publish`: a run's policy for others, as adapters or merged, with a model card."""

from __future__ import annotations

from pathlib import Path

import typer
from typer import Argument, Option

from retrain.cli import AsJson, RunDirectory, complete_runs

PROMPT_IS_SHOWN = (
    "the card shows the system prompt that the policy was trained with; publish with --no-system-prompt to "
    "keep it private"
)


def command(
    directory: RunDirectory,
    name: str = Argument(
        "", metavar="NAME", help="A run or a condition of that campaign.", autocompletion=complete_runs
    ),
    output: Path | None = Option(
        None,
        "-o",
        "--output",
        metavar="DIR",
        help="Write to this directory; default: published/CAMPAIGN-RUN.",
    ),
    merge: bool = Option(False, "--merge", help="Merge the adapters into a whole model, and check it."),
    dtype: str = Option(
        "float32", "--dtype", metavar="float32|bfloat16", help="With --merge: the type of the weights."
    ),
    best: bool = Option(False, "--best", help="The finished seed of a condition with the best reward."),
    step: int | None = Option(
        None, "--step", min=0, metavar="N", help="A kept checkpoint of this step; default: the last."
    ),
    unfinished: bool = Option(False, "--unfinished", help="Publish a run that is not finished, too."),
    base_model: str = Option("", "--base-model", metavar="ORG/NAME", help="What others call the base model."),
    license: str = Option(
        "", "--license", metavar="NAME", help="The license, such as apache-2.0; default: unknown."
    ),
    no_prompt: bool = Option(False, "--no-system-prompt", help="Leave the system prompt out of the card."),
    force: bool = Option(False, "--force", help="Replace what was published there before."),
    push: str = Option("", "--push", metavar="USER/NAME", help="Push it to this repository of a hub."),
    private: bool = Option(False, "--private", help="With --push: a repository that only you can read."),
    as_json: AsJson = False,
) -> None:
    """Write a run's policy into a directory that peft or transformers loads, with a model card.

    The card says what was trained, the comparison's result, the cost, and how to load it. What was published
    before can be pushed as it is: name its directory.

    Example: retrain publish logs/campaign-20260101T120000Z-1a2b grpo --best --merge
    """
    from retrain.cli.render.tables import print_result
    from retrain.records.text import plain
    from retrain.results.publish import Wishes, publish, push_published, read_published
    from retrain.results.publish.choice import choose
    from retrain.results.publish.hub import check_name
    from retrain.results.publish.merging import DTYPES

    if private and not push:
        raise typer.BadParameter("needs --push", param_hint="--private")
    if dtype not in DTYPES[: len(DTYPES) if merge else 1]:
        raise typer.BadParameter(f"needs --merge and one of {', '.join(DTYPES)}", param_hint="--dtype")
    if push:
        check_name(push)
    wishes = Wishes(output, force, merge, dtype, base_model, license, push, no_prompt)
    published = read_published(directory)
    if published is None:
        choice = choose(directory, name, best=best, step=step, unfinished=unfinished)
        published = publish(choice, wishes, lambda line: typer.echo(line, err=True))
    elif any((not push, wishes != Wishes(repository=push), name, best, step is not None, unfinished)):
        raise typer.BadParameter(f"{directory} was published before; it can only be pushed", param_hint="RUN")
    if published.shows_system_prompt:
        typer.echo(PROMPT_IS_SHOWN, err=True)
    if push:
        typer.echo(f"pushing {published.directory} to {push}", err=True)
        published = push_published(published, push, private=private)
    if as_json:
        print_result(published)
        return
    what = {"adapter": "adapters", "merged": "a merged model", "model": "a whole model"}[published.kind]
    why = f" ({published.chosen})" if published.chosen else ""
    typer.echo(
        f"{plain(published.directory, 1000)}: {what} of {plain(published.run_name)}{why}, "
        f"step {published.step}, {published.weights_bytes / 1e6:.2f} MB"
    )
    if published.merged is not None:
        typer.echo(f"checked: {published.merged}")
    if published.url:
        typer.echo(f"pushed to {published.url}")
