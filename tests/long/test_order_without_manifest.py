"""The order of runs and conditions is the file's, also when the manifest is lost."""

from __future__ import annotations

from pathlib import Path

from retrain.campaign.run import start
from retrain.results.report.gather import gather
from retrain.results.report.outputs import ends_of
from retrain.results.report.sides import conditions
from retrain.results.status import survey

SINGLE = '[training]\nlr = 5e-3\nmax_steps = 3\nbatch_size = 2\ngroup_size = 4\n[data]\ntask = "successor"\n'


def test_conditions_keep_the_order_of_the_file_without_a_manifest(here: Path) -> None:
    file = here / "ordered.toml"
    names = ["zebra", "apple", "mango"]
    tables = "".join(f'[[campaign.conditions]]\nname = "{name}"\n' for name in names)
    file.write_text(SINGLE + f"[campaign]\nseeds = [5, 1]\n{tables}")
    directory = start(file, ["campaign.launcher=inline"]).execute().directory
    manifest = directory / "manifest.json"
    before = views(directory)
    manifest.write_text("{")
    assert views(directory) == before
    manifest.unlink()
    assert views(directory) == before
    runs = [f"{name}_s{seed}" for seed in (5, 1) for name in names]
    assert before == (runs, names, names, runs)


def views(directory: Path) -> tuple[list[str], ...]:
    """The order in which status, report, compare and export name runs and conditions."""
    (seen,), found = survey(directory), gather(directory)
    sides = [side.label for side in conditions(found)]
    exported = dict.fromkeys(row["run"] for row in ends_of([found]))
    return [run.run_id for run in seen.runs], list(found.conditions), sides, list(exported)
