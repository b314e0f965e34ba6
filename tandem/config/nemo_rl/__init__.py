"""Recipes written for NeMo-RL, read and said again in Tandem's keys."""
