"""The exception for a user's mistake, and the release of DeepSpeed that decides what is one."""

# Its configuration keys and call signatures are followed.
FOLLOWED_RELEASE = "0.19.8"


class UsageError(ValueError, AssertionError):
    """A wrong argument, setting or order of calls; the message says which, and what to do instead.

    DeepSpeed asserts where this package raises: scripts that catch its `AssertionError` go on working.
    """
