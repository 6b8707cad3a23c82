"""What runs inside a sandbox: sent there as text, so it imports the standard library only.

Nothing here holds a test, an expected output or a key while a program runs.
"""
