"""The temperature of a trained model's softmax, searched on validation (Melis et al., 2020, section 4)."""

import math

LOWEST, HIGHEST, TOLERANCE = 0.5, 2.0, 0.002


def best_temperature(loss):
    """The temperature from LOWEST to HIGHEST at which loss(temperature) is least, to about TOLERANCE, by golden-section search:
    the cross-entropy is convex in 1 / temperature."""
    shrink = (math.sqrt(5) - 1) / 2
    low, high = 1 / HIGHEST, 1 / LOWEST  # of 1 / temperature
    left, right = high - shrink * (high - low), low + shrink * (high - low)
    of_left, of_right = loss(1 / left), loss(1 / right)
    while 1 / low - 1 / high > TOLERANCE:
        if of_left <= of_right:
            high, right, of_right = right, left, of_left
            left = high - shrink * (high - low)
            of_left = loss(1 / left)
        else:
            low, left, of_left = left, right, of_right
            right = low + shrink * (high - low)
            of_right = loss(1 / right)
    return 1 / left if of_left <= of_right else 1 / right
