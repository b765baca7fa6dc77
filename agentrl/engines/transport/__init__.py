"""How weights travel from the learner into engines: one interface, several ways."""
