"""The learner: advantages, losses, the model and the training loop."""
