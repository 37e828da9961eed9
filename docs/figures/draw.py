"""Draws the pictures of the pages, light and dark: ``python docs/figures/draw.py``."""

import exchange
import gradient
import history
import keyed
import speed
import step

if __name__ == "__main__":
    for module in (gradient, step, exchange, speed, history, keyed):
        module.main()
