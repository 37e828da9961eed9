"""Rows of arrays: what an index means, numbering, summing, reading and writing them."""
