"""`zero verify`: the first steps of a user's script on the engine and on plain torch, compared
tensor by tensor.
"""
