"""Named arrays and JSON in one folder that is whole or absent."""
