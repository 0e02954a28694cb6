"""`zero doctor` checks whether a machine, and the links between ranks, are fit for training.

Each fault has a remedy.
"""
