"""Colours that colour-blind readers can tell apart (Okabe and Ito), with hatches and markers that read in grey."""

from __future__ import annotations

BLUE, ORANGE, GREEN, VERMILLION = "#0072B2", "#E69F00", "#009E73", "#D55E00"
SKY, PURPLE, YELLOW, GREY, BLACK = "#56B4E9", "#CC79A7", "#F0E442", "#767676", "#000000"

CURVES = (BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, BLACK, GREY)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", "-.", ":")
HATCHES = ("", "////", "....", "xxxx", "\\\\\\\\", "++++", "oooo", "----")

BARS = (
    ("test_accuracy", "test accuracy", BLUE, ""),
    ("remain_accuracy", "remaining accuracy", SKY, "////"),
    ("forget_accuracy", "forget accuracy", ORANGE, "...."),
    ("mia", "membership inference", "#BBBBBB", "xxxx"),
)
"""Key, label, colour and hatch of the four bars of Figure 1."""
