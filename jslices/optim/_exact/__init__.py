"""Rows without gradient, brought to where a dense optimizer would have them."""
