"""The report of a run: curves and trajectories as a page."""
