"""Prompts by index: the built-in task, sources of rows, and chat templates to token ids."""
