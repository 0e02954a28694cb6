"""`zero verify` runs the first steps of a user's script on the engine and on plain torch, and
compares them tensor by tensor.
"""
