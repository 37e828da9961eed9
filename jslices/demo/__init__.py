"""The demonstration: word vectors trained with row gradients, in one command."""
