"""File locks: held by a process for as long as it lives, and leases where locks reach no other machine."""
