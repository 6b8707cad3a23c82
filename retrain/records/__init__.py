"""The files of a campaign: which process writes each one, how it is written, and how it is read.

Every writer goes through `files` (the only module here that opens for writing, syncs, renames or
truncates), so a test that replaces its calls sees every change that a crash could interrupt.
Records decide nothing: they store facts.
"""
