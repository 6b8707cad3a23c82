"""Reads a log directory into rows of campaigns, conditions and runs.

Read only, and from files only, so it works on a live, crashed or copied directory. It looks at
small files and at the ends of large ones, never at a whole history.
"""

from retrain.records.run_row import RunRow
from retrain.status.rows import CampaignStatus, ConditionStatus, PermitHolder, PermitStatus
from retrain.status.survey import survey

__all__ = ["CampaignStatus", "ConditionStatus", "PermitHolder", "PermitStatus", "RunRow", "survey"]
