"""What a campaign leaves on disk: who writes which file, how, and how it is read back.

Every writer goes through `files` (the only module here that opens for writing, syncs, renames or
truncates), so a test that replaces its calls sees every change that a crash could cut in two.
Records never decide what happens next: they say what is there.
"""
