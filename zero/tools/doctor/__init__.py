"""`zero doctor`: whether a machine, and the links between ranks, are fit to train on.

Each fault has a remedy.
"""
