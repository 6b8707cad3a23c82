"""What a TOML file may say (`schema`), and reading one with every problem at once (`load`).

It takes a file and overrides, and hands on frozen dataclasses, checked once. It never imports what a file
asks for, except to check names and options of plugins, and never reads a record.
"""
