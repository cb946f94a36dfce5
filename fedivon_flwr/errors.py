"""The one exception that is shown to users as a sentence instead of a traceback."""


class UserError(Exception):
    """Bad input: the message is one sentence that says what to do about it."""
