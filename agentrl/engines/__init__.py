"""Rollout engines: what samples tokens."""
