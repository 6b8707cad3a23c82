"""Configuration: what a TOML file may say (`schema`), and reading one with every problem at once (`load`)."""
