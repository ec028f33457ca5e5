"""A checkpoint on disk: named arrays and JSON in one folder that is whole or absent."""
