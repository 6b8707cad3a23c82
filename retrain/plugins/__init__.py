"""The small parts that users replace: a folder for each kind, a file or folder for each plugin.

It takes a completion, a group, a batch or a row, and hands on what the kind promises; the contract of a kind
is its `__init__`. A plugin never imports another kind, and never reads or writes the files of a campaign.
"""
