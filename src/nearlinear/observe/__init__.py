"""Showing a run to people: the live line, curves."""
