"""A local web page over campaigns, live while they run: the rows of `status` and the charts of `report`.

It takes a log directory and hands on answers to a browser of this machine. It reads files only, as `status`
does, so it works on copied directories, and several may look at once. To stop or resume a campaign it starts
the command that does it; it writes nothing itself.
"""
