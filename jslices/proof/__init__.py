"""What a compiled training step does with its memory."""
