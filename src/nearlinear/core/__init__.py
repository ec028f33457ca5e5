"""Values that the rest of the house passes around."""
