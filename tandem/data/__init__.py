"""Prompts by index: the built-in task, JSON-lines sources, and chat templates to token ids."""
