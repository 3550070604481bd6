"""Hugging Face: routing health, and what else joins Moiety to `transformers`."""
