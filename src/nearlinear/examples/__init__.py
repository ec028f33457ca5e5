"""Two training scripts on real data, as a user writes them; `nearlinear demo` runs both."""
