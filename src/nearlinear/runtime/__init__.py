"""Moving bytes and watching peers, over any transport and without a framework."""
