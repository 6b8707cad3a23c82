"""Where a campaign's results come from."""

from __future__ import annotations

from collections.abc import Iterator

from retrain.distribution import version
from retrain.records.clock import utc_now
from retrain.records.text import plain
from retrain.report.gather import CampaignRecord
from retrain.report.numbers import MISSING

MOST_SOFTWARE = 5  # hosts of one campaign are alike, or the reader must know


def provenance(campaign: CampaignRecord) -> tuple[tuple[str, str], ...]:
    """List facts as pairs of name and value; what the records do not say is a dash."""
    return tuple((name, value or MISSING) for name, value in _facts(campaign))


def _facts(campaign: CampaignRecord) -> Iterator[tuple[str, str]]:
    yield "campaign", campaign.id
    manifest = campaign.manifest
    if manifest is not None:
        git = manifest.git
        changed = " (with uncommitted changes)" if git and git.is_dirty else ""
        yield "retrain", plain(manifest.package_version)
        yield "Python", plain(manifest.python)
        yield "git commit", plain(git.commit) + changed if git else ""
        yield "started on", plain(manifest.host)
        yield "started", plain(manifest.started_at)
        yield "ended", plain(manifest.ended_at)
        yield "configuration hash", plain(manifest.config_hash)
    yield "command-line overrides", "  ".join(campaign.overrides)
    hosts = dict.fromkeys(plain(attempt.host) for run in campaign.runs for attempt in run.attempts)
    yield "workers' hosts", ", ".join(list(hosts)[:20])
    software = dict.fromkeys(plain(attempt.software) for run in campaign.runs for attempt in run.attempts)
    yield "workers' software", "; ".join([one for one in software if one][:MOST_SOFTWARE])
    yield "report made", f"{utc_now()} by retrain {version()}"
