"""Rollouts: from a prompt to a finished group, and the engines that write the tokens."""
