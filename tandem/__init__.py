"""Tandem: PPO post-training of language models, actor and critic together."""
