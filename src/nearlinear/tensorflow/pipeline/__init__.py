"""Training a Keras model in stages, one per process."""
