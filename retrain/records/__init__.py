"""The files of a campaign: which process writes each one, how it is written, and how it is read.

It takes facts, and hands on the same facts after any crash, each once. It never decides anything, and never
computes what a file does not hold.

Every writer goes through `files` (the only module here that opens for writing, syncs, renames or
truncates, besides the appender in `lines`), so a test that replaces its calls sees every change that a
crash could interrupt. Records decide nothing: they store facts.

Every function here that touches a file raises `RecordsError`, which names the file and the remedy, if it
cannot be read or written; a failed write leaves what was there. `DamagedRecordError` is the kind raised for
a file that holds something else than its record. Only other errors are listed at a function.
"""
