"""What is asked before a campaign exists: of its file, then of Slurm."""

from __future__ import annotations

from retrain.config.engines import Slurm
from retrain.config.resolve import build
from retrain.launchers import Assignment
from retrain.launchers.permit_split import sharing_problems, workers_at_a_time
from retrain.launchers.slurm import commands
from retrain.launchers.slurm.script import UNFIT, render

NO_LINE = "\n\r\0"  # what follows the first two would be a line, and a command, of its own


def check_campaign(assignment: Assignment) -> list[str]:
    """List what cannot work on any cluster."""
    table = build(Slurm, assignment.options)
    problems = [
        f"[campaign.slurm].{key}: {text!r} has more than one line; give each line its own string"
        for key, text in _lines(table)
        if any(character in text for character in NO_LINE)
    ]
    if any(character in str(assignment.directory) for character in UNFIT):
        problems.append(
            "[logging].log_dir: no batch script can name a path with quotes, backslashes or newlines"
        )
    problems += sharing_problems(assignment, table.permits, "campaign.slurm")
    return problems


def _lines(table: Slurm) -> list[tuple[str, str]]:
    """Return all that becomes a line of the script, by key."""
    given = [(key, value if isinstance(value, list) else [value]) for key, value in vars(table).items()]
    return [(key, text) for key, texts in given for text in texts if isinstance(text, str)]


def check_engine(assignment: Assignment) -> None:
    """Have Slurm judge the script: partition, account, licences, sizes.

    Raises:
        LaunchError: it is not there, or refuses.
    """
    commands.require_commands()
    table = build(Slurm, assignment.options)
    last = min(len(assignment.runs), commands.array_limit()) - 1
    script = render(assignment, table)
    try:
        commands.try_submit(script, [f"--array=0-{last}%{workers_at_a_time(assignment, table.permits)}"])
    except commands.QueueFullError:  # the user may have fewer jobs than that, which is submitted in parts
        commands.try_submit(script, ["--array=0"])
