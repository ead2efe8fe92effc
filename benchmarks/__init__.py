"""Measurements of what tailrace promises, beside its peers and the raw limit of the machine. Start at README.md."""
