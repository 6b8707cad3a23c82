"""What campaigns gave: status, comparison, report, and policies for others to load.

It takes the files of any number of campaigns, live, crashed or copied, and hands on rows, tables, pages and
directories of weights. It never writes a record of a run, and never starts or stops one.
"""
