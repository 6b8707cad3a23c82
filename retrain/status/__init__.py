"""Reads a log directory into rows of campaigns, conditions and runs.

It only reads files, so it works on a live, crashed or copied directory. It reads small files and the
ends of large ones, never a whole history.
"""

from retrain.records.run_row import RunRow
from retrain.status.survey import CampaignStatus, ConditionStatus, PermitHolder, PermitStatus, survey

__all__ = ["CampaignStatus", "ConditionStatus", "PermitHolder", "PermitStatus", "RunRow", "survey"]
