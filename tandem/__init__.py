"""Tandem: PPO post-training of language models, actor and critic together."""

__version__ = "0.1.0"
