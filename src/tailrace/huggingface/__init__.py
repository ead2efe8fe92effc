"""Hugging Face models: what their files hold, and importing them."""
