"""The loop of an episode, and the scheduler that runs thousands of them."""
