"""Rows -> terminal tables or JSON. With `cli/`, the only code that prints."""
