"""Turning timed messages into numbers about links."""
