"""Campaigns: from a plan to finished runs, whatever fails on the way."""
