"""A small server that speaks the Tinker API's protocol, over the embedded numpy policy.

`python -m tests.tinker_api --state DIRECTORY --alphabet CHARACTERS` serves on a free port of
127.0.0.1 and prints it. Sessions, models and samplers live in memory and are lost with the process;
saved states are files and survive it. `POST /admin/faults` has the next requests fail, `POST
/admin/pause` pauses all calls, `GET
/admin/stats` tells how many requests were in flight at most.
"""
