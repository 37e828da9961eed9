"""From a rule to an optimizer: how a step is planned, and how it is run."""
