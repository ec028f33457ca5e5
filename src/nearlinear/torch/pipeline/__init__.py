"""A model of which every rank holds one stage, under an unchanged loop."""
