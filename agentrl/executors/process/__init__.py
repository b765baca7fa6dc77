"""Environments in processes of their own, forked from one that has loaded the agent's file."""
