"""Analysis of compiled training steps: memory, copies, cost, traffic."""
