"""Decisions of a running campaign, and what they read and share.

It takes measurements, and hands on decisions with their reasons (`rules`, which are pure: no clock, no
randomness, no I/O), permits for calls of an API that processes share (`semaphore`), and the load of this
machine (`machine`). It never samples, trains or writes a record.
"""
