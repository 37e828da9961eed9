"""Where arrays live: memory of this process, and rows over several devices."""
