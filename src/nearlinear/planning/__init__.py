"""Decisions as pure functions of values: no socket, clock, thread or framework."""
