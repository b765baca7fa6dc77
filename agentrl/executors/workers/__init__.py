"""Episodes in several rollout processes beside this one (`rollout.num_processes`)."""
