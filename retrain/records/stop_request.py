"""stop.json: somebody's wish that a campaign ends. It stands until the next orchestrator begins.

It needs nobody's process id and reaches other machines that share the directory. The orchestrator
looks for it, and so does every worker, when it begins and while it runs: one whose orchestrator or engine
is away would otherwise outlive the stop.
"""

from __future__ import annotations

from retrain.errors import RecordsError
from retrain.records.atomic import read_json, write_json
from retrain.records.files import remove_file
from retrain.records.layout import CampaignFiles


def ask_to_stop(files: CampaignFiles, *, now: bool) -> None:
    """Ask a campaign's orchestrator and coming workers to save and leave, or (`now`) to leave at once.

    Raises:
        RecordsError: it cannot be written.
    """
    write_json(files.stop_request, {"now": now})


def asked_to_stop(files: CampaignFiles) -> int:
    """Return what was asked of a campaign: 0 nothing, 1 save and leave, 2 leave now.

    A directory that cannot be looked into at present (a file server that is away) asks nothing.
    """
    try:
        if not files.stop_request.exists():
            return 0
        request = read_json(files.stop_request) or {}
    except RecordsError:
        request = {}
    except OSError:
        return 0
    return 2 if request.get("now") is True else 1


def withdraw_request(files: CampaignFiles) -> None:
    """Forget an earlier request; only for the holder of the campaign's lock.

    Raises:
        RecordsError: it cannot be removed.
    """
    remove_file(files.stop_request)
