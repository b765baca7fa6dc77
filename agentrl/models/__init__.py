"""Policies and tokenizers: how they are loaded, made and saved."""
