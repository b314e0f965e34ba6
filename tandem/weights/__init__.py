"""Weights on their way from the trainer to the engines, proven equal at every sync."""
