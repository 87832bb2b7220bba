"""The softmax temperature of a trained model, searched on validation (Melis et al., 2020, §4).

The paper searches in [0.8, 1]. The interval here is wider, because the language models that were
trained with this package have the lowest validation loss at temperatures above 1.
"""

import math
from collections.abc import Callable

LOWEST, HIGHEST, TOLERANCE = 0.5, 2.0, 0.002


def best_temperature(loss: Callable[[float], float]) -> float:
    """The temperature from LOWEST to HIGHEST with the lowest loss(temperature).

    Golden-section search, to about TOLERANCE: the cross-entropy is convex in 1 / temperature.
    """
    shrink = (math.sqrt(5) - 1) / 2
    # low < left < right < high are values of 1 / temperature.
    low, high = 1 / HIGHEST, 1 / LOWEST
    left, right = high - shrink * (high - low), low + shrink * (high - low)
    loss_left, loss_right = loss(1 / left), loss(1 / right)
    while 1 / low - 1 / high > TOLERANCE:
        if loss_left <= loss_right:
            high, right, loss_right = right, left, loss_left
            left = high - shrink * (high - low)
            loss_left = loss(1 / left)
        else:
            low, left, loss_left = left, right, loss_right
            right = low + shrink * (high - low)
            loss_right = loss(1 / right)
    return 1 / left if loss_left <= loss_right else 1 / right
