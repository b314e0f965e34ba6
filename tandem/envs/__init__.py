"""Environments play one episode of a prompt; verifiers score what the policy wrote."""
