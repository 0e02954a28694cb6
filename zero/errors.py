"""The exception for a user's mistake."""


class UsageError(ValueError, AssertionError):
    """A wrong argument, setting or order of calls; the message says which, and what to do instead.

    DeepSpeed asserts where this package raises: scripts that catch its `AssertionError` go on working.
    """
