"""Views that several commands share; with `cli/`, where a command has its own, the only code that prints."""
